"""The script of `tf4slurm test` where there is no TensorFlow: every task serves at its address, the chief asks all."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

_PAUSE_SECONDS = 0.05
_ANSWER_BYTES = 100


def main(timeout_seconds: float) -> None:
    """Be the task that TF_CONFIG says; the chief gives up after `timeout_seconds`."""
    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    if role != "chief":
        _serve(f"{role}/{index}", config["cluster"][role][index])
    deadline = time.monotonic() + timeout_seconds
    others = [
        (f"{other}/{number}", address)
        for other, addresses in config["cluster"].items()
        if other != "chief"
        for number, address in enumerate(addresses)
    ]
    for name, address in others:
        _ask(name, address, deadline)
    print(f"{len(others)} of {len(others)} tasks answered the chief (plain processes, no TensorFlow)", flush=True)


def _serve(name: str, address: str) -> None:
    """Answer with the own name until this process is ended."""
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    # The agent holds the port; beside it may listen who sets this option, as TensorFlow's server does.
    with socket.create_server(("", port), family=family, reuse_port=True, dualstack_ipv6=both) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # who has hung up did not want to know
                connection.sendall(name.encode())


def _ask(name: str, address: str, deadline: float) -> None:
    host, _, port = address.rpartition(":")
    why: object = "it came too late"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as connection:
                answer = connection.recv(_ANSWER_BYTES).decode(errors="replace")
        except OSError as error:
            why = error
            time.sleep(_PAUSE_SECONDS)  # it is starting
            continue
        if answer == name:
            return
        if not answer:  # its agent's, which still held the port for it
            why = "it hung up"
            time.sleep(_PAUSE_SECONDS)
            continue
        raise SystemExit(f"tf4slurm test: {answer!r} answers at {address}, not {name}")
    raise SystemExit(f"tf4slurm test: {name} did not answer at {address}: {why}")
