"""Find the TensorFlow of each Python on PATH, of modules and of a container, and say what works with its version.

Versions are read from the files of each Python's packages: TensorFlow is not imported.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TypedDict

from tf4slurm.agent.container import container_command
from tf4slurm.doctor.finding import Finding
from tf4slurm.errors import CommandError
from tf4slurm.system.versions import read_versions

RESULTS = "tensorflow_tests.json"
WORKS = "works"
FAILS = "fails"
_TOPIC = "tensorflow version"
_LOAD = '''type module >/dev/null 2>&1 || . /etc/profile
module load "$1" >&2 || exit 3
shift
exec "$(command -v python || command -v python3)" "$@"'''


class VersionTests(TypedDict):
    """Results of tf4slurm's own tests with a version of TensorFlow.

    `tensorflow` and `python` are the exact versions. `jobs` has by the description of a job "works", "fails", or the
    error with which the script is refused.
    """

    tensorflow: str
    python: str
    jobs: dict[str, str]


def read_tensorflow_tests() -> dict[str, VersionTests]:
    """Return the results of tf4slurm's own tests by version of TensorFlow, such as "2.13", oldest first."""
    text = resources.files("tf4slurm.doctor").joinpath(RESULTS).read_text(encoding="utf-8")
    found: dict[str, VersionTests] = json.loads(text)
    return found


def describe_version(version: str) -> str:
    """Return in a clause what works with a version of TensorFlow, by the tests with it or with its neighbours."""
    tests, own = read_tensorflow_tests(), _numbers(version)
    older = [each for each in tests if _numbers(each) <= own]
    newer = [each for each in tests if _numbers(each) > own]
    name = ".".join(version.split(".")[:2])
    if name in tests:
        return f"tested with this tf4slurm: {_describe_jobs(tests[name]['jobs'])}"
    if not older:
        return f"not tested with this tf4slurm, and older than each tested version ({', '.join(tests)})"
    bounds = f"{older[-1]}{f' and {newer[0]}' if newer else ', the newest tested version'}"
    return f"not tested with this tf4slurm; like {bounds}: {_describe_jobs(tests[older[-1]]['jobs'])}"


def _describe_jobs(jobs: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, result in jobs.items():
        names.setdefault(result, []).append(name)
    if list(names) == [WORKS]:
        return "all works"
    heads = {result: result if result in (WORKS, FAILS) else f'Ends with "{result.rstrip(".")}"' for result in names}
    return ". ".join(f"{heads[result]}: {'; '.join(each)}" for result, each in names.items())


def check_versions(environ: Mapping[str, str], modules: Sequence[str], container: str | None) -> Iterator[Finding]:
    """Yield a finding for each TensorFlow: of this Python, of each Python on PATH, of the modules and of the container.

    A Python on PATH without TensorFlow has no finding.

    Args:
        environ: The environment variables, with PATH and those of the module system.
        modules: Names of environment modules, such as "tensorflow/2.13". Each is loaded by itself.
        container: The image of a container, as in --container, or None.
    """
    yield from _describe("this Python", read_versions(sys.executable), is_given=False)
    for path in _pythons_on_path(environ):
        yield from _describe(path, read_versions(path), is_given=False)
    for module in modules:
        yield from _describe(f"module {module}", read_versions("bash", "-c", _LOAD, "bash", module), is_given=True)
    if container is not None:
        try:
            command = container_command(container, ("python3",), (), environ, sees_gpus=False)
        except CommandError as error:
            yield Finding("warn", _TOPIC, str(error))
        else:
            yield from _describe(f"container {container}", read_versions(*command), is_given=True)


def _describe(place: str, found: Mapping[str, str], *, is_given: bool) -> Iterator[Finding]:
    """Yield the finding about the versions `found` at a place. Without TensorFlow, yield one if the user named it."""
    if "tensorflow" in found:
        python, version = found["python"], found["tensorflow"]
        yield Finding("ok", _TOPIC, f"{place}: TensorFlow {version}, Python {python}; {describe_version(version)}")
    elif is_given:
        reason = f"Python {found['python']} has no TensorFlow" if found else "it has no Python that runs here"
        yield Finding("warn", _TOPIC, f"{place}: {reason}", "Check its name, and that this host can use it.")


def _pythons_on_path(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the path of one Python for each environment on PATH, but not that of this process."""
    seen = {os.path.realpath(sys.prefix)}
    for directory in filter(None, environ.get("PATH", "").split(os.pathsep)):
        for name in ("python", "python3"):
            path = os.path.join(directory, name)
            prefix = os.path.realpath(os.path.dirname(directory))  # the Python of a virtual environment is a link
            if prefix not in seen and os.access(path, os.X_OK):
                seen.add(prefix)
                yield path


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
