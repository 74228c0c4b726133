"""sbatch: a script given to Slurm, and its answer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping

from tf4slurm.errors import LaunchError, RefusedError
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.slurm.step import VISIBLE_DEVICES
from tf4slurm.system.environment import AGENT_VARIABLES, SCRIPT_VARIABLES

_TIMEOUT_SECONDS = 60.0  # sbatch itself gives up on a controller that is down after some MessageTimeouts of 10 s each
_KEPT = frozenset(("SLURM_CONF", "SLURM_JWT"))  # where the cluster is, and who asks
_OUTER_JOB = frozenset((*AGENT_VARIABLES, *SCRIPT_VARIABLES))  # else a task would take itself for one of the outer job
_OTHER_NAMES = {"time": "TIMELIMIT", "array": "ARRAY_INX"}
_MEMORY = frozenset(("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"))
_JOB_ID = re.compile(r"(?P<job_id>\d+)(;\S+)?")
_SAID_BY_SBATCH = re.compile(r"^(sbatch: )?(error: )?", re.MULTILINE)


def submit_environment(environ: Mapping[str, str], options: Iterable[str]) -> dict[str, str]:
    """Return the environment for sbatch, which becomes the job's: without what an outer job left in it.

    sbatch takes SBATCH_* for more than what its script says. So inside a job, where they are that job's, all are left
    out, and so are its GPUs; else those that the script says, by `options`, its long names.
    """
    if SlurmAllocation.from_environ(environ) is not None:
        said = {name for name in environ if name.startswith("SBATCH_")} | set(VISIBLE_DEVICES)
    else:
        said = {f"SBATCH_{_OTHER_NAMES.get(name) or name.upper().replace('-', '_')}" for name in options}
        said |= _MEMORY if any(name in options for name in ("mem", "mem-per-cpu", "mem-per-gpu")) else set()
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name.startswith(("SLURM_", "SLURMD_")) or name in said or name in _OUTER_JOB)
    }


def submit_script(
    text: str, environ: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> tuple[str, str]:
    """Give a script to sbatch; return the job's id, and what sbatch said beside it.

    Raises:
        RefusedError: It did not take it, or did not answer in time.
        LaunchError: There is no sbatch, or it answered something else than a job's id.
    """
    done = _run(("sbatch", "--parsable"), text, environ, timeout_seconds)
    match = _JOB_ID.fullmatch(done.stdout.strip())
    if match is None:
        raise LaunchError(
            f"sbatch exited with 0 but gave no job id: {done.stdout[-300:]!r}.",
            command=done.args,
            returncode=0,
            stderr=done.stderr,
        )
    return match["job_id"], done.stderr.strip()


def estimate_start(text: str, environ: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Ask Slurm when and where a script would start, without submitting it; return its words.

    Raises:
        RefusedError, LaunchError: As `submit_script`.
    """
    done = _run(("sbatch", "--test-only"), text, environ, timeout_seconds)
    return _SAID_BY_SBATCH.sub("", done.stderr).strip()


def check_known(
    job_ids: Iterable[str], environ: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> None:
    """Check that Slurm knows jobs: sbatch takes a dependency on one that never was, as if it had succeeded.

    Raises:
        RefusedError: It does not know one, or forgot it.
        LaunchError: There is no scontrol.
    """
    for job_id in job_ids:
        command = ("scontrol", "--oneliner", "show", "job", job_id)
        try:
            _run(command, "", environ, timeout_seconds)
        except RefusedError as error:
            if error.returncode < 0:
                raise
            raise RefusedError(
                f"--after {job_id}: {error.stderr.strip()}. Slurm does not know that job: check its id. It forgets a "
                "job some minutes after its end; if it has succeeded, leave --after out.",
                command=command,
                returncode=error.returncode,
                stderr=error.stderr,
            ) from error


def _run(
    command: tuple[str, ...], text: str, environ: Mapping[str, str], timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",  # a name of a file need not be UTF-8
            env=dict(environ),
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise RefusedError(
            f"{command[0]} did not answer within {timeout_seconds:g} s: Slurm's controller may be down or busy. "
            "Whether a job was taken is not known: look with squeue --me before you submit again.",
            command=command,
            returncode=-1,
            stderr="",
        ) from error
    except OSError as error:
        raise LaunchError(
            f"{command[0]} cannot be started: {error}. Submit where Slurm's commands are, or print the script with "
            '"tf4slurm script" and give it to sbatch there.',
            command=command,
            returncode=-1,
            stderr="",
        ) from error
    if done.returncode != 0:
        words = done.stderr.strip() or f"it exited with {done.returncode} without a word"
        raise RefusedError(
            f"{command[0]} refused:\n{words}", command=command, returncode=done.returncode, stderr=done.stderr
        )
    return done
