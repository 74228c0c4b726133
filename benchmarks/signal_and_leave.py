"""Script of the shutdown benchmark under plain srun: the ps serve until the workers have signalled completion.

python signal_and_leave.py DIRECTORY METHOD
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

import tensorflow as tf

import tf4slurm


def main(directory: Path, method: str) -> None:
    cluster, role, index = tf4slurm.get_server_dictionary(["ps", "worker", "worker", "worker"])
    held = os.open(directory / f"{role}-{index}", os.O_WRONLY | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)  # held until the kernel removes this process
    if role == "ps":
        server = tf.distribute.Server(cluster, job_name=role, task_index=index)
        (directory / "serves").touch()
        tf4slurm.shutdown.serve_until_done(server, method=method, timeout_seconds=60)
        (directory / "returned").write_text(str(time.time()))
        return
    while not (directory / "serves").exists():
        time.sleep(0.05)
    time.sleep(1 + 3 * index)  # the last exits alone: TensorFlow takes a second to exit
    if index == 2:
        (directory / "done").write_text(str(time.time()))
    tf4slurm.shutdown.signal_done(method=method)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
