"""The script of `tf4slurm test` without TensorFlow: each task listens at its address, and the chief connects to all."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

_PAUSE_SECONDS = 0.05
_ANSWER_BYTES = 100


def main(timeout_seconds: float) -> None:
    """Run the task that TF_CONFIG names; the chief fails after `timeout_seconds`."""
    config = json.loads(os.environ["TF_CONFIG"])
    task_type, index = config["task"]["type"], config["task"]["index"]
    if task_type != "chief":
        _serve(f"{task_type}/{index}", config["cluster"][task_type][index])
    deadline = time.monotonic() + timeout_seconds
    others = [
        (f"{other}/{number}", address)
        for other, addresses in config["cluster"].items()
        if other != "chief"
        for number, address in enumerate(addresses)
    ]
    for name, address in others:
        _check(name, address, deadline)
    print(f"{len(others)} of {len(others)} tasks answered the chief (plain processes, no TensorFlow)", flush=True)


def _serve(name: str, address: str) -> None:
    """Send this task's name on each connection, until this process is terminated."""
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    # The agent holds the port. With reuse_port this process can listen on it too, like TensorFlow's server.
    with socket.create_server(("", port), family=family, reuse_port=True, dualstack_ipv6=both) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the client has closed the connection
                connection.sendall(name.encode())


def _check(name: str, address: str, deadline: float) -> None:
    host, _, port = address.rpartition(":")
    problem: object = "timed out"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as connection:
                answer = connection.recv(_ANSWER_BYTES).decode(errors="replace")
        except OSError as error:
            problem = error
            time.sleep(_PAUSE_SECONDS)  # the task is starting
            continue
        if answer == name:
            return
        if not answer:  # the task's agent still held the port
            problem = "the connection was closed"
            time.sleep(_PAUSE_SECONDS)
            continue
        raise SystemExit(f"tf4slurm test: {answer!r} answers at {address}, not {name}")
    raise SystemExit(f"tf4slurm test: {name} did not answer at {address}: {problem}")
