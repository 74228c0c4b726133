"""Choose a free TCP port, hold it, and hand it over to the child process without a race.

An agent holds a port with a socket, the holder. The holder is bound without SO_REUSEPORT, so that ports in use are
skipped. Then the agent sets this option. From then on another socket of the same user can listen on the port if it has
the option, too. TensorFlow's server has it with TF_GRPC_REUSE_PORT=true, from TensorFlow 2.3 on. The holder never
listens, so every connection reaches the child.

Other servers, such as those of TensorFlow 1.15, set SO_REUSEADDR only. Linux lets two sockets bind a port if both have
this option and neither listens (inet_csk_bind_conflict). It reads the option of the holder at the time of the other's
bind, so the holder gets it when the child starts (`HeldPort.share`). As long as no server listens, another program with
SO_REUSEADDR could then bind the port, too, if it asks for this port: the kernel gives it to nobody that asks for any
port (port 0), nor to a connection. When a server listens, all others are refused.

A server that has ended leaves its port in TIME_WAIT for a minute. To bind such a port, a holder needs SO_REUSEADDR.
With this option it could also bind the port of another holder. Therefore each holder first claims its port with an
abstract Unix socket, whose name contains the port and exists only once on this host.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Sequence

from tf4slurm.errors import PortsInUseError

_BACKLOG = 128
_LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp (include/net/tcp_states.h)
_MAX_CHARACTERS = 60_000  # of ports as text: Linux allows 131,072 bytes for a variable or an argument


class HeldPort:
    """A TCP port on all addresses of this host, which this process holds until `close`.

    In this time other sockets can use the port only if they belong to this user and have SO_REUSEPORT, or after
    `share(with_every_server=True)` if they have SO_REUSEADDR.
    """

    def __init__(self, holder: socket.socket, claim: socket.socket | None) -> None:
        self._holder = holder
        self._claim = claim
        self.port: int = holder.getsockname()[1]

    def listen(self) -> socket.socket:
        """Return a non-blocking socket that listens on the port.

        Close this socket before the child listens. Otherwise some of the child's connections would go to this socket.
        """
        listener = _wildcard_socket(self._holder.family)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # both, like TensorFlow's server
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(("", self.port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener

    def share(self, *, with_every_server: bool) -> None:
        """Let servers without SO_REUSEPORT listen on the port, too, or refuse them again. See the top of this file."""
        if self._holder.fileno() != -1:
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, with_every_server)

    def release(self) -> None:
        """Let any program have the port. Other tasks of tf4slurm still pass over it if it was one of the candidates."""
        self._holder.close()

    def close(self) -> None:
        self._holder.close()
        if self._claim is not None:
            self._claim.close()


def hold_port(candidates: Sequence[int] = ()) -> HeldPort:
    """Hold the first free port of `candidates`. Without candidates, the kernel chooses a port.

    Raises:
        PortsInUseError: Every candidate is in use on this host.
        OSError: A port cannot be bound for another reason, such as a missing permission for ports below 1024.
    """
    num_held = 0  # by other processes of tf4slurm
    for port in candidates or (0,):
        claim = _claim(port) if port else None
        if port and claim is None and sys.platform == "linux":  # elsewhere there are no claims
            num_held += 1
            continue  # even if it is free: its task may have released it for its server (`HeldPort.release`)
        holder = _bind(port) or (_bind(port, in_time_wait=True) if claim is not None else None)
        if holder is not None:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return HeldPort(holder, claim)
        if claim is not None:
            claim.close()
    held = f"Tasks of tf4slurm hold {num_held} of them, and each task needs one. " if num_held else ""
    raise PortsInUseError(
        f"None of the {len(candidates)} ports {format_ranges(candidates)} is free on this host. {held}Give another "
        "range, or a larger one."
    )


def count_free(candidates: Sequence[int], most: int) -> int:
    """Return how many of the candidates are free on this host. Stop to count at `most`.

    Raises:
        OSError: As for `hold_port`.
    """
    num_free = 0
    for port in candidates:
        if num_free == most:
            break
        with contextlib.suppress(PortsInUseError):
            hold_port((port,)).close()
            num_free += 1
    return num_free


def has_listener(port: int) -> bool:
    """Return whether a socket of any process of this host listens on the port. Without /proc, return False."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as table:
            next(table)  # the heading
            for line in table:
                _, local, _, state, _ = line.split(maxsplit=4)
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False


def _bind(port: int, *, in_time_wait: bool = False) -> socket.socket | None:
    holder = _wildcard_socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, in_time_wait)
    try:
        holder.bind(("", port))
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return holder


def _claim(port: int) -> socket.socket | None:
    """Claim a port among the processes of tf4slurm on this host. Return the claim, a Unix socket named after the port.

    Only the process with the claim binds a port that has old connections in TIME_WAIT. For this it needs SO_REUSEADDR,
    with which several processes could bind the port. Return None if the name is in use, or if this is not Linux.
    """
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0tf4slurm-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def parse_ports(text: str) -> tuple[int, ...]:
    """Parse ports in Slurm's notation, such as "23000-23149,23500,23900-23999".

    Raises:
        ValueError: A part is not a port or a range within 1 to 65535, or the text has more than 60,000 characters.
    """
    if len(text) > _MAX_CHARACTERS:
        count = text.count(",") + 1
        raise ValueError(
            f"{count:,} single ports and ranges are too many. Give fewer, such as 61000-61099,62000-62099."
        )
    ports: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
            raise ValueError(f'{part!r} is not a range of ports: expected "first-last" within 1 to 65535.')
        ports.extend(range(int(first), int(last) + 1))
    return tuple(ports)


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ports, or array elements, in Slurm's notation, such as "23000-23149,23500".

    For ports, `parse_ports` is the inverse function.
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _wildcard_socket(family: int | None = None) -> socket.socket:
    """Return a TCP socket for all addresses of this host, with both IP versions if the system allows it."""
    if family is None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    wildcard = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        wildcard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return wildcard
