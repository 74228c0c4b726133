"""What is looked at of the place for run directories: is it writable, do all nodes share it, do the clocks agree?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tf4slurm.doctor.finding import Finding

_FILE_BYTES = 64 * 1024
_LARGE_SKEW_SECONDS = 2.0
_LOCAL = ("tmpfs", "ramfs", "devtmpfs")
_SEE_SECONDS = 5.0  # NFS keeps what it knows of a directory for some seconds
TODO_SHARED = "Choose a place on a file system that all nodes share, with --runs-directory."


class Probe:
    """One small file of ours in the place for run directories, from `write` to `remove`."""

    def __init__(self, runs_directory: Path, name: str) -> None:
        """`name` tells this probe from all others there."""
        self.path = existing_parent(runs_directory) / f".tf4slurm-doctor-{name}"

    def write(self) -> float:
        """Write it; return how far the file server's clock is ahead of this host's, in seconds, at least.

        Raises:
            OSError: It cannot be written.
        """
        before = time.time()
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        written = self.path.stat().st_mtime
        return written - min(max(written, before), time.time())  # a slow file system is no skew

    def wait_until_seen(self) -> bool:
        """Wait a moment until the file is there, written by whomever; return whether it is."""
        deadline = time.monotonic() + _SEE_SECONDS
        while not self.path.exists():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        return True

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest directory above it that is there: the rest is made when a job starts."""
    path = path.absolute()
    return next((each for each in (path, *path.parents) if each.exists()), path)


def check_directory(runs_directory: Path, name: str) -> tuple[Finding, float | None]:
    """Write a file where run directories are made, and take it away; return the skew of the clocks too, if it went."""
    probe = Probe(runs_directory, name)
    where = f"run directories in {runs_directory.absolute()}"
    try:
        skew = probe.write()
    except OSError as error:
        todo = "Choose a place that you may write and that has room, with --runs-directory."
        return Finding("fail", "run directory", f"{where} cannot be written: {error.strerror}", todo), None
    finally:
        probe.remove()
    kind = _file_system(probe.path.parent)
    text = f"{where} can be written" + (f" ({kind})" if kind else "")
    if kind in _LOCAL:
        return Finding("warn", "run directory", f"{text}, which is in this host's memory", TODO_SHARED), skew
    return Finding("ok", "run directory", text), skew


def judge_skew(skew_by_node: Mapping[str, float]) -> Finding:
    """Compare the clocks of nodes, each by the time that the file server gave its file."""
    first, last = min(skew_by_node, key=skew_by_node.__getitem__), max(skew_by_node, key=skew_by_node.__getitem__)
    spread = skew_by_node[last] - skew_by_node[first]
    if spread <= _LARGE_SKEW_SECONDS:
        return Finding("ok", "clocks", f"the clocks agree within {max(spread, 0.1):.1f} s")
    text = f"the clock of {first} is {spread:.1f} s ahead of that of {last}"
    todo = "Have the clocks set (chrony, ntp): MUNGE and Slurm refuse larger differences, and times in logs mislead."
    return Finding("warn", "clocks", text, todo)


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path is on, such as "lustre"; empty where that cannot be told."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    found = [(mount[1], mount[2]) for mount in mounts if path.is_relative_to(mount[1].replace("\\040", " "))]
    return max(reversed(found), key=lambda entry: len(entry[0]), default=("", ""))[1]
