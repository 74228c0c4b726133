"""Submit a batch script with sbatch in a clean environment, and read the job's id."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tf4slurm.errors import LaunchError, RefusedError
from tf4slurm.slurm.commands import run_program
from tf4slurm.slurm.environ import VISIBLE_DEVICES, SlurmAllocation
from tf4slurm.system.variables import AGENT_VARIABLES, SCRIPT_VARIABLES

_TIMEOUT_SECONDS = 60.0  # without a controller, sbatch fails after several MessageTimeouts of 10 s
_KEPT = frozenset(("SLURM_CONF", "SLURM_JWT"))  # the cluster's configuration, and the user's credentials
_OUTER_JOB = frozenset((*AGENT_VARIABLES, *SCRIPT_VARIABLES))  # with these a task would act as a task of the outer job
_OTHER_NAMES = {"time": "TIMELIMIT", "array": "ARRAY_INX"}
_MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")  # each overrides the variables of all three
_MEMORY_VARIABLES = frozenset(("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"))
_JOB_ID = re.compile(r"(?P<job_id>\d+)(;\S+)?")
_SBATCH_PREFIX = re.compile(r"^(sbatch: )?(error: )?", re.MULTILINE)


def submit_environment(environ: Mapping[str, str], options: Iterable[str]) -> dict[str, str]:
    """Return the environment for sbatch and the job, without the variables of an outer job.

    SBATCH_* variables override the options in a batch script. Inside a job all of them are removed, and so are the
    variables that assign GPUs. Outside, only variables of options that the script sets are removed.

    Args:
        options: Long names of the sbatch options in the script.
    """
    if SlurmAllocation.from_environ(environ) is not None:
        removed = {name for name in environ if name.startswith("SBATCH_")} | set(VISIBLE_DEVICES)
    else:
        removed = {f"SBATCH_{_OTHER_NAMES.get(name) or name.upper().replace('-', '_')}" for name in options}
        removed |= _MEMORY_VARIABLES if any(name in options for name in _MEMORY_OPTIONS) else set()
    removed |= _OUTER_JOB
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name.startswith(("SLURM_", "SLURMD_")) or name in removed)
    }


def submit_script(
    text: str, environ: Mapping[str, str], directory: Path | None = None, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> tuple[str, str]:
    """Submit a batch script from a directory, by default the current one; return the job's id and sbatch's messages.

    Raises:
        RefusedError: sbatch refused the script or timed out.
        LaunchError: sbatch cannot be started, or printed no job id.
    """
    done = _run(("sbatch", "--parsable"), text, environ, timeout_seconds, directory)
    match = _JOB_ID.fullmatch(done.stdout.strip())
    if match is None:
        message = f"sbatch exited with code 0 but printed no job id: {done.stdout[-300:]!r}."
        raise LaunchError(message, command=done.args, stderr=done.stderr)
    return match["job_id"], done.stderr.strip()


def estimate_start(text: str, environ: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Return Slurm's estimate of when and where a script would start, without submitting the script.

    Raises:
        RefusedError, LaunchError: See `submit_script`.
    """
    done = _run(("sbatch", "--test-only"), text, environ, timeout_seconds)
    return _SBATCH_PREFIX.sub("", done.stderr).strip()


def check_known(
    job_ids: Iterable[str], environ: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> None:
    """Check that Slurm has these jobs, because sbatch treats a dependency on an unknown job as satisfied.

    Raises:
        RefusedError: Slurm does not have a job, or scontrol timed out.
        LaunchError: scontrol cannot be started.
    """
    for job_id in job_ids:
        try:
            _run(("scontrol", "--oneliner", "show", "job", job_id), "", environ, timeout_seconds)
        except RefusedError as error:
            if error.returncode < 0:
                raise
            raise RefusedError(
                f"--after {job_id}: {error.stderr.strip()}. Slurm does not know that job: check its id. Slurm forgets "
                "a job some minutes after its end; if it succeeded, omit --after.",
                command=error.command,
                returncode=error.returncode,
                stderr=error.stderr,
            ) from error


def _run(
    command: tuple[str, ...],
    text: str,
    environ: Mapping[str, str],
    timeout_seconds: float,
    directory: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program; raise RefusedError if it fails or times out, LaunchError if it cannot be started."""
    try:
        return run_program(command, timeout_seconds, environ=environ, text=text, directory=directory)
    except LaunchError as error:
        if isinstance(error.__cause__, OSError):
            kind: type[LaunchError] = LaunchError
            message = f'{error} Submit from a host that has them, or submit the output of "tf4slurm script" there.'
        elif error.returncode < 0:
            kind = RefusedError
            message = f"{error} The job may have been accepted: check with squeue --me before you submit again."
        else:
            kind = RefusedError
            message = f"{command[0]} refused:\n{error.stderr.strip() or str(error)}"
        raise kind(message, command=command, returncode=error.returncode, stderr=error.stderr) from error
