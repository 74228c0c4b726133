"""Script of the import benchmark: import TensorFlow, write the time to a file, exit when all tasks have.

python import_and_tell.py DIRECTORY NUM_TASKS [NAME]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import tensorflow  # noqa: F401  # its import is what is timed

_PATIENCE_SECONDS = 240.0


def main(directory: Path, num_tasks: int, name: str) -> None:
    now = time.monotonic()
    (directory / f"{name}.imported").write_text(str(now))
    while len(list(directory.glob("*.imported"))) < num_tasks and time.monotonic() < now + _PATIENCE_SECONDS:
        time.sleep(0.1)


if __name__ == "__main__":
    task = os.environ.get("TF4SLURM_TASK", "").replace("/", "-")
    main(Path(sys.argv[1]), int(sys.argv[2]), task or sys.argv[3])
