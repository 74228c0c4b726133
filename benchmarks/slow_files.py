"""A file system whose metadata operations take longer, as those of a busy parallel file system do.

    python slow_files.py SOURCE MOUNT_POINT SECONDS COUNT_FILE

shows the directory SOURCE at MOUNT_POINT, read-only, and waits SECONDS in each lookup, stat, open, listing and link.
The kernel keeps each answer for 1 s. COUNT_FILE has the number of operations so far, as text; it is written ten times a
second. SIGTERM ends the process and unmounts.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mfusepy  # type: ignore[import-untyped]  # it ships no types

_FACTS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime", "st_mtime", "st_ctime")


class SlowFiles(mfusepy.Operations):  # type: ignore[misc]
    """The files below `source`."""

    use_ns = True  # times are in nanoseconds

    def __init__(self, source: str, seconds: float, count_file: Path) -> None:
        self._source = source
        self._seconds = seconds
        self._count_file = count_file
        self._count = 0
        self._lock = threading.Lock()
        count_file.write_text("0")

    def init(self, path: str) -> None:
        threading.Thread(target=self._write_count, daemon=True).start()

    def _write_count(self) -> None:
        while True:
            draft = self._count_file.with_suffix(".new")
            draft.write_text(str(self._count))
            draft.replace(self._count_file)
            time.sleep(0.1)

    def _metadata(self, path: str) -> str:
        """Count one operation, wait, and return the path in `source`."""
        with self._lock:
            self._count += 1
        time.sleep(self._seconds)
        return self._source + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        facts = os.lstat(self._metadata(path))
        return {name: getattr(facts, f"{name}_ns" if name.endswith("time") else name) for name in _FACTS}

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        yield from (".", "..", *os.listdir(self._metadata(path)))

    def readlink(self, path: str) -> str:
        return os.readlink(self._metadata(path))

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise mfusepy.FuseOSError(errno.EROFS)
        return os.open(self._metadata(path), os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


if __name__ == "__main__":
    source, mount_point, seconds, count_file = sys.argv[1:]
    mfusepy.FUSE(
        SlowFiles(source, float(seconds), Path(count_file)),
        mount_point,
        foreground=True,
        ro=True,
        allow_other=True,
        attr_timeout=1,
        entry_timeout=1,
        kernel_cache=True,
    )
