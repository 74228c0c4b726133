"""A child for tests: it reads TF_CONFIG, listens on its own port as TensorFlow does, and waits.

    python child.py DIRECTORY

It writes DIRECTORY/<role>-<index>.<number> when it runs; it exits with the code in DIRECTORY/<role>-<index>.exit.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path


def main(directory: Path) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    task_type, index = config["task"]["type"], config["task"]["index"]
    listener = socket.create_server(
        ("::", int(config["cluster"][task_type][index].rpartition(":")[2])),
        family=socket.AF_INET6,
        reuse_port=os.environ["TF_GRPC_REUSE_PORT"] == "true",
        dualstack_ipv6=True,
    )
    name = f"{task_type}-{index}"
    print(f"{name} listens on {listener.getsockname()[1]}", flush=True)
    started = {"pid": os.getpid(), "host": os.uname().nodename, "config": config, "environ": dict(os.environ)}
    number = len(list(directory.glob(f"{name}.[0-9]*"))) + 1
    draft = directory / f"draft-{name}"
    draft.write_text(json.dumps(started))
    draft.replace(directory / f"{name}.{number}")
    exit_file = directory / f"{name}.exit"
    while not exit_file.exists():
        time.sleep(0.02)
    sys.exit(int(exit_file.read_text() or 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
