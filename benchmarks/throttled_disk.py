"""A file system that writes at most so many bytes a second, as a shared one that many jobs use.

    python throttled_disk.py SOURCE MOUNT_POINT BYTES_PER_SECOND

shows the directory SOURCE at MOUNT_POINT. A write returns when its bytes are "on the disk", in turn with the others.
SIGTERM ends the process and unmounts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import mfusepy  # type: ignore[import-untyped]  # it ships no types

_FACTS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime", "st_mtime", "st_ctime")


class ThrottledDisk(mfusepy.Operations):  # type: ignore[misc]
    """The files below `source`."""

    use_ns = True  # times are in nanoseconds

    def __init__(self, source: str, bytes_per_second: float) -> None:
        self._source = source
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._bytes_per_second
            seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, seconds))
        return os.pwrite(fh, data, offset)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        facts = os.lstat(self._source + path)
        return {name: getattr(facts, f"{name}_ns" if name.endswith("time") else name) for name in _FACTS}

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        yield from (".", "..", *os.listdir(self._source + path))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._source + path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._source + path, flags & ~os.O_APPEND)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._source + path, length)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._source + path, mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._source + path)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._source + path)
        return 0

    def rename(self, old: str, new: str, *_: Any) -> int:
        os.rename(self._source + old, self._source + new)
        return 0


if __name__ == "__main__":
    source, mount_point, bytes_per_second = sys.argv[1:]
    options = {"big_writes": True} if mfusepy.fuse_version_major == 2 else {}  # libfuse 3 always has them
    mfusepy.FUSE(ThrottledDisk(source, float(bytes_per_second)), mount_point, foreground=True, **options)
