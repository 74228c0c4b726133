"""Resource usage of a child process: memory, processor time, and bytes over its port.

Linux counts the bytes of each open TCP connection and reports them to any user through a netlink socket (`man 7
sock_diag`). psutil does not read these counters.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator

from tf4slurm.control.messages import Usage
from tf4slurm.system.proc import read_stat, walk_descendants

_PAUSE_SECONDS = 5.0
_TASKS_PER_SECOND = 100  # the launcher's sampling rate
_FIRST_SECONDS = 1.0

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_ESTABLISHED = 1 << 1
_TCP_INFO = 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBIHH16s16sIII")  # inet_diag_req_v2
_ANSWER_BYTES = 72  # size of inet_diag_msg, which the attributes follow
_COUNTERS_OFFSET = 120  # of tcpi_bytes_acked and tcpi_bytes_received in tcp_info, since Linux 4.1
_TIMEOUT_SECONDS = 0.5


async def watch_usage(process_id: int, port: int | None, on_usage: Callable[[Usage], None], num_tasks: int = 1) -> None:
    """Call `on_usage` periodically, until cancelled. Nothing is reported where /proc does not show the child.

    `port` is the child's port, or None. The period is 5 s, but 10 ms per task in jobs of more than 500 tasks.
    """
    pause = _FIRST_SECONDS
    connections: dict[int, tuple[int, int]] = {}  # includes closed connections
    while True:
        await asyncio.sleep(pause)
        pause = max(_PAUSE_SECONDS, num_tasks / _TASKS_PER_SECOND)
        if port is not None:
            connections.update(read_traffic(port))
        try:
            stats = [read_stat(each) for each in walk_descendants(process_id)]
        except OSError:
            continue  # a process has just ended, or this is not Linux
        memory = sum(stat.resident_pages for stat in stats) * os.sysconf("SC_PAGE_SIZE")
        cpu_seconds = sum(stat.cpu_ticks for stat in stats) / os.sysconf("SC_CLK_TCK")
        sent, received = (sum(count[side] for count in connections.values()) for side in (0, 1))
        on_usage(Usage(memory, round(cpu_seconds, 2), sent, received))


def read_traffic(port: int) -> dict[int, tuple[int, int]]:
    """Return (bytes sent, bytes received) of each connection to a local port, by the inode of the socket.

    The result is empty where the kernel does not report traffic.
    """
    found: dict[int, tuple[int, int]] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_SECONDS)
            for family in (socket.AF_INET, socket.AF_INET6):
                kernel.send(_request(family, port))
                found.update(_read_connections(kernel, port))
    except (OSError, AttributeError, struct.error):  # not Linux, or not permitted
        pass
    return found


def _request(family: int, port: int) -> bytes:
    flags = (family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 0, _ESTABLISHED)
    body = _REQUEST.pack(*flags, socket.htons(port), 0, b"", b"", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + body


def _read_connections(kernel: socket.socket, port: int) -> Iterator[tuple[int, tuple[int, int]]]:
    while True:
        for kind, message in _split(kernel.recv(1 << 16), "=IH", _HEADER.size):
            if kind in (_DONE, _ERROR):
                return
            if socket.ntohs(struct.unpack_from("=H", message, 4)[0]) == port:
                inode = struct.unpack_from("=I", message, _ANSWER_BYTES - 4)[0]
                for attribute, value in _split(message[_ANSWER_BYTES:], "=HH", 4):
                    if attribute == _TCP_INFO and len(value) >= _COUNTERS_OFFSET + 16:
                        yield inode, struct.unpack_from("=QQ", value, _COUNTERS_OFFSET)


def _split(data: bytes, head: str, head_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, content) of netlink messages or attributes; each begins with its length, aligned to 4 bytes."""
    while len(data) >= head_bytes:
        length, kind = struct.unpack_from(head, data)
        if length < head_bytes:
            return
        yield kind, data[head_bytes:length]
        data = data[(length + 3) & ~3 :]
