"""Open many unauthenticated connections to a control service, and report how long each stays open.

    python flood.py KIND HOST PORT CONNECTIONS SECONDS

It ends when all connections are closed, when its stdin ends, or after SECONDS; its last line is a JSON object.

Kinds that never complete the TLS handshake:
    idle             TCP only, sends nothing
    half-handshake   half of a ClientHello
    slow-tls         a ClientHello, one byte per second
    garbage          random bytes
    plain-http       an HTTP/1.1 request, without TLS

Kinds that complete it (any certificate is accepted, ALPN is h2), and then:
    handshake        send nothing
    slow-http2       send the HTTP/2 preface, one byte per second
    garbage-after-handshake  send random bytes
    renegotiate      send a second ClientHello, in TLS 1.2
    http2            send the preface and settings
    stream           open a call without a token
    half-headers     send HEADERS without END_HEADERS, and nothing else
    continuation     send HEADERS without END_HEADERS, then CONTINUATION frames as fast as possible
    metadata         open a call with 256 KB of metadata
    bomb             open a call whose metadata are 16,000 references to one entry of 4 KB (HPACK)
    rst              open and reset calls as fast as possible
    pings            send PING frames as fast as possible
    never-reads      open a call, send SETTINGS frames as fast as possible, and never read
    reopen           open a call without a token every second
    stubborn         the same, and acknowledge no PING
    reconnect        open a call with a wrong token, wait for the answer, reset the connection, connect again
    handshake-again  send nothing, and connect again when the service closes the connection
    idle-again       the same, without the handshake
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import statistics
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 1, 3, 4, 6, 9
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, payload: bytes = b"", stream: int = 0) -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _integer(value: int, bits: int, first: int = 0) -> bytes:
    """Return an integer as HPACK encodes it (RFC 7541, 5.1)."""
    most = 2**bits - 1
    if value < most:
        return bytes((first | value,))
    rest, encoded = value - most, bytearray((first | most,))
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes((*encoded, rest))


def _literal(name: str, value: str, first: int = 0) -> bytes:
    """Return a header field; with 0x40 as its first byte, the reader adds it to the table."""
    return bytes((first,)) + _integer(len(name), 7) + name.encode() + _integer(len(value), 7) + value.encode()


def _block(**metadata: str) -> bytes:
    """Return the header block of a call of the service's method."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": "/tf4slurm.Control/Connect",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in metadata.items()},
    }
    return b"".join(_literal(name, value) for name, value in fields.items())


def _call(block: bytes, stream: int) -> bytes:
    """Return the frames that open a call."""
    parts = [block[start : start + 16_000] for start in range(0, len(block), 16_000)]
    frames = [frame(_CONTINUATION, 0, part, stream) for part in parts]
    frames[0] = frame(_HEADERS, 0, parts[0], stream)
    last = bytearray(frames[-1])
    last[4] |= _END_HEADERS
    return b"".join([*frames[:-1], bytes(last)])


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
START = PREFACE + frame(_SETTINGS, 0)
_BLOCK = _block()
_LARGE = _block() + b"".join(_literal(f"x-{number}", "v" * 8_000) for number in range(32))
_BOMB = _block() + _literal("x", "v" * 4_000, 0x40) + bytes((0x80 | 62,)) * 16_000
_GARBAGE = os.urandom(64)


def _next_call(number: int) -> bytes:
    """Return the frames that end the previous call and open another."""
    return frame(_RST_STREAM, 0, bytes(4), 2 * number + 1) + _call(_BLOCK, 2 * number + 3)


def _resets(number: int) -> bytes:
    streams = range(200 * number + 1, 200 * number + 201, 2)
    return b"".join(_call(_BLOCK, stream) + frame(_RST_STREAM, 0, bytes(4), stream) for stream in streams)


@dataclass(frozen=True)
class Kind:
    """The behaviour of the connections of a kind.

    Attributes:
        first: First bytes of each connection: inside TLS if `is_tls`.
        then: Bytes sent after it has acknowledged the service's SETTINGS.
        more: Further bytes, by number: every second, or as fast as possible if `is_fast`.
        reads: It reads what the service sends, after the handshake too.
        acknowledges: It acknowledges PING frames.
    """

    first: bytes = b""
    then: bytes = b""
    more: Callable[[int], bytes] | None = None
    is_tls: bool = True
    is_fast: bool = False
    reads: bool = True
    acknowledges: bool = True
    reconnects: bool = False
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3


def client_hello(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """Return the first record of a TLS client."""
    outgoing = ssl.MemoryBIO()
    tls = _context(version).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _context(version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    return context


_HELLO = client_hello()
KINDS = {
    "idle": Kind(is_tls=False),
    "half-handshake": Kind(_HELLO[: len(_HELLO) // 2], is_tls=False),
    "slow-tls": Kind(more=lambda number: _HELLO[number : number + 1], is_tls=False),
    "garbage": Kind(_GARBAGE, is_tls=False),
    "plain-http": Kind(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", is_tls=False),
    "handshake": Kind(),
    "slow-http2": Kind(more=lambda number: PREFACE[number : number + 1]),
    "garbage-after-handshake": Kind(_GARBAGE),
    "renegotiate": Kind(client_hello(ssl.TLSVersion.TLSv1_2), version=ssl.TLSVersion.TLSv1_2),
    "http2": Kind(START),
    "stream": Kind(START, _call(_BLOCK, 1)),
    "half-headers": Kind(START, frame(_HEADERS, 0, _BLOCK, 1), acknowledges=False),
    "continuation": Kind(
        START,
        frame(_HEADERS, 0, _BLOCK, 1),
        more=lambda _: frame(_CONTINUATION, 0, _literal("x", "v" * 100), 1) * 100,
        is_fast=True,
        acknowledges=False,
    ),
    "metadata": Kind(START, _call(_LARGE, 1)),
    "bomb": Kind(START, _call(_BOMB, 1)),
    "rst": Kind(START, more=_resets, is_fast=True),
    "pings": Kind(START, more=lambda _: frame(_PING, 0, bytes(8)) * 500, is_fast=True),
    "never-reads": Kind(START + _call(_BLOCK, 1), more=lambda _: frame(_SETTINGS, 0) * 500, is_fast=True, reads=False),
    "reopen": Kind(START, _call(_BLOCK, 1), more=_next_call),
    "stubborn": Kind(START, _call(_BLOCK, 1), more=_next_call, acknowledges=False),
    "handshake-again": Kind(reconnects=True),
    "idle-again": Kind(is_tls=False, reconnects=True),
    "reconnect": Kind(START, _call(_block(tf4slurm_token="0" * 64), 1), reconnects=True),
}


class Connection:
    """One unauthenticated connection."""

    def __init__(self, kind: Kind, context: ssl.SSLContext, address: tuple[str, int]) -> None:
        self.began = time.monotonic()
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.is_connected = self.is_ready = self.is_answered = False
        """TCP is connected; `first` has been sent; the service has refused the call."""
        self._kind = kind
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing) if kind.is_tls else None
        self._unsent = self._unread = b""
        self._number = 0
        self._has_started = not kind.then
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(address)

    def step(self, event: int) -> bool:
        """Handle an event; return whether the connection is still open."""
        try:
            if event & (select.EPOLLERR | select.EPOLLHUP):
                return False
            if event & select.EPOLLOUT and not self.is_connected:
                self.is_connected = True
                self._advance()
            self._flush()
            if event & select.EPOLLIN and (self._kind.reads or not self.is_ready):
                return self._read()
            return not event & select.EPOLLRDHUP
        except (OSError, ssl.SSLError):
            return False

    def send_more(self) -> None:
        """Send the next bytes of the kind, unless the service reads nothing."""
        if self._kind.more is not None and self.is_ready and self._has_started and not self._unsent:
            with contextlib.suppress(OSError, ssl.SSLError):
                self._send(self._kind.more(self._number))
                self._number += 1

    def close(self) -> None:
        if self._kind.reconnects:  # reset it, so that its port is free again at once
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _advance(self) -> None:
        """Continue the handshake, then send the first bytes."""
        if self._tls is not None:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return
            finally:
                self._unsent += self._outgoing.read()
        self.is_ready = True
        self._send(self._kind.first)

    def _send(self, data: bytes) -> None:
        if self._tls is None or self._kind.version is not ssl.TLSVersion.TLSv1_3:
            self._unsent += data  # a second ClientHello is not encrypted
        elif data:
            self._tls.write(data)
            self._unsent += self._outgoing.read()
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def _read(self) -> bool:
        """Read all available bytes; return whether the connection is still open."""
        while True:
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self._tls is not None:
                self._incoming.write(data)
                if not self.is_ready:
                    self._advance()
                    self._flush()
                if self.is_ready:
                    self._read_frames(self._tls)

    def _read_frames(self, tls: ssl.SSLObject) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := tls.read(65536):
                self._unread += data
        while len(self._unread) >= 9 + (size := int.from_bytes(self._unread[:3], "big")):
            kind, flags, payload = self._unread[3], self._unread[4], self._unread[9 : 9 + size]
            self._unread = self._unread[9 + size :]
            if kind == _SETTINGS and not flags & _ACK and self._kind.first:
                self._send(frame(_SETTINGS, _ACK) + self._kind.then)
                self._has_started = True
            elif kind == _PING and not flags & _ACK and self._kind.acknowledges:
                self._send(frame(_PING, _ACK, payload))
            elif kind == _HEADERS:
                self.is_answered = True


class Flood:
    """Keeps connections of one kind."""

    def __init__(self, kind: Kind, address: tuple[str, int]) -> None:
        self._kind = kind
        self._address = address
        self._context = _context(kind.version)
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._seconds: list[float] = []
        self.opened = self.ready = self.answered = 0

    @property
    def open(self) -> int:
        return len(self._connections)

    def connect(self) -> None:
        """Open one connection."""
        connection = Connection(self._kind, self._context, self._address)
        number = connection.socket.fileno()
        self._connections[number] = connection
        self._poll.register(number, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        self.opened += 1

    def step(self) -> None:
        """Handle the events of 0.1 s."""
        for number, event in self._poll.poll(0 if self._kind.is_fast else 0.1):
            connection = self._connections[number]
            was_ready, was_answered = connection.is_ready, connection.is_answered
            is_open = connection.step(event)
            self.ready += connection.is_ready - was_ready
            self.answered += connection.is_answered - was_answered
            if not is_open or (self._kind.reconnects and connection.is_answered):
                self._close(number)
        if self._kind.is_fast:
            self.send_more()

    def send_more(self) -> None:
        for connection in self._connections.values():
            connection.send_more()

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number)
        connection.close()
        self._seconds.append(time.monotonic() - connection.began)
        if self._kind.reconnects:
            self.connect()

    def report(self) -> dict[str, float]:
        """Return the numbers of connections and the durations of the closed ones."""
        seconds = self._seconds or [0.0]
        return {
            "opened": self.opened,
            "ready": self.ready,
            "answered": self.answered,
            "closed": len(self._seconds),
            "open": self.open,
            "median": round(statistics.median(seconds), 2),
            "longest": round(max(seconds), 2),
        }


def main(kind: str, host: str, port: str, connections: str, seconds: str) -> None:
    """Open the connections and keep them."""
    os.nice(19)  # lower priority than other tests and the service: a real attacker uses the processor of another host
    flood = Flood(KINDS[kind], (host, int(port)))
    began = time.monotonic()
    end, next_more = began + float(seconds), began + 1
    for _ in range(int(connections)):
        flood.connect()
        if flood.opened % 100 == 0:
            flood.step()
    print("flooding", flush=True)
    while flood.open and time.monotonic() < end and not select.select([sys.stdin], [], [], 0)[0]:
        flood.step()
        if time.monotonic() >= next_more:
            flood.send_more()
            next_more += 1
    print(json.dumps({**flood.report(), "seconds": round(time.monotonic() - began, 2)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
