"""Replace a file atomically, so that no reader sees a part of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

DRAFT_SUFFIX = ".draft"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a draft (mode 0600) that replaces a file when the block ends. After an error the draft is removed.

    Readers, also those on other hosts, see the old file or the new one. Each writer has a draft of its own. If several
    write at the same time, the file is the whole draft of the last one.

    Raises:
        OSError: The draft cannot be written, or the file cannot be replaced.
    """
    draft = path.with_name(f".{os.urandom(8).hex()}{DRAFT_SUFFIX}")
    try:
        with open(draft, "xb", opener=_open_private) as file:
            yield file
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
