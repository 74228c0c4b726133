"""Read the versions of a Python's packages from their metadata, and the git commit of a directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tf4slurm.system.program import read_line, read_output

COMMIT_FILE = ".tf4slurm-commit"
"""Name of the file in a snapshot (a copy of the user's code) that contains the commit of the original."""

# For Python 3.6, too: importlib.metadata came with 3.8.
_VERSIONS = """
import json, os, platform, re, sys
installed = {}
for directory in filter(os.path.isdir, sys.path):
    for entry in os.listdir(directory):
        match = re.match(r"(.+?)-([^-]+)(-py[0-9.]+)?[.](dist|egg)-info$", entry)
        if match:
            installed.setdefault(match.group(1).lower().replace("-", "_"), match.group(2))
found = {"python": platform.python_version()}
packages = {
    "tensorflow": [
        *("tensorflow", "tensorflow_cpu", "tensorflow_gpu", "tensorflow_rocm", "tf_nightly", "tensorflow_macos"),
    ],
    "keras": ("keras",),
    "tf_keras": ("tf_keras",),
}
for name, candidates in packages.items():
    for candidate in candidates:
        if candidate in installed:
            found.setdefault(name, installed[candidate])
print(json.dumps(found))
"""


def explain_difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return a clause about TensorFlow and Python that differ in more than the last number, or "" if none does.

    Versions that are not known do not differ. Both arguments are results of `read_versions`.
    """
    names = {"tensorflow": "TensorFlow", "python": "Python"}
    return " and ".join(
        f"{shown} {own[name]} here and {other[name]} in the tasks"
        for name, shown in names.items()
        if name in own and name in other and own[name].split(".")[:2] != other[name].split(".")[:2]
    )


def read_versions(*python: str) -> dict[str, str]:
    """Return the versions of an interpreter and its packages, without importing TensorFlow.

    `python` is the path of the interpreter, or a command to which the interpreter's arguments are added.

    The keys are "python", and as far as installed, "tensorflow", "keras" and "tf_keras". The result is empty if the
    interpreter cannot be run within 20 s.
    """
    output = read_output(*python, "-c", _VERSIONS) if all(python) else None
    with contextlib.suppress(ValueError):
        found: dict[str, str] = read_line(output or "", "{")
        return found
    return {}


class Commit(NamedTuple):
    """A git commit: its hash (`name`), and whether tracked files have uncommitted changes (`is_dirty`)."""

    name: str
    is_dirty: bool


def read_commit(directory: Path) -> Commit | None:
    """Return the git commit of a directory. For a snapshot (a copy of the user's code), return that of the original.

    The result is None if git is not installed or tracks no file of the directory.
    """
    with contextlib.suppress(OSError, ValueError):
        name, is_dirty = json.loads((directory / COMMIT_FILE).read_text(encoding="utf-8"))
        return Commit(str(name), bool(is_dirty))
    git = ("git", "--no-optional-locks", "-C", str(directory))
    commit = read_output(*git, "rev-parse", "HEAD")
    changes = read_output(*git, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None or not read_output(*git, "ls-files"):
        return None
    return Commit(commit.strip(), bool(changes))
