"""Copy the script's Python environment to each node's local disk, so that agents start from the copy.

One copy on a node serves all jobs that use the environment. Without a copy, hundreds of tasks that import TensorFlow
from a shared file system wait for its metadata, for minutes. sbcast sends one archive, and each node unpacks it. The
nodes run shell scripts for this, because they would read Python itself from the shared file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tf4slurm.errors import LaunchError, Tf4SlurmError
from tf4slurm.jobs.formatting import format_bytes, format_count
from tf4slurm.launch.environment_archive import (
    CACHE_BYTES,
    IN_USE_SECONDS,
    STAGING_SECONDS,
    UNUSED_SECONDS,
    File,
    Relocation,
    find_environment,
    fingerprint,
    list_files,
    open_archive,
)
from tf4slurm.launch.node_copies import COMPLETE, FIND, LOCK_AND_RUN, UNPACK, parse_answers
from tf4slurm.slurm.commands import srun_on_each_node_command
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec.job_spec import ACTIVE_ENVIRONMENT, JobSpec
from tf4slurm.system.threads import in_thread

logger = logging.getLogger(__name__)

_END_SECONDS = 2.0  # after SIGTERM
_SEARCH_PATHS = frozenset(
    ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX")
)
"""The variables in which paths of the Python environment are replaced by paths of its copy. Other variables are not
changed, because they may name places to write to."""


class StagedEnvironment(NamedTuple):
    """The copy of a Python environment on the nodes. It has the same path on each node.

    Attributes:
        directory: The directory of the copy.
        program: The path of Python in the copy.
        relocate: Replaces paths of the environment by those of the copy.
    """

    directory: str
    program: str
    relocate: Relocation

    def command(self, agent: Sequence[str], script: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs an agent and its child from the copy.

        The command holds a lock until it exits, so that no other job removes the copy.

        Args:
            agent: The command of the agent, without the child's.
            script: The child's command. Its program is run from the copy if the copy has it. Its arguments are not
                changed, because they may name places to write to.
        """
        program, *arguments = script
        if os.sep in program:  # else it is found on PATH
            path = os.path.abspath(program)
            program = program if self.relocate(path) == path else self.relocate(path)
        return ("sh", "-c", LOCK_AND_RUN, self.directory, *map(self.relocate, agent), program, *arguments)

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with paths of the environment replaced by those of the copy.

        Only the variables of `_SEARCH_PATHS` are changed, such as PATH and PYTHONPATH. The directory of the copy's
        Python comes first on PATH.
        """
        result = {name: self.relocate(value) if name in _SEARCH_PATHS else value for name, value in environ.items()}
        result["PATH"] = f"{os.path.dirname(self.program)}:{result.get('PATH', os.defpath)}"
        return result


class _Source(NamedTuple):
    """What the nodes receive to make their copies: an archive of the Python environment.

    Attributes:
        environment: The copy that each node will have.
        archive: Path of the archive. `_open_archive` writes it unless it exists or the user has given it.
        part: Directory below the copy into which a node unpacks the archive, such as "." or "0".
        num_bytes: Size of `files`, or of the archive that the user has given.
        files: The files in the archive. Empty if the user has given the archive.
    """

    environment: StagedEnvironment
    archive: Path
    part: str
    num_bytes: int
    files: list[File]


async def stage_environment(
    spec: JobSpec, allocation: SlurmAllocation, environ: Mapping[str, str], on_copy: Callable[[str], None]
) -> StagedEnvironment | None:
    """Copy the Python environment of a job to all nodes of its allocation, unless they all have it.

    This takes at most 30 min.

    Args:
        environ: The environment variables for srun and sbcast, and to find the script's Python.
        on_copy: Called with a description when the copying begins. Not called if all nodes have the copy.

    Returns:
        The copy. None, after a warning with the reason, if the environment cannot be copied.
    """
    stopped = threading.Event()
    try:
        return await asyncio.wait_for(_stage(spec, allocation, environ, on_copy, stopped), STAGING_SECONDS)
    except asyncio.TimeoutError:
        reason = f"copying took longer than {STAGING_SECONDS:g} s."
    except (Tf4SlurmError, OSError) as error:
        reason = str(error)
    except Exception as error:  # a copy must never end a job, which runs without it
        reason = f"{type(error).__name__}: {error}"
    finally:
        stopped.set()  # ends the thread that packs
    logger.warning("--stage-env: the tasks start from the environment itself: %s", reason)
    return None


async def _stage(
    spec: JobSpec,
    allocation: SlurmAllocation,
    environ: Mapping[str, str],
    on_copy: Callable[[str], None],
    stopped: threading.Event,
) -> StagedEnvironment:
    if allocation.components:
        raise LaunchError("this is a heterogeneous job.", command=())
    source = await in_thread(_find_source, spec, environ)
    parent, name = os.path.split(source.environment.directory)
    num_nodes = allocation.num_nodes or 1

    async def on_nodes(script: str, *arguments: object) -> dict[str, str]:
        command = srun_on_each_node_command(num_nodes, ("sh", "-c", script, "sh", parent, name, *map(str, arguments)))
        return parse_answers(await _run(command, environ))

    needed = source.num_bytes // 512  # kilobytes, for the archive and its files
    answers = await on_nodes(FIND, needed, CACHE_BYTES // 1024, int(IN_USE_SECONDS) // 60, UNUSED_SECONDS // 60)
    if any(answer != COMPLETE for answer in answers.values()):
        for node, answer in answers.items():
            _check_free(node, answer, parent, needed)
        on_copy(f"copying the environment ({format_bytes(source.num_bytes)}) to {format_count(num_nodes, 'node')}")
        received = f"{name}.{allocation.job_id}.{os.getpid()}.tar"
        with await in_thread(_open_archive, source, stopped) as archive:  # open, because another file may get its name
            path = f"/proc/{os.getpid()}/fd/{archive.fileno()}"
            await _run(("sbcast", "--force", path, f"{parent}/{received}"), environ)
        answers = await on_nodes(UNPACK, received, source.environment.program, source.part)
    for node, answer in answers.items():
        if answer != COMPLETE:
            raise LaunchError(f"node {node}: {answer}", command=())
    if len(answers) < num_nodes:
        raise LaunchError(f"only {len(answers)} of {num_nodes} nodes have answered.", command=())
    return source.environment


def _check_free(node: str, answer: str, parent: str, needed: int) -> None:
    """Check that a node has the copy, or at least `needed` free kilobytes for it.

    `answer` is what the shell script `FIND` has printed on the node: that the copy is complete, the free space, or an
    error. `parent` is the directory of all copies, for the error message.

    Raises:
        LaunchError: The node has neither, or `answer` is an error.
    """
    free = re.fullmatch(r"free: (\d+)", answer)
    if free is None and answer != COMPLETE:
        raise LaunchError(f"node {node}: {answer}", command=())
    if free is not None and int(free[1]) < needed:
        raise LaunchError(
            f"node {node} has {format_bytes(int(free[1]) * 1024)} free in {parent}, and the environment needs "
            f"{format_bytes(needed * 1024)}. Free space there, or choose another --stage-directory.",
            command=(),
        )


def _find_source(spec: JobSpec, environ: Mapping[str, str]) -> _Source:
    """Return the archive of the job's Python environment, which may not be written yet, and the copies to make of it.

    Raises:
        LaunchError: The script's Python is not found, its environment is part of the system, or the job writes to a
            directory in the environment.
        OSError: The archive that the user has given does not exist.
    """
    assert spec.stage_env is not None
    python = find_environment(spec.script_python or "python3", environ)
    is_active = spec.stage_env == ACTIVE_ENVIRONMENT
    directories = python.directories if is_active else (python.prefix,)
    if not directories:
        raise LaunchError(f"{python.program} is part of the system, which is on each node's own disk.", command=())
    for each in directories:
        _check_nothing_is_written_below(each, spec)
    given = Path(spec.stage_env).absolute()
    files = list_files(python) if is_active else [File(str(given), given.name, given.stat())]
    parent = f"{spec.stage_directory.absolute()}/tf4slurm-{os.getuid()}"
    name = f"env-{fingerprint(files, parent)}"
    directory = f"{parent}/{name}"
    parts = {path: f"{directory}/{index}" for index, path in enumerate(directories)}
    relocate = Relocation({os.path.realpath(path): part for path, part in parts.items()} | parts)
    num_bytes = sum(file.facts.st_size for file in files)
    if is_active:
        archive = spec.runs_directory.absolute() / f".environments-{os.getuid()}" / f"{name}.tar"
        environment = StagedEnvironment(directory, relocate(python.program), relocate)
        return _Source(environment, archive, ".", num_bytes, files)
    return _Source(StagedEnvironment(directory, f"{directory}/0/bin/python", relocate), given, "0", num_bytes, [])


def _check_nothing_is_written_below(environment: str, spec: JobSpec) -> None:
    """Raise LaunchError if the working directory or the parent of the run directories is in `environment`."""
    for what, path in (("working directory", Path.cwd()), ("directory of run directories", spec.runs_directory)):
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(environment)):
            raise LaunchError(
                f"the {what}, {str(path.absolute())!r}, is in the environment {environment!r}, whose copies are on the "
                'nodes\' own disks. Make the environment in a directory of its own, such as "python -m venv .venv", or '
                "choose another --runs-directory and working directory.",
                command=(),
            )


def _open_archive(source: _Source, stopped: threading.Event) -> IO[bytes]:
    """Open the archive that the user has given, or else the archive of `source.files`, which is written if missing.

    Another thread sets `stopped` to end the writing.
    """
    if not source.files:
        return source.archive.open("rb")
    return open_archive(source.archive, source.files, source.environment.relocate, stopped)


async def _run(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a program to its end. Return its output.

    Raises:
        LaunchError: The program cannot be started, or fails.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C must reach the launcher only
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}.", command=command) from error
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
    if process.returncode:
        words = errors.decode(errors="replace").strip()[-500:]
        raise LaunchError(f"{command[0]} exited with code {process.returncode}: {words}", command=command)
    return output.decode(errors="replace")
