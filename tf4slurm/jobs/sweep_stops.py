"""Stop requests to the process of a local sweep, in the file NAME.sweep beside its run directories.

A request is a line of the file. So it is repeated without effect, and reaches a sweep in a notebook, or in a thread,
where a signal would end the whole program. The file's name is taken when the sweep starts.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
from pathlib import Path

from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.run_directory import make_parent

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW


class SweepStop(enum.Enum):
    """A stop request. The values are lines of the file."""

    SAVE = "save"  # the jobs that run save and stop
    NOW = "now"  # they end without a grace period


class SweepStops:
    """The stop requests to one local sweep."""

    def __init__(self, path: Path) -> None:
        """`path` is that of the file NAME.sweep."""
        self._path = path

    @classmethod
    def of(cls, runs_directory: str | Path, name: str) -> SweepStops:
        return cls(Path(runs_directory) / f"{name}.sweep")

    def add(self, stop: SweepStop) -> None:
        """Append a request. The process of the sweep reads it within 0.2 s.

        Raises:
            RunDirectoryError: The file cannot be written.
        """
        try:
            with open(os.open(self._path, _FLAGS | os.O_APPEND, 0o600), "ab", buffering=0) as file:
                file.write(f"{stop.value}\n".encode())
        except OSError as error:
            what = f"{str(self._path)!r} cannot be written: {error.strerror}."
            text = f"{what} Press Ctrl-C where the sweep runs, or cancel its elements."
            raise RunDirectoryError(text, path=str(self._path)) from error

    def read(self) -> SweepStop | None:
        """Return the strongest request, or None without one. A file of another user has none."""
        with contextlib.suppress(OSError), open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_uid in (os.getuid(), 0):
                lines = file.read().decode(errors="replace").split()
                return next((each for each in (SweepStop.NOW, SweepStop.SAVE) if each.value in lines), None)
        return None


def reserve_sweep_name(runs_directory: Path, name: str) -> str:
    """Return `name`, or `name`-2 and so on if it is taken. Create the file of this sweep, so that no other gets it.

    Raises:
        RunDirectoryError: The directory cannot be written.
    """
    try:
        make_parent(runs_directory)
        for number in itertools.count(1):
            free = name if number == 1 else f"{name}-{number}"
            with contextlib.suppress(FileExistsError):
                os.close(os.open(runs_directory / f"{free}.sweep", _FLAGS | os.O_EXCL, 0o600))
                return free
    except OSError as error:
        text = f"{str(runs_directory)!r} cannot be written: {error.strerror}. Choose another --runs-directory."
        raise RunDirectoryError(text, path=str(runs_directory)) from error
    raise AssertionError
