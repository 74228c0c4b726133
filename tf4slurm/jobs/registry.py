"""The jobs that this user has started, so that they are found from any directory: one small file each.

They lie under $XDG_STATE_HOME/tf4slurm/jobs (by default ~/.local/state/tf4slurm/jobs), 0700, and the oldest of more
than 1,000 are forgotten. What cannot be written there is not remembered: the job goes on, and its path finds it.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tf4slurm.errors import RunDirectoryError, UnknownJobError, UntrustedFileError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.system.trusted_files import check_trusted

logger = logging.getLogger(__name__)

_MAX_JOBS = 1_000
_NEAREST = 3
_CLOSE = 0.5
_INSTEAD = "Or give the path of a run directory."


@dataclass(frozen=True)
class KnownJob:
    """A job that was started: `job_id` of Slurm (None without Slurm), the name that begins its run directories.

    `started` is when it was submitted or run, in seconds since 1970.
    """

    job_id: str | None
    name: str
    runs_directory: str
    started: float

    @property
    def run_directories(self) -> list[RunDirectory]:
        """Its run directories in the order they were made: none while it is pending, several if it was requeued."""
        pattern = re.compile(re.escape(self.name) + r"(?:-(\d+))?")
        found = []
        with contextlib.suppress(OSError):
            for path in Path(self.runs_directory).iterdir():
                match = pattern.fullmatch(path.name)
                if match and path.is_dir():
                    found.append((int(match[1] or 1), path))
        return [RunDirectory(path) for _, path in sorted(found)]


def remember(name: str, runs_directory: Path, environ: Mapping[str, str], job_id: str | None = None) -> None:
    """Remember a job: `name` is how its run directory is called, or will be."""
    job = KnownJob(job_id, name, str(runs_directory.absolute()), round(time.time(), 6))
    directory = _directory(environ)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=directory)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(job), file)
            check_trusted(Path(draft), _INSTEAD)
            os.replace(draft, directory / f"{_key(name)}.json")
        finally:
            Path(draft).unlink(missing_ok=True)
        for path in sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MAX_JOBS]:
            path.unlink(missing_ok=True)
    except (OSError, UntrustedFileError) as error:
        logger.info("this job is not remembered: %s", error)


def known_jobs(environ: Mapping[str, str]) -> list[KnownJob]:
    """Return all that are remembered, the latest first; those that another user could have written are left out."""
    jobs, refused = [], []
    with contextlib.suppress(OSError):
        for path in _directory(environ).glob("*.json"):
            try:
                check_trusted(path, _INSTEAD)
                jobs.append(KnownJob(**json.loads(path.read_text(encoding="utf-8"))))
            except UntrustedFileError as error:
                refused.append(error)
            except (OSError, ValueError, TypeError):  # half written, or of another version
                continue
    if refused:
        logger.warning("%d remembered jobs are left out. The first: %s", len(refused), refused[0])
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def find_job(text: str | None, environ: Mapping[str, str]) -> KnownJob:
    """Return the job that a person means: the path of a run directory, its name, or Slurm's job id; the latest if None.

    Raises:
        UnknownJobError: There is none; the nearest ones are named.
    """
    path = Path(text or "").absolute()
    may_be_half_gone = ("logs", "job.json", "events.jsonl", "result.json")
    if text is not None and any((path / name).exists() for name in may_be_half_gone):
        return KnownJob(_job_id_of(path), path.name, str(path.parent), path.stat().st_mtime)
    jobs = known_jobs(environ)
    if text is None:
        if jobs:
            return jobs[0]
        raise UnknownJobError("No job was started yet by this user. Start one: tf4slurm run --help", job="")
    for job in jobs:
        if text in (job.job_id, job.name):
            return job
    words = [word for job in jobs for word in (job.job_id, job.name) if word]
    nearest = difflib.get_close_matches(text, words, _NEAREST, _CLOSE) or words[:_NEAREST]
    said = f"The nearest are {', '.join(nearest)}." if nearest else "None was started yet by this user."
    raise UnknownJobError(
        f"There is no job {text!r}. {said} Give a job id of Slurm, a run's name or its directory; "
        '"tf4slurm list" shows them.',
        job=text,
    )


def find_run(text: str | None, environ: Mapping[str, str]) -> RunDirectory:
    """Return the latest run directory of the job that a person means, as `find_job` takes it.

    Raises:
        UnknownJobError: There is no such job.
        RunDirectoryError: It has no run directory yet, or not any more.
    """
    return latest_run(find_job(text, environ))


def latest_run(job: KnownJob) -> RunDirectory:
    """Return the latest run directory of a job.

    Raises:
        RunDirectoryError: It has none yet, or not any more.
    """
    runs = job.run_directories
    if runs:
        return runs[-1]
    path = str(Path(job.runs_directory) / job.name)
    raise RunDirectoryError(
        f"The job {job.name!r} has no run directory: {path!r} is not there. It has not started yet, or the directory "
        "was moved or deleted. Wait for its start, or give the path of the directory.",
        path=path,
    )


def _job_id_of(path: Path) -> str | None:
    job = RunDirectory(path).read_job()
    job_id = job.get("job_id") if job else None
    return str(job_id) if job_id else None


def _key(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)[:200]


def _directory(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME") or "/"
    return Path(environ.get("XDG_STATE_HOME") or f"{home}/.local/state") / "tf4slurm" / "jobs"
