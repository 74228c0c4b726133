"""Messages between an agent and a preloader: JSON objects on a socket, with file descriptors.

This file and the others that `program.py` imports run with the script's Python, 3.9 or newer. 3.7 can import them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("=I")  # the size of the JSON text in bytes
_MAX_DESCRIPTORS_BYTES = 64


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with file descriptors."""
    data = json.dumps(message).encode()
    numbers = struct.pack(f"{len(descriptors)}i", *descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if descriptors else []
    connection.sendmsg([_HEADER.pack(len(data))], ancillary)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a message and its file descriptors. The message is None if the other side has ended."""
    descriptors: list[int] = []
    try:
        data, ancillary, _, _ = connection.recvmsg(_HEADER.size, socket.CMSG_SPACE(_MAX_DESCRIPTORS_BYTES))
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += struct.unpack(f"{len(content) // 4}i", content)
        if len(data) < _HEADER.size:
            return None, descriptors
        (size,), parts = _HEADER.unpack(data), []
        while size:
            parts.append(connection.recv(size))
            if not parts[-1]:
                return None, descriptors
            size -= len(parts[-1])
    except ConnectionError:
        return None, descriptors
    message: dict[str, Any] = json.loads(b"".join(parts).decode())
    return message, descriptors


def read_proc(name: str) -> str:
    """Return the content of a file of /proc/self, or "" if there is none."""
    try:
        with open("/proc/self/" + name, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_conditions() -> dict[str, str]:
    """Return what a process inherits and cannot change for itself, as texts by name.

    A forked child has those of the preloader, so they must be equal to those of its agent.
    """
    status = dict(line.split(":", 1) for line in read_proc("status").splitlines() if ":" in line)
    found = {name: status.get(key, "").strip() for name, key in _STATUS.items()}
    found["cgroup"] = read_proc("cgroup")
    found["limits (ulimit)"] = read_proc("limits")
    found["niceness"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["oom_score_adj"] = read_proc("oom_score_adj")
    found["session"] = str(os.getsid(0))
    found["namespaces"] = " ".join(map(_read_namespace, ("net", "mnt", "pid", "uts", "ipc", "user")))
    return found


_STATUS = {"user": "Uid", "group": "Gid", "groups": "Groups", "capabilities": "CapEff", "seccomp filter": "Seccomp"}


def _read_namespace(name: str) -> str:
    try:
        return os.readlink("/proc/self/ns/" + name)
    except OSError:
        return ""
