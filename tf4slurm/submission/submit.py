"""Submit a job with sbatch, and keep its batch script beside its run directory."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from tf4slurm.batch_spec import BatchSpec
from tf4slurm.errors import RefusedError, RunDirectoryError, Tf4SlurmError
from tf4slurm.jobs.registry import register_job
from tf4slurm.jobs.run_directory import make_parent
from tf4slurm.slurm.sbatch import check_known, estimate_start, submit_environment, submit_script
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.sbatch_options import make_sbatch_options
from tf4slurm.submission.snapshot import place_snapshot, take_snapshot
from tf4slurm.system.trusted_files import check_trusted

logger = logging.getLogger(__name__)


def submit(spec: BatchSpec, environ: Mapping[str, str] | None = None) -> str:
    """Submit a job and return its id. `kept_script` returns the path of its batch script.

    Args:
        environ: Environment of the job (default: of this process); the variables of an outer job are removed.

    Raises:
        OptionError: The options contradict the roles, or each other.
        RunDirectoryError: The script or the snapshot cannot be written; nothing is submitted.
        RefusedError: sbatch refused the job, or Slurm does not have a job in `after`.
        LaunchError: sbatch is not installed.
    """
    spec = place_snapshot(spec)
    text = make_script(spec)
    environ = _environ_for(spec, environ)
    check_known(spec.after, environ)
    draft = _write_draft(spec, text)
    _make_output_directory(spec)
    snapshot = spec.directory if spec.snapshot != "none" else None
    try:
        if snapshot is not None:
            take_snapshot(spec.snapshot, Path.cwd(), snapshot, spec.command)
        job_id, warning = submit_script(text, environ)
    except Tf4SlurmError as error:
        if not (isinstance(error, RefusedError) and error.returncode < 0):  # timed out: Slurm may have the job
            draft.unlink(missing_ok=True)
            if snapshot is not None:
                shutil.rmtree(snapshot, ignore_errors=True)
        raise
    if warning:
        logger.warning("%s", warning)
    try:
        os.link(draft, kept_script(spec, job_id))  # never overwrites a file
        draft.unlink()
    except OSError as error:
        logger.warning("the script of job %s is kept as %s: %s", job_id, draft, error.strerror)
    register_job(f"{spec.name}-{job_id}", spec.runs_directory, environ, job_id)
    return job_id


def submit_again(script: Path, name: str, environ: Mapping[str, str], directory: Path) -> str:
    """Submit the kept script of a job called `name` again, from its directory; return the new job's id.

    Raises:
        UntrustedFileError: Another user could have written the script.
        RefusedError: sbatch refused the job.
        LaunchError: sbatch is not installed.
    """
    check_trusted(script, "Start the job again with the command you used.")
    text = script.read_text(encoding="utf-8")
    job_id, warning = submit_script(text, submit_environment(environ, ()), directory)
    if warning:
        logger.warning("%s", warning)
    with contextlib.suppress(OSError):
        os.link(script, script.with_name(f"{name}-{job_id}.sh"))
    register_job(f"{name}-{job_id}", script.parent, environ, job_id)
    return job_id


def estimate(spec: BatchSpec, environ: Mapping[str, str] | None = None) -> str:
    """Return Slurm's estimate of when the job would start, without submitting it. See `submit` for errors."""
    text, environ = make_script(spec), _environ_for(spec, environ)
    check_known(spec.after, environ)
    return estimate_start(text, environ)


def kept_script(spec: BatchSpec, job_id: str) -> Path:
    """Return the path of the script of a submitted job."""
    return spec.runs_directory / f"{spec.name}-{job_id}.sh"


def _environ_for(spec: BatchSpec, environ: Mapping[str, str] | None) -> dict[str, str]:
    options = {name for component in make_sbatch_options(spec) for name in component}
    return submit_environment(os.environ if environ is None else environ, options)


def _make_output_directory(spec: BatchSpec) -> None:
    """Create the directory of --output: if it is missing, the job fails without a message."""
    directory = Path(spec.sbatch_options.get("output", "")).parent
    if "%" not in str(directory):
        directory.mkdir(parents=True, exist_ok=True)


def _write_draft(spec: BatchSpec, text: str) -> Path:
    """Write the script (0700) before the submission, so that each submitted job has a kept script."""
    draft = spec.runs_directory / f"{spec.name}-{secrets.token_hex(4)}.draft"
    try:
        make_parent(spec.runs_directory)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        raise RunDirectoryError(
            f"The script cannot be kept in {str(spec.runs_directory)!r}: {error.strerror}. Choose a directory that you "
            "may write, on a file system that all hosts of the job share, with --runs-directory.",
            path=str(draft),
        ) from error
    return draft
