"""The output of a preloader, which its children print when they import the preloaded modules."""

from __future__ import annotations

import os
import sys

_file = -1  # a file in memory


def capture_output() -> None:
    """Let this process print to a file in memory. For Python its standard output and error remain pipes."""
    global _file
    _file = os.memfd_create("output") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(_file, descriptor)


def flush_output() -> int:
    """Return the length of the output up to now in bytes."""
    flush_streams()
    return os.lseek(_file, 0, os.SEEK_CUR)


def read_output(start: int) -> bytes:
    """Return the output since it had the length `start`."""
    return os.pread(_file, flush_output() - start, start)


def close_output() -> None:
    """Close the file. Call this in a child, whose standard output and error are others."""
    os.close(_file)


def flush_streams() -> None:
    """Write what Python's streams hold back, if they can be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: S110 - closed, or None
            pass
