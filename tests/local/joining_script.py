"""A job without TensorFlow whose workers can change: the chief plays the part of `tensorflow/elastic.py`.

Arguments: the directory of the files. Each task writes DIRECTORY/<role>-<index>.pid. The chief writes the workers that
it uses, one JSON list per line, to DIRECTORY/workers.log; it ends when DIRECTORY/end exists, and takes no other workers
while DIRECTORY/hold exists. Other tasks answer as a gRPC server does. With WORKERS_LATER=1 in its environment, the
chief says that it can use other workers when DIRECTORY/say exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from tf4slurm.cluster import Address
from tf4slurm.scripts.channel import find_script_channel

_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def serve(address: Address) -> None:
    listener = socket.create_server(address, reuse_port=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    with connection:
        try:
            if connection.recv(100):
                connection.sendall(_SETTINGS)
                connection.recv(1)
        except OSError:
            pass


def lead(directory: Path, workers: list[int]) -> None:
    channel = find_script_channel()
    assert channel is not None
    if error := os.environ.get("WORKERS_ERROR"):
        channel.send(workers_error=error)
    elif not os.environ.get("WORKERS_LATER"):
        channel.send(workers=tuple(workers))
    step = 0
    while not (directory / "end").exists():
        step += 1
        channel.report(step, {})
        if channel.state.workers is None and (directory / "say").exists():
            channel.send(workers=tuple(workers))
        wanted = [index for index, _ in channel.desired.workers] or workers
        used, is_held = channel.state.workers, (directory / "hold").exists()
        if used is not None and wanted != list(used) and not is_held:
            with (directory / "workers.log").open("a") as log:
                print(json.dumps(wanted), file=log)
            channel.send(workers=tuple(wanted))
        time.sleep(0.02)


def main(directory: Path) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    draft = directory / f".{role}-{index}.pid"
    draft.write_text(str(os.getpid()))
    draft.replace(directory / f"{role}-{index}.pid")
    if role == "chief":
        lead(directory, list(range(len(config["cluster"]["worker"]))))
    else:
        serve(Address.from_text(config["cluster"][role][index]))


main(Path(sys.argv[1]))
