"""File systems that fail: a small one that is soon full, one that can be frozen, one that never answers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SIZE = "256k"


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a small file system at `path`. All hosts of a lab that starts afterwards share it."""
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


@contextlib.contextmanager
def freezable_disk(path: Path) -> Iterator[None]:
    """Mount an ext4 file system of its own at `path`, for `freeze` and `thaw`."""
    path.mkdir(parents=True, exist_ok=True)
    image = path.with_name(f"{path.name}.img")
    with image.open("wb") as file:
        file.truncate(32 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-E", "root_owner", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    try:
        (path / "lost+found").rmdir()
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", path], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", path], check=True)
        image.unlink()


def freeze(path: Path) -> None:
    """Block all writes to the file system at `path` until `thaw`."""
    subprocess.run(["fsfreeze", "--freeze", path], check=True)


def thaw(path: Path) -> None:
    subprocess.run(["fsfreeze", "--unfreeze", path], check=True)


@contextlib.contextmanager
def unresponsive_disk(path: Path) -> Iterator[None]:
    """Mount a file system that answers no request; at the end all pending requests fail at once."""
    path.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)  # a FUSE server that reads no requests
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"unresponsive", os.fsencode(path), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount", str(path))
        yield
    finally:
        os.close(device)
        subprocess.run(["umount", "--lazy", path], check=False)
