"""Replace a file atomically, so that no reader sees a file that is written in part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

DRAFT_SUFFIX = ".draft"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file (mode 0600) that replaces `path` when the block ends without an error.

    After an error the temporary file is removed and `path` stays as it was. Readers, also those on other hosts, see the
    old file or the new one. Each writer has a temporary file of its own in the same directory. If several write at the
    same time, the last one to finish replaces the others' files.

    Raises:
        OSError: The temporary file cannot be written, or `path` cannot be replaced.
    """
    draft = path.with_name(f".{os.urandom(8).hex()}{DRAFT_SUFFIX}")
    try:
        with open(draft, "xb", opener=open_private) as file:
            yield file
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def open_private(path: str, flags: int) -> int:
    """Open a file for `open(…, opener=open_private)`. Return the file descriptor.

    If the file does not exist and `flags` create it, it gets mode 0600, so only this user can read it.
    """
    return os.open(path, flags, 0o600)
