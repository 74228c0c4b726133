"""Register each job of this user in a small file, so that its id or name finds it from any directory.

The files are in $XDG_STATE_HOME/tf4slurm/jobs (by default ~/.local/state/tf4slurm/jobs), mode 0700. Beyond 1,000 files
the oldest are deleted. A job that cannot be registered still runs, and is found by the path of its run directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tf4slurm.errors import RunDirectoryError, SchemaVersionError, UnknownJobError, UntrustedFileError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, read_file, to_versioned_json
from tf4slurm.spec.options import did_you_mean, nearest
from tf4slurm.system.directories import make_directories, user_directory
from tf4slurm.system.files import replacing
from tf4slurm.system.trusted_files import TRUST, check_trusted, is_owned_by, read_trusted

logger = logging.getLogger(__name__)

_MAX_JOBS = 1_000
_MOST_LISTED = 3
_INSTEAD = "Or give the path of a run directory."


@dataclass(frozen=True)
class KnownJob:
    """A submitted or started job: its id, its name and the place of its files.

    Attributes:
        job_id: Slurm's job id; None for a local job.
        name: Name of its run directory. The later ones of a requeued job are NAME-2, NAME-3 and so on.
        runs_directory: Parent of its run directories.
        started: When the job was submitted or started, in seconds since 1970.
        owner: User ID of the job's user; None for this user.
    """

    job_id: str | None = None
    name: str = ""
    runs_directory: str = ""
    started: float = 0.0
    owner: int | None = None

    @property
    def batch_script(self) -> Path:
        """Path at which `submit` keeps the batch script. The file need not exist."""
        return Path(self.runs_directory) / f"{self.name}.sh"

    @property
    def run_directories(self) -> list[RunDirectory]:
        """The job's run directories, oldest first.

        A pending job has none, and a requeued job has several. Other users may write to the parent. So only directories
        of the job's user, this user or root are listed.
        """
        runs = Path(self.runs_directory)
        if self.job_id is None:  # NAME-2 is the run directory of another local job, started in the same second
            return [RunDirectory(runs / self.name)] if self._is_own_directory(runs / self.name) else []
        pattern = re.compile(re.escape(self.name) + r"(?:-(\d+))?")
        found = []
        with contextlib.suppress(OSError):
            for path in runs.iterdir():
                match = pattern.fullmatch(path.name)
                if match and self._is_own_directory(path):
                    found.append((int(match[1] or 1), path))
        return [RunDirectory(path) for _, path in sorted(found)]

    def _is_own_directory(self, path: Path) -> bool:
        try:
            return path.is_dir() and is_owned_by(os.getuid() if self.owner is None else self.owner, path)
        except OSError:  # this user may not read it
            return False


def register_job(name: str, runs_directory: Path, environ: Mapping[str, str], job_id: str | None = None) -> KnownJob:
    """Register the job whose run directory is `runs_directory`/`name`, which need not exist. Return the job."""
    job = KnownJob(job_id, name, str(runs_directory.absolute()), round(time.time(), 6))
    try:
        directory = _directory(environ)
        make_directories(directory, 0o700)
        with replacing(directory / _file_name(job)) as draft:
            draft.write(to_versioned_json(job).encode())
            check_trusted(Path(draft.name), _INSTEAD)
        for path in sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MAX_JOBS]:
            path.unlink(missing_ok=True)
    except (OSError, UntrustedFileError) as error:
        logger.info("this job is not registered: %s", error)
    return job


def _file_name(job: KnownJob) -> str:
    """Return the name of the file that registers a job.

    The name contains a hash of the run directory's path, because local jobs in two directories may have the same name.
    """
    path = os.fsencode(f"{job.runs_directory}/{job.name}")
    readable = re.sub(r"[^\w.-]", "_", job.name)[:200]
    return f"{readable}-{hashlib.sha256(path).hexdigest()[:16]}.json"


def registered_jobs(environ: Mapping[str, str]) -> list[KnownJob]:
    """Return all registered jobs, latest first.

    Entries that another user could have written, or that a newer tf4slurm wrote, are left out with a warning.
    """
    jobs, refused = [], []
    with contextlib.suppress(OSError):
        for path in _directory(environ).glob("*.json"):
            try:
                job = read_file(path, KnownJob, functools.partial(read_trusted, instead=_INSTEAD))
            except (UntrustedFileError, SchemaVersionError) as error:
                refused.append(error)
            else:
                if job is not None and job.name and job.runs_directory:
                    jobs.append(job)
    if refused:
        logger.warning("%d registered jobs are left out. The first: %s", len(refused), refused[0])
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def find_job(text: str | None, environ: Mapping[str, str]) -> KnownJob:
    """Return the job with this Slurm job id, name or run directory path. None stands for the latest registered job.

    A `text` without a slash may be the name of a directory that another user has made. It is used only if no registered
    job has this id or name.

    Raises:
        UnknownJobError: No job matches, or this user has no registered job.
        SchemaVersionError: A newer version of tf4slurm wrote the run directory.
    """
    if text is None:
        if jobs := registered_jobs(environ):
            return jobs[0]
        raise UnknownJobError("This user has not started any job. Start one: tf4slurm run --help")
    by_path = _find_by_path(text)
    if by_path is not None and (os.sep in text or by_path.owner in (os.getuid(), 0)):
        return by_path
    jobs = registered_jobs(environ)
    for job in jobs:
        if text in (job.job_id, job.name):
            return job
    if by_path is not None:
        return by_path
    words = [word for job in jobs for word in (job.job_id, job.name) if word]
    known = did_you_mean(nearest(text, words)) or f" The latest are {', '.join(words[:_MOST_LISTED])}."
    if not jobs:
        known = " This user has not started any job."
    raise UnknownJobError(
        f"There is no job {text!r}.{known} Give a Slurm job id, a name with its id (train-4711) or a run directory; "
        '"tf4slurm list" shows them.',
        job=text,
    )


def _find_by_path(text: str) -> KnownJob | None:
    """Return the job with this run directory, or None if `text` is not the path of a run directory."""
    names = ("logs", "job.json", "events.jsonl", "result.json")  # one is enough: some may be deleted
    if not any(os.path.exists(os.path.join(text, name)) for name in names):
        return None
    path = Path(text).absolute()  # fails if the working directory was removed
    file = RunDirectory(path).read(JobFile) or JobFile()
    facts = path.stat()
    started = facts.st_mtime
    with contextlib.suppress(ValueError):
        started = datetime.strptime(file.started or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return KnownJob(file.job_id, path.name, str(path.parent), started, facts.st_uid)


def latest_run(job: KnownJob) -> RunDirectory:
    """Return the latest run directory of a job.

    Raises:
        RunDirectoryError: The job has no run directory that belongs to its user.
    """
    runs = job.run_directories
    if runs:
        return runs[-1]
    path = str(Path(job.runs_directory) / job.name)
    if os.path.lexists(path):
        text = (
            f"The run directory {path!r} belongs to another user, not to you: add it to {TRUST} if you trust that user."
        )
        raise RunDirectoryError(text, path=path)
    raise RunDirectoryError(
        f"The job {job.name!r} has no run directory: {path!r} does not exist. The job has not started yet, or the "
        "directory was moved or deleted. Wait for the start, or give the path of the directory.",
        path=path,
    )


def _directory(environ: Mapping[str, str]) -> Path:
    directory = user_directory(environ, "XDG_STATE_HOME", ".local/state")
    if directory is None:
        raise FileNotFoundError("this user has no home directory; set HOME or XDG_STATE_HOME")
    return directory / "jobs"
