"""Read the end of the files that Slurm writes for a batch script (slurm-4711.out, or --output and --error)."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tf4slurm.errors import LaunchError
from tf4slurm.jobs.formatting import make_visible
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.slurm.commands import query_job
from tf4slurm.slurm.job_id import JobId
from tf4slurm.system.trusted_files import is_owned_by

DEFAULT_OUTPUT, DEFAULT_ARRAY_OUTPUT = "slurm-%j.out", "slurm-%A_%a.out"
"""Slurm's patterns for the name of the output of a job, and of an element of a job array."""

_PATTERN = re.compile(r"%(?P<width>\d*)(?P<letter>.)")
_DEFAULT_NAME = re.compile(r"slurm-\d+(_\d+)?\.out")
_MAX_WIDTH = 10  # Slurm pads numbers to no more
_LINES = 12
_BYTES = 16_000
_SLURM_SECONDS = 5.0


def describe_slurm_output(ends: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines to print for the result of `read_slurm_output`: a heading and the lines of each file."""
    found = []
    for path, lines in ends.items():
        found += [f"Slurm's output, {path}, ends with:", *(f"    {line}" for line in lines)]
    return found


def read_slurm_output(job: KnownJob, *, asks_slurm: bool) -> dict[str, tuple[str, ...]]:
    """Return the end of the files that Slurm has written for a job, or for one element of a job array, by path.

    The end of a file is its last 12 lines that are not blank, without control characters. Files that do not exist, are
    empty, or belong to another user than that of the job, this user and root, are left out. After a requeue, the
    default output is that of the last run.

    Args:
        asks_slurm: Query Slurm's controller for the path if no file is found at the registered paths.
    """
    if job.slurm_id is None:
        return {}
    paths = [_latest(path) for pattern in job.outputs if (path := _fill_in(pattern, job.slurm_id)) is not None]
    found = _read_all(paths, job)
    if not found and asks_slurm:
        with contextlib.suppress(LaunchError):
            found = _read_all([query_job(job.slurm_id, timeout_seconds=_SLURM_SECONDS).output], job)
    return found


def _fill_in(pattern: str, job_id: JobId) -> str | None:
    """Return a path for one of Slurm's file name patterns. Return None if it needs facts that only Slurm has."""
    values = {"A": job_id.number, "j": job_id.number}
    if job_id.element is not None:
        values = {"A": job_id.number, "a": job_id.element}  # %j is an id that only Slurm knows
    filled, end = "", 0
    for match in _PATTERN.finditer(pattern):
        filled += pattern[end : match.start()]
        end = match.end()
        if match["letter"] == "%":
            filled += "%"
        elif match["letter"] in values:
            filled += str(values[match["letter"]]).zfill(min(int(match["width"] or 0), _MAX_WIDTH))
        else:
            return None
    return filled + pattern[end:]


def _latest(path: str) -> str:
    """Return the path of the output after the last requeue, such as slurm-4711.2.out for slurm-4711.out."""
    if not _DEFAULT_NAME.fullmatch(os.path.basename(path)):
        return path
    stem = path.removesuffix(".out")
    counts = (each[len(stem) + 1 : -len(".out")] for each in glob.iglob(f"{glob.escape(stem)}.*.out"))
    last = max((int(count) for count in counts if count.isdecimal()), default=None)
    return path if last is None else f"{stem}.{last}.out"


def _read_all(paths: Iterable[str], job: KnownJob) -> dict[str, tuple[str, ...]]:
    return {path: lines for path in paths if path and (lines := _read_end(path, job))}


def _read_end(path: str, job: KnownJob) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        owner = os.getuid() if job.owner is None else job.owner
        if not is_owned_by(owner, Path(path)):
            return ()
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a named pipe does not block
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (owner, os.getuid(), 0):
                return ()
            file.seek(max(0, facts.st_size - _BYTES))
            lines = file.read(_BYTES).decode(errors="replace").splitlines()
        visible = [make_visible(line.expandtabs()) for line in lines if line.strip()]
        return tuple(visible[-_LINES:])
    return ()
