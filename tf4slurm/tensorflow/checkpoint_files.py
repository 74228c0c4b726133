"""Find, and remove, the files of checkpoints in a directory: ckpt-STEP.index, ckpt-STEP.data-…, and `checkpoint`."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import tensorflow as tf

NAME = "ckpt"
_INDEX_END = 0xDB4775248B80FB57.to_bytes(8, "little")
"""The last 8 bytes of a complete index file, which is a table of LevelDB.

Source: https://github.com/google/leveldb/blob/main/doc/table_format.md.
"""


def find_finished(directory: Path) -> list[str]:
    """Return the paths of the finished checkpoints, newest first.

    The file `checkpoint` lists them, and perhaps some that `make_room` has deleted. If there is no such file, they are
    the checkpoints that have an index file. An empty file `checkpoint` is deleted.
    """
    try:
        state = tf.train.get_checkpoint_state(str(directory))
    except ValueError:  # TensorFlow rejects the empty file that a power failure can leave
        (directory / "checkpoint").unlink()
        state = None
    if state is not None:
        return [path for path in reversed(state.all_model_checkpoint_paths) if Path(f"{path}.index").exists()]
    numbers = [int(path.stem.rpartition("-")[2]) for path in directory.glob(f"{NAME}-*.index")]
    return [str(directory / f"{NAME}-{number}") for number in sorted(numbers, reverse=True)]


def remove_unfinished(directory: Path) -> None:
    """Remove the files of unfinished saves: temporary directories, data without an index, and truncated indexes."""
    if not (directory / "checkpoint").exists():  # only the first save can leave a truncated index
        for index in directory.glob(f"{NAME}-*.index"):
            if re.fullmatch(NAME + r"-\d+", index.stem) and _is_truncated(index):
                index.unlink()
    for path in directory.glob(f"{NAME}-*"):
        found = re.fullmatch(NAME + r"-\d+(?:_temp|(\.data-\d+-of-\d+)(?:\.tempstate\d+)?)", path.name)
        if found is None:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif found[1] and not path.with_name(path.name.partition(".")[0] + ".index").exists():
            path.unlink(missing_ok=True)


def _is_truncated(index: Path) -> bool:
    try:
        return not index.read_bytes().endswith(_INDEX_END)
    except OSError:  # TensorFlow reports the error when it reads the checkpoint
        return False


def make_room(directory: Path, kept: str | None) -> bool:
    """Delete all checkpoints but `kept`, and the files of unfinished saves. Return whether a checkpoint was deleted.

    With None, no checkpoint is finished. The index files are deleted first: without one, a checkpoint is unfinished.
    """
    remove_unfinished(directory)
    others = [] if kept is None else [path for path in directory.glob(f"{NAME}-*.index") if _is_other(path, kept)]
    num_deleted = 0
    for index in others:
        with contextlib.suppress(OSError):
            index.unlink()
            num_deleted += 1
    remove_unfinished(directory)
    return num_deleted > 0


def _is_other(index: Path, kept: str) -> bool:
    return re.fullmatch(NAME + r"-\d+", index.stem) is not None and index.stem != Path(kept).name


def count_bytes(checkpoint: str) -> int:
    """Return the size of a checkpoint's files in bytes. Return 0 if this host cannot read it."""
    path = Path(checkpoint)
    try:
        return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}.*"))
    except OSError:
        return 0
