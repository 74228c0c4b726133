"""How many bytes went over the TCP connections to a port of this host, as the kernel counts them.

Linux tells it to anyone by its socket diagnosis (netlink, `man 7 sock_diag`), connection by connection; a connection
that has ended is told no more.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_SOCK_DIAG_BY_FAMILY = 20
_REQUEST, _DUMP = 0x1, 0x300
_DONE, _ERROR = 3, 2
_NETLINK_SOCK_DIAG = 4
_ESTABLISHED = 1 << 1
_TCP_INFO = 2
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states; then the socket's identity
_IDENTITY = struct.Struct("=HH16s16sIII")
_ANSWER_BYTES = 72  # of inet_diag_msg, before its attributes
_BYTES_AT = 120  # of tcpi_bytes_acked and tcpi_bytes_received in tcp_info, since Linux 4.1
_TIMEOUT_SECONDS = 0.5


def read_traffic(port: int) -> dict[int, tuple[int, int]]:
    """Return, for each connection to this port that others made, (bytes sent, bytes received); keys are its inodes.

    Empty where the kernel does not tell.
    """
    found: dict[int, tuple[int, int]] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_SECONDS)
            for family in (socket.AF_INET, socket.AF_INET6):
                kernel.send(_query(family, port))
                found.update(_read_answer(kernel, port))
    except (OSError, AttributeError, struct.error):  # not Linux, or not allowed
        pass
    return found


def _query(family: int, port: int) -> bytes:
    identity = _IDENTITY.pack(socket.htons(port), 0, b"", b"", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    body = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 0, _ESTABLISHED) + identity
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 0, 0) + body


def _read_answer(kernel: socket.socket, port: int) -> Iterator[tuple[int, tuple[int, int]]]:
    while True:
        data = kernel.recv(1 << 16)
        while len(data) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(data)[:2]
            if kind in (_DONE, _ERROR) or length < _HEADER.size:
                return
            message, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
            if socket.ntohs(struct.unpack_from("=H", message, 4)[0]) == port:
                inode = struct.unpack_from("=I", message, _ANSWER_BYTES - 4)[0]
                for attribute, value in _attributes(message[_ANSWER_BYTES:]):
                    if attribute == _TCP_INFO and len(value) >= _BYTES_AT + 16:
                        yield inode, struct.unpack_from("=QQ", value, _BYTES_AT)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind, data[4:length]
        data = data[(length + 3) & ~3 :]
