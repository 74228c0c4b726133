"""Probes of a running child process: its liveness and its resource usage.

Linux counts the bytes of each open TCP connection and reports them to any user through a netlink socket (`man 7
sock_diag`). psutil does not read these counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from tf4slurm.cluster import Address
from tf4slurm.control.idleness import usage_interval_seconds
from tf4slurm.control.messages import Usage
from tf4slurm.jobs.waiting_lines import WaitedTasks
from tf4slurm.network.reachability import is_answering
from tf4slurm.system.proc import ProcessStat, is_stopped, read_stat, walk_family

_CHECKS = 8  # checks per timeout
_FIRST_ANSWER_SECONDS = 0.25  # short, so that a short-lived server is not reported as missing
_FIRST_USAGE_SECONDS = 1.0
_WAITS_SECONDS = 1.0

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


async def wait_until_unresponsive(
    process_id: int,
    address: Address | None,
    timeout_seconds: float,
    server_timeout_seconds: float | None = None,
    on_server: Callable[[], None] = lambda: None,
) -> str:
    """Wait until the child fails its liveness probe. Return the reason as a clause, such as "was stopped for 10 s".

    Cancel this call when the child exits. Time in which this process was paused does not count.

    Args:
        process_id: Process id of the child.
        address: The address of the child's server. None if it has no server.
        timeout_seconds: How long the child may be suspended (SIGSTOP). Also how long its server may fail to answer
            after its first answer.
        server_timeout_seconds: Time limit for the server's first answer. None (default) for no limit.
        on_server: Called when the server answers for the first time.
    """
    pause = timeout_seconds / _CHECKS
    started_at = alive_at = checked_at = time.monotonic()
    has_answered = False
    while True:
        nap = pause if has_answered or address is None else min(pause, _FIRST_ANSWER_SECONDS)
        await asyncio.sleep(nap)
        if is_stopped(process_id):
            is_alive, why = False, "was stopped"
        else:
            answers = await is_answering(address, pause) if address is not None else None
            if answers and not has_answered:
                has_answered = True
                on_server()
            is_alive, why = answers is not False or not has_answered, "did not answer at its port"
        now = time.monotonic()
        lag = now - checked_at - nap - pause  # the sleep takes `nap`, and a missing answer `pause`
        if lag > 0:
            alive_at += lag
            started_at += lag
        checked_at = now
        if is_alive:
            alive_at = now
        if now - alive_at >= timeout_seconds:
            return f"{why} for {timeout_seconds:g} s"
        if server_timeout_seconds is not None and not has_answered and now - started_at >= server_timeout_seconds:
            return f"had no server at its port {server_timeout_seconds:g} s after its start"


async def watch_waits(waited_tasks: WaitedTasks, on_change: Callable[[tuple[str, ...]], None]) -> None:
    """Call `on_change` with the names of the tasks for which the child waits, each time they change, until cancelled.

    This is checked once per second.
    """
    names: tuple[str, ...] = ()
    while True:
        await asyncio.sleep(_WAITS_SECONDS)
        before, names = names, waited_tasks.names(time.monotonic())
        if names != before:
            on_change(names)


async def watch_usage(
    process_id: int,
    parent_id: int,
    port: int | None,
    on_usage: Callable[[Usage], None],
    num_tasks: int = 1,
    orphan_seconds: Callable[[], float] = lambda: 0.0,
) -> None:
    """Measure the resource usage of the child and its descendants until cancelled. Call `on_usage` with each result.

    The first measurement is after 1 s, the next every max(5 s, num_tasks x 10 ms). A measurement has no result if /proc
    does not show the child.

    Args:
        process_id: Process id of the child.
        parent_id: Process id of its parent, which adopts orphans of the child.
        port: The port of the child's server. None if the child has no server.
        num_tasks: Number of tasks of the job.
        orphan_seconds: Returns the processor time in seconds of descendants that have ended, and that the child has not
            reaped, because their parent ended before them.
    """
    pause = _FIRST_USAGE_SECONDS
    connections: dict[int, tuple[int, int]] = {}  # includes closed connections
    while True:
        await asyncio.sleep(pause)
        pause = usage_interval_seconds(num_tasks)
        if port is not None:
            connections.update(read_traffic(port))
        try:
            stats = _read_family(process_id, parent_id)
        except OSError:
            continue  # the child has ended, or this is not Linux
        memory = sum(stat.resident_pages for stat in stats) * os.sysconf("SC_PAGE_SIZE")
        cpu_seconds = sum(stat.cpu_ticks for stat in stats) / os.sysconf("SC_CLK_TCK") + orphan_seconds()
        sent, received = (sum(count[side] for count in connections.values()) for side in (0, 1))
        on_usage(Usage(memory, round(cpu_seconds, 2), sent, received))


def _read_family(process_id: int, parent_id: int) -> list[ProcessStat]:
    """Return the state of a child, its descendants and orphans. A descendant that has just ended is left out."""
    found = [read_stat(process_id)]
    for each in walk_family(process_id, parent_id):
        with contextlib.suppress(OSError):
            found += [read_stat(each)] if each != process_id else []
    return found


def read_traffic(port: int) -> dict[int, tuple[int, int]]:
    """Return (bytes sent, bytes received) of each open TCP connection to a local port, by the inode of its socket.

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


def _split(data: bytes, header: str, header_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (type, payload) of each netlink message, or of each attribute of a message, in `data`.

    Each of them starts with a header. Its first two fields are the length with the header, and the type. Each starts at
    a multiple of 4 bytes, so up to 3 bytes of padding precede the next one.

    Args:
        header: Format of these two fields for `struct`.
        header_bytes: Size of the whole header in bytes.
    """
    while len(data) >= header_bytes:
        length, kind = struct.unpack_from(header, data)
        if length < header_bytes:
            return
        yield kind, data[header_bytes:length]
        data = data[(length + 3) & ~3 :]
