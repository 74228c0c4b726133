"""Check that the run directory is writable and shared by all nodes, and that the nodes' clocks agree."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tf4slurm.doctor.finding import Finding

_FILE_BYTES = 64 * 1024
_LARGE_SKEW_SECONDS = 2.0
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_VISIBLE_SECONDS = 5.0  # NFS caches directories for some seconds
ADVICE_SHARED = "Choose a directory on a file system that all nodes share, with --runs-directory."


class Probe:
    """A small test file in `runs_directory`, or in its nearest existing parent."""

    def __init__(self, runs_directory: Path, name: str) -> None:
        """Set the path; `name` must be unique in the directory."""
        self.path = existing_parent(runs_directory) / f".tf4slurm-doctor-{name}"

    def write(self) -> float:
        """Write the file; return the minimum clock skew in seconds, positive if the file server's clock is ahead.

        Raises:
            OSError: The file cannot be written.
        """
        before = time.time()
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        written = self.path.stat().st_mtime
        return written - min(max(written, before), time.time())  # a slow file system must not count as skew

    def wait_until_visible(self) -> bool:
        """Wait at most 5 s for the file that another host has written; return whether it is visible here."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not self.path.exists():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        return True

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def existing_parent(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent."""
    path = path.absolute()
    return next((each for each in (path, *path.parents) if each.exists()), path)


def check_directory(runs_directory: Path, probe_name: str) -> tuple[Finding, float | None]:
    """Write and remove a probe; return the finding, and the skew from `Probe.write` or None."""
    probe = Probe(runs_directory, probe_name)
    where = f"run directories in {runs_directory.absolute()}"
    try:
        skew = probe.write()
    except OSError as error:
        advice = "Choose a directory that you may write to and that has free space, with --runs-directory."
        return Finding("fail", "run directory", f"{where} cannot be written: {error.strerror}", advice), None
    finally:
        probe.remove()
    kind = _file_system(probe.path.parent)
    text = f"{where} can be written" + (f" ({kind})" if kind else "")
    if kind in _IN_MEMORY:
        text = f"{text}, but the file system is in this host's memory"
        return Finding("warn", "run directory", text, ADVICE_SHARED), skew
    return Finding("ok", "run directory", text), skew


def judge_skew(skew_by_node: Mapping[str, float]) -> Finding:
    """Return whether the nodes' clocks agree, from each node's `Probe.write` in seconds."""
    first, last = min(skew_by_node, key=skew_by_node.__getitem__), max(skew_by_node, key=skew_by_node.__getitem__)
    spread = skew_by_node[last] - skew_by_node[first]
    if spread <= _LARGE_SKEW_SECONDS:
        return Finding("ok", "clocks", f"the clocks agree within {max(spread, 0.1):.1f} s")
    text = f"the clock of {first} is {spread:.1f} s ahead of that of {last}"
    advice = (
        "Synchronize the clocks (chrony, ntp): MUNGE and Slurm refuse large differences, and times in logs mislead."
    )
    return Finding("warn", "clocks", text, advice)


def _file_system(path: Path) -> str:
    """Return the type of a path's file system, such as "lustre"; empty if unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    found = [(mount[1], mount[2]) for mount in mounts if path.is_relative_to(mount[1].replace("\\040", " "))]
    return max(reversed(found), key=lambda entry: len(entry[0]), default=("", ""))[1]
