"""Copy the script's environment to each node's local disk, once for all jobs that use it; agents start from the copy.

Hundreds of tasks that import TensorFlow from a shared file system wait for its metadata, for minutes. sbcast sends one
archive instead, and each node unpacks it. The nodes run shell scripts for this, because they would read Python itself
from the shared file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tf4slurm.errors import LaunchError
from tf4slurm.jobs.formatting import format_bytes, format_count
from tf4slurm.launch.environment_archive import (
    File,
    Relocation,
    find_environment,
    fingerprint,
    list_files,
    write_archive,
)
from tf4slurm.slurm.commands import srun_on_each_node_command
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec import ACTIVE_ENVIRONMENT, JobSpec
from tf4slurm.system.threads import in_thread

logger = logging.getLogger(__name__)

_ARCHIVES = ".environments"  # in the directory of run directories
_COMPLETE = "complete"
_LIMIT_SECONDS = 1800.0  # for all of it
_END_SECONDS = 2.0  # after SIGTERM

# $1: directory of all copies. $2: name of this copy. $3: kilobytes that it needs.
# Other copies are removed if no agent uses (locks) them and no job has for a week, or ten minutes if space is short.
_FIND = r"""
umask 077
answer() { echo "${SLURMD_NODENAME:-$(hostname)} $*"; }
mkdir -p "$1" 2>/dev/null
if [ -L "$1" ] || [ ! -O "$1" ]; then answer "error: $1 is not a directory of this user"; exit; fi
cd "$1" || exit
remove() {
  find . -mindepth 1 -maxdepth 1 -name 'env-*' ! -name "$1*" "$2" "$3" | while read -r old; do
    if [ -d "$old" ]; then flock -nx "$old" rm -rf "$old"; else rm -f "$old"; fi
  done
}
free() { df -Pk . | awk 'NR == 2 {print $4}'; }
remove "$2" -mtime +7
if [ -e "$2/.complete" ]; then touch "$2"; answer complete; exit; fi
[ "$(free)" -ge "$3" ] || remove "$2" -mmin +10
answer "free: $(free)"
"""
# $1, $2: as before. $3: name of the archive. $4: program that must run. $5: where the archive's files belong, below $2.
_UNPACK = r"""
umask 077
cd "$1" || exit
unpack() {
  rm -rf "$2" && mkdir -p "$2/$4" && tar -xf "$1" -C "$2/$4" || return
  if [ -x "$2/0/bin/conda-unpack" ]; then "$2/0/bin/python" "$2/0/bin/conda-unpack" || return; fi
  "$3" -c "" && touch "$2/.complete"
}
exec 9>"$2.lock"
flock 9   # another job may unpack the same environment at this moment
if [ -e "$2/.complete" ] || error=$(unpack "$3" "$2" "$4" "$5" 2>&1); then result=complete
else rm -rf "$2"; result="error: $(echo "$error" | tail -n 2 | tr '\n' ' ')"; fi
rm -f "$3"
echo "${SLURMD_NODENAME:-$(hostname)} $result"
"""
_LOCK_AND_RUN = 'exec 9<"$0" && flock -s 9; exec "$@"'  # until the agent exits, this copy is not removed


class StagedEnvironment(NamedTuple):
    """The environment on the nodes: its directory, its Python `program`, and the paths that it replaces."""

    directory: str
    program: str
    relocate: Relocation

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs `words` from the copy."""
        return ("sh", "-c", _LOCK_AND_RUN, self.directory, *map(self.relocate, words))

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables with the paths of the copy, whose programs come first on PATH."""
        result = {name: self.relocate(value) for name, value in environ.items()}
        result["PATH"] = f"{os.path.dirname(self.program)}:{result.get('PATH', os.defpath)}"
        return result


class _Source(NamedTuple):
    """What is copied to the nodes.

    Attributes:
        environment: The environment on the nodes.
        archive: Its archive, which `_pack` makes unless it exists.
        part: Directory below the environment's that the archive's files belong in.
        num_bytes: Size of the unpacked environment.
        files: What `_pack` packs; empty if the user has given the archive.
    """

    environment: StagedEnvironment
    archive: Path
    part: str
    num_bytes: int
    files: list[File]


async def stage_environment(
    spec: JobSpec, allocation: SlurmAllocation, environ: Mapping[str, str], on_copy: Callable[[str], None]
) -> StagedEnvironment | None:
    """Copy the environment of a job to all nodes of its allocation, unless they have it.

    Args:
        environ: The environment variables for srun and sbcast.
        on_copy: Called with a sentence when the copying begins.

    Returns:
        The copy; None if that is impossible, after a warning with the reason.
    """
    stopped = threading.Event()
    try:
        return await asyncio.wait_for(_stage(spec, allocation, environ, on_copy, stopped), _LIMIT_SECONDS)
    except asyncio.TimeoutError:
        reason = f"copying took longer than {_LIMIT_SECONDS:g} s."
    except (LaunchError, OSError) as error:
        reason = str(error)
    finally:
        stopped.set()  # for the thread that packs
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

    async def on_nodes(script: str, *arguments: str) -> dict[str, str]:
        command = srun_on_each_node_command(num_nodes, ("sh", "-c", script, "sh", parent, name, *arguments))
        output = await _run(command, environ)
        return dict(line.partition(": ")[2].split(" ", 1) for line in output.splitlines())

    needed = source.num_bytes // 512  # kilobytes, for the archive and its files
    answers = await on_nodes(_FIND, str(needed))
    if any(answer != _COMPLETE for answer in answers.values()):
        for node, answer in answers.items():
            _check_free(node, answer, parent, needed)
        on_copy(f"copying the environment ({format_bytes(source.num_bytes)}) to {format_count(num_nodes, 'node')}")
        await in_thread(_pack, source, stopped)
        received = f"{name}.{allocation.job_id}.tar"
        await _run(("sbcast", "--force", str(source.archive), f"{parent}/{received}"), environ)
        answers = await on_nodes(_UNPACK, received, source.environment.program, source.part)
    for node, answer in answers.items():
        if answer != _COMPLETE:
            raise LaunchError(f"node {node}: {answer}", command=())
    if len(answers) < num_nodes:
        raise LaunchError(f"only {len(answers)} of {num_nodes} nodes have answered.", command=())
    return source.environment


def _check_free(node: str, answer: str, parent: str, needed: int) -> None:
    """Check that a node can take the copy: its answer is "complete", or names enough free kilobytes."""
    kind, _, value = answer.partition(": ")
    if kind == "free" and int(value) < needed:
        raise LaunchError(
            f"node {node} has {format_bytes(int(value) * 1024)} free in {parent}, and the environment needs "
            f"{format_bytes(needed * 1024)}. Free space there, or choose another --stage-directory.",
            command=(),
        )
    if kind not in ("free", _COMPLETE):
        raise LaunchError(f"node {node}: {answer}", command=())


def _find_source(spec: JobSpec, environ: Mapping[str, str]) -> _Source:
    """Return what to copy.

    Raises:
        LaunchError: The environment is unknown or part of the system, or the archive does not exist.
    """
    assert spec.stage_env is not None
    python = find_environment(spec.script_python or "python3", environ)
    if spec.stage_env == ACTIVE_ENVIRONMENT:
        files, directories = list_files(python), python.directories
        if not directories:
            raise LaunchError(f"{python.program} is part of the system, which is on each node's own disk.", command=())
    else:
        given = Path(spec.stage_env).absolute()
        files, directories = [File(str(given), given.name, given.stat())], (python.prefix,)
    parent = f"{spec.stage_directory.absolute()}/tf4slurm-{os.getuid()}"
    name = f"env-{fingerprint(files, parent)}"
    directory = f"{parent}/{name}"
    parts = {path: f"{directory}/{index}" for index, path in enumerate(directories)}
    relocate = Relocation({os.path.realpath(path): part for path, part in parts.items()} | parts)
    num_bytes = sum(file.facts.st_size for file in files)
    if spec.stage_env == ACTIVE_ENVIRONMENT:
        archive = spec.runs_directory.absolute() / _ARCHIVES / f"{name}.tar"
        environment = StagedEnvironment(directory, relocate(python.program), relocate)
        return _Source(environment, archive, ".", num_bytes, files)
    return _Source(StagedEnvironment(directory, f"{directory}/0/bin/python", relocate), given, "0", num_bytes, [])


def _pack(source: _Source, stopped: threading.Event) -> None:
    """Make the archive if it does not exist; else note that it is used."""
    if source.files:
        try:
            os.utime(source.archive)
        except FileNotFoundError:
            write_archive(source.archive, source.files, source.environment.relocate, stopped)


async def _run(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a program to its end; return its output.

    Raises:
        LaunchError: It cannot be started, or fails.
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
