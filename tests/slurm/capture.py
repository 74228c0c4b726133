"""Records the TCP payload that passes any interface of this host, until standard input ends.

    python capture.py FILE FIRST-PORT-LAST-PORT...    (as root; prints "capturing" when it has begun)

FILE gets the payload of each connection and direction in one piece, of packets from or to a port of the ranges.
"""

from __future__ import annotations

import select
import socket
import sys
from collections import defaultdict
from pathlib import Path

_ETH_P_ALL, _ETH_P_IP = 3, 0x0800
_ETHERNET_BYTES = 14
_TCP = 6


def read_packet(frame: bytes, ports: frozenset[int]) -> tuple[bytes, bytes] | None:
    """Return the connection and direction of an Ethernet frame, and its payload; None if it is of no interest."""
    packet = frame[_ETHERNET_BYTES:]
    if frame[12:14] != _ETH_P_IP.to_bytes(2, "big") or packet[9] != _TCP:
        return None
    header_bytes, total_bytes = 4 * (packet[0] & 15), int.from_bytes(packet[2:4], "big")
    segment = packet[header_bytes:total_bytes]
    if not ports & {int.from_bytes(segment[:2], "big"), int.from_bytes(segment[2:4], "big")}:
        return None
    return packet[12:20] + segment[:4], segment[4 * (segment[12] >> 4) :]


def main(file: str, *ranges: str) -> None:
    ports = frozenset(
        port for first, _, last in (text.partition("-") for text in ranges) for port in range(int(first), int(last) + 1)
    )
    streams: dict[bytes, list[bytes]] = defaultdict(list)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
        print("capturing", flush=True)
        while sys.stdin not in (ready := select.select([wire, sys.stdin], [], [])[0]):
            if wire in ready and (found := read_packet(wire.recv(65536), ports)) is not None:
                streams[found[0]].append(found[1])
    Path(file).write_bytes(b"\n".join(b"".join(parts) for parts in streams.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
