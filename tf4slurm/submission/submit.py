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
from tf4slurm.jobs.registry import KnownJob, register_job
from tf4slurm.jobs.run_directory import make_parent
from tf4slurm.launch.checks import check_command
from tf4slurm.slurm.sbatch import check_known, estimate_start, submit_environment, submit_script
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.sbatch_options import make_sbatch_options
from tf4slurm.submission.snapshot import place_snapshot, take_snapshot
from tf4slurm.system.trusted_files import check_trusted

logger = logging.getLogger(__name__)


def submit(spec: BatchSpec, environ: Mapping[str, str]) -> KnownJob:
    """Submit a job with the environment `environ`, without the variables of an outer job; see `api.submit`."""
    spec = place_snapshot(spec)
    text, environ = _prepare(spec, environ)
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
    job = register_job(f"{spec.name}-{job_id}", spec.runs_directory, environ, job_id)
    try:
        os.link(draft, job.batch_script)  # never overwrites a file
        draft.unlink()
    except OSError as error:
        logger.warning("the script of job %s is kept as %s: %s", job_id, draft, error.strerror)
    return job


def submit_again(job: KnownJob, directory: Path, environ: Mapping[str, str]) -> KnownJob:
    """Submit the kept script of a job again, from its directory.

    Raises:
        UntrustedFileError: Another user could have written the script.
        RefusedError: sbatch refused the job.
        LaunchError: sbatch is not installed.
    """
    script = job.batch_script
    check_trusted(script, "Start the job again with the command you used.")
    text = script.read_text(encoding="utf-8")
    job_id, warning = submit_script(text, submit_environment(environ, ()), directory)
    if warning:
        logger.warning("%s", warning)
    again = register_job(f"{job.name.removesuffix(f'-{job.job_id}')}-{job_id}", script.parent, environ, job_id)
    with contextlib.suppress(OSError):
        os.link(script, again.batch_script)
    return again


def estimate(spec: BatchSpec, environ: Mapping[str, str]) -> str:
    """Return Slurm's estimate of when the job would start, without submitting it."""
    return estimate_start(*_prepare(spec, environ))


def _prepare(spec: BatchSpec, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Check a job; return its batch script and the environment of sbatch."""
    if not spec.has_environment:  # the command may exist only in the job's environment
        check_command(spec)
    text = make_script(spec)
    options = {name for component in make_sbatch_options(spec) for name in component}
    environ = submit_environment(environ, options)
    check_known(spec.after, environ)
    return text, environ


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
