"""Strangers at a port: many connections that go so far and no further; reports what became of them.

    python flood.py KIND HOST PORT CONNECTIONS SECONDS

KIND is how far each goes: "silent" says nothing, "http2" completes HTTP/2, "stream" opens a stream, "nonce" says a
nonce, "deaf" says one and takes no answer, "half" begins a message of 60 KB that never ends, "slow" says HTTP/2's first
words a byte a second, "garbage" speaks something else, "reopen" ends its stream each second and opens another. It ends
with its stdin, when all connections are closed, or after SECONDS; its last line is a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SHUT = PREFACE[:-9] + bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + bytes((0, 4, 0, 0, 0, 0))  # a window of nothing
SETTINGS_TAKEN = bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))
_HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/tf4slurm.Control/Join",
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


_BLOCK = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in _HEADERS.items())
STREAM = frame(1, 4, _BLOCK)
NONCE = frame(0, 0, b"\0" + (16).to_bytes(4, "big") + b"n" * 16)
HALF = frame(0, 0, b"\0" + (60_000).to_bytes(4, "big") + b"h" * 16_000) + frame(0, 0, b"h" * 16_000) * 2

WORDS = {
    "silent": b"",
    "http2": PREFACE + SETTINGS_TAKEN,
    "stream": PREFACE + SETTINGS_TAKEN + STREAM,
    "nonce": PREFACE + SETTINGS_TAKEN + STREAM + NONCE,
    "deaf": SHUT + SETTINGS_TAKEN + STREAM + NONCE,
    "half": PREFACE + SETTINGS_TAKEN + STREAM + HALF,
    "slow": b"",
    "reopen": PREFACE + SETTINGS_TAKEN + STREAM,
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\xff" * 1000,
}


class Flood:
    """Keeps connections of one kind."""

    def __init__(self, kind: str, address: tuple[str, int]) -> None:
        self._kind = kind
        self._address = address
        self._poll = select.epoll()
        self._said: dict[socket.socket, int] = {}
        self._by_number: dict[int, socket.socket] = {}
        self.opened = self.closed = 0

    @property
    def open(self) -> int:
        return len(self._said)

    def connect(self) -> None:
        """Begin one connection."""
        stranger = socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            stranger.connect(self._address)
        self._said[stranger] = -1
        self._by_number[stranger.fileno()] = stranger
        self._poll.register(stranger, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        self.opened += 1

    def step(self) -> None:
        """Let what happens within 0.1 s happen."""
        for number, event in self._poll.poll(0.1):
            stranger = self._by_number[number]
            if event & select.EPOLLOUT and self._said[stranger] < 0:
                self._said[stranger] = 0
                with contextlib.suppress(OSError):
                    stranger.send(WORDS[self._kind])
            if event & ~select.EPOLLOUT and not self._is_open(stranger):
                self._drop(stranger)

    def say_more(self) -> None:
        """Say on each connection what its kind says each second."""
        for stranger, said in self._said.items():
            if said < 0:
                continue
            if self._kind == "slow":
                words = PREFACE[said : said + 1]
            else:
                words = frame(3, 0, bytes(4), 2 * said + 1) + frame(1, 4, _BLOCK, 2 * said + 3)
            with contextlib.suppress(OSError):
                stranger.send(words)
            self._said[stranger] = said + 1

    def _is_open(self, stranger: socket.socket) -> bool:
        try:
            while stranger.recv(65536):
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _drop(self, stranger: socket.socket) -> None:
        del self._said[stranger], self._by_number[stranger.fileno()]
        stranger.close()
        self.closed += 1


def main(kind: str, host: str, port: str, connections: str, seconds: str) -> None:
    """Open the connections and keep them."""
    flood = Flood(kind, (host, int(port)))
    began = time.monotonic()
    end, next_word = began + float(seconds), began + 1
    while flood.opened < int(connections):
        for _ in range(min(100, int(connections) - flood.opened)):
            flood.connect()
        flood.step()
    print("flooding", flush=True)
    while flood.open and time.monotonic() < end and not select.select([sys.stdin], [], [], 0)[0]:
        flood.step()
        if kind in ("slow", "reopen") and time.monotonic() >= next_word:
            flood.say_more()
            next_word += 1
    taken = round(time.monotonic() - began, 2)
    print(json.dumps({"opened": flood.opened, "closed": flood.closed, "open": flood.open, "seconds": taken}))


if __name__ == "__main__":
    main(*sys.argv[1:])
