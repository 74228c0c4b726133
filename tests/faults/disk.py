"""A file system so small that it is soon full."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SIZE = "256k"


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount one at `path`. The hosts of a lab that comes up afterwards see it too, as one and the same."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path) -> None:
    """Write until there is no space left on the file system of `path`."""
    try:
        with (path / "filling").open("ab", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
