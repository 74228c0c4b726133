"""Check before a submission that the environment of a batch script exists, with a Python that has this tf4slurm."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import BinaryIO

from tf4slurm import __version__
from tf4slurm.errors import OptionError
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.options import options_by_key
from tf4slurm.submission.batch_script import environment_lines
from tf4slurm.system.program import read_line

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS, _MAX_BYTES = 0.02, 10**6
_MAX_CHARACTERS = 600  # of the environment's own error message
_MARK = "tf4slurm-check:"
_SKIP = "If only the nodes of the job have it, add --no-check-env."

_PROBE = """
import sys
found = {"python": sys.executable}
try:
    import tf4slurm
    found["version"], found["place"] = tf4slurm.__version__, tf4slurm.__file__
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    if tf4slurm.__version__ == sys.argv[1]:
        import tf4slurm.launch.start
except BaseException as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
import json
print("\\n" + json.dumps(found))
"""
"""A Python program that prints a JSON object. As `python -m tf4slurm`, it imports no other module from the working
directory. The argument is the version whose dependencies are imported, too."""


def check_environment(spec: BatchSpec, environ: Mapping[str, str], *, runs_tf4slurm: bool) -> None:
    """Run the lines of the batch script that set up its environment, and then the Python that it runs tf4slurm with.

    Nothing is run if the script sets up no environment and has the Python of this process, or with --no-check-env. The
    lines of --prologue are not run, because they may do more than set up an environment. If there are some, what the
    Python lacks is a warning.

    Args:
        spec: The job.
        environ: The environment variables of sbatch.
        runs_tf4slurm: Whether the script runs tf4slurm, so that its Python is needed.

    Raises:
        OptionError: The environment cannot be set up on this host, its Python cannot be run or lacks this version of
            tf4slurm, or the check does not end within 60 s.
    """
    if not spec.check_env or not (spec.has_environment or (spec.python and runs_tf4slurm)):
        return
    directory = _find_directory(spec)
    check_venv(spec)
    lines = [f"echo {shlex.quote(_MARK + option)}\n{line}" for option, line in environment_lines(spec)]
    if runs_tf4slurm:
        if spec.directory is not None and spec.directory.is_dir():
            lines.append(f"cd {shlex.quote(str(spec.directory))} || exit 3")
        lines.append(f"echo {_MARK}\n{shlex.quote(spec.tf4slurm[0])} -c {shlex.quote(_PROBE)} {__version__}")
    returncode, output, errors = _run("\n".join(lines), environ, spec, directory)
    marks = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    reached = marks[-1] if marks else ""
    words = errors.strip()[-_MAX_CHARACTERS:] or "there is no error message"
    if reached and (returncode != 0 or runs_tf4slurm):
        end = f"fails on this host with exit code {returncode}" if returncode else "ends the batch script"
        raise OptionError(f"{_describe(spec, reached)} {end}: {words}\n{_SKIP}", option=reached)
    if not runs_tf4slurm:
        return
    found: Mapping[str, str] = {}
    with contextlib.suppress(ValueError):
        found = read_line(output, "{")
    if problem := _find_problem(spec, returncode, found, words):
        if not spec.prologue:
            raise OptionError(f"{problem} {_SKIP}", option="python" if spec.python else _options(spec)[0])
        logger.warning("unless --prologue changes it: %s", problem)


def check_venv(spec: BatchSpec) -> None:
    """Check that the virtual environment of --venv exists, unless --no-check-env is given.

    Raises:
        OptionError: It does not exist on this host.
    """
    if not spec.check_env or not spec.venv:
        return
    activate = os.path.join(_find_directory(spec), spec.venv, "bin", "activate")
    if not os.path.isfile(activate):
        text = f"--venv {spec.venv!r} is no virtual environment: {activate!r} does not exist. Check the path."
        raise OptionError(f"{text} {_SKIP}", option="venv")


def _find_directory(spec: BatchSpec) -> str:
    """Return the directory of --chdir, in which the job's environment is set up, or "" for the current one."""
    directory = spec.sbatch_options.get("chdir", "")
    return directory if os.path.isdir(directory) else ""  # only the nodes of the job may have it


def _find_problem(spec: BatchSpec, returncode: int, found: Mapping[str, str], words: str) -> str:
    """Return why the Python of the environment cannot run this version of tf4slurm, with advice, or "" if it can.

    Args:
        returncode: Exit code of the Python.
        found: What it has printed (`_PROBE`), empty if it has not run.
        words: Its error message.
    """
    after = f" after --{', --'.join(_options(spec))}" if _options(spec) else ""
    if not found:
        text = f"The Python of the job, {spec.tf4slurm[0]!r}{after}, cannot be run: {words} (exit code {returncode})."
        return f"{text} Name one with --python, or check the environment."
    python, version = shlex.quote(found.get("python") or spec.tf4slurm[0]), found.get("version")
    install = f'Install this version there, such as with "{python} -m pip install tf4slurm=={__version__}".'
    if version is not None and version != __version__:
        text = f"The Python of the job, {python}{after}, has tf4slurm {version} ({found.get('place')}), this is"
        return f"{text} {__version__}. {install}"
    if error := found.get("error"):
        return f"The Python of the job, {python}{after}, cannot import tf4slurm: {error}. {install}"
    return ""


def _describe(spec: BatchSpec, option: str) -> str:
    each = options_by_key(BatchSpec)[option]
    return shlex.join(each.to_arguments(getattr(spec, each.name)))


def _options(spec: BatchSpec) -> list[str]:
    return list(dict.fromkeys(option for option, _ in environment_lines(spec) if option != "env"))


def _run(text: str, environ: Mapping[str, str], spec: BatchSpec, directory: str) -> tuple[int, str, str]:
    """Run lines of bash, in `directory` unless it is "". Return the exit code, standard output and error output.

    Processes that bash leaves in the background are killed. The output goes to files, because such a process could
    keep a pipe open.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            ("/bin/bash", "-c", text),
            cwd=directory or None,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        ) as process:
            try:
                has_ended = _wait(process.pid)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        if not has_ended:
            option = (_options(spec) or ["python"])[0]
            raise OptionError(
                f"The check of the job's environment (--{option}) did not end within {_TIMEOUT_SECONDS:g} s on this "
                "host. Try again, or omit it with --no-check-env.",
                option=option,
            )
        return process.returncode, _read(output), _read(errors)


def _wait(process_id: int) -> bool:
    """Wait at most 60 s for the end of a child. Return whether it has ended. It stays a zombie.

    As long as it is one, the id of its process group cannot be in use again.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _read(file: BinaryIO) -> str:
    """Return the end of what was written to a file, at most 1 MB."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
    return file.read(_MAX_BYTES).decode(errors="replace")
