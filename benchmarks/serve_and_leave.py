"""Script of the exit benchmark: ps and workers wait in server.join(), the chief exits once all accept connections."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def main(exit_times: Path) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    if task["type"] == "chief":
        while not all(answers(address) for role in ("ps", "worker") for address in cluster[role]):
            time.sleep(0.1)
        time.sleep(0.5)  # let the other tasks reach join()
        with exit_times.open("a") as file:
            file.write(f"{time.time()}\n")
        os._exit(0)
    import tensorflow as tf

    tf.distribute.Server(cluster, job_name=task["type"], task_index=task["index"]).join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
