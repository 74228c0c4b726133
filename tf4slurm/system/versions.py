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

_VERSIONS = """
import importlib.metadata, json, platform
found = {"python": platform.python_version()}
packages = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tensorflow-macos"),
    "keras": ("keras",),
    "tf_keras": ("tf_keras",),
}
for name, candidates in packages.items():
    for candidate in candidates:
        try:
            found.setdefault(name, importlib.metadata.version(candidate))
        except importlib.metadata.PackageNotFoundError:
            pass
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


def read_versions(python: str) -> dict[str, str]:
    """Return the versions of the interpreter `python` and its packages, without importing TensorFlow.

    The keys are "python", and as far as installed, "tensorflow", "keras" and "tf_keras". The result is empty if the
    interpreter cannot be run within 20 s.
    """
    output = read_output(python, "-c", _VERSIONS) if python else None
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
