"""Find the addresses of this host: on a requested interface, on the route to another host, or on all interfaces."""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.errors import InterfaceError

INFINIBAND = "infiniband"
FASTEST = "fastest"
_ARPHRD_INFINIBAND = 32  # linux/if_arp.h
_FAST_NAMES = ("ib*", "hsn*")  # InfiniBand, and HPE Slingshot, whose driver reports Ethernet
_DISCARD_PORT = 9


@dataclass(frozen=True)
class Interface:
    """One network interface of this host.

    Attributes:
        addresses: All addresses but link-local ones, IPv4 first. Empty while the interface is down.
        speed: Link speed in Mbit/s, or 0 if unknown.
    """

    name: str
    addresses: tuple[str, ...]
    is_infiniband: bool
    speed: int


def interface_address(interface: str, node: str) -> str:
    """Return the address of this host on the requested interface, preferably an IPv4 address.

    Args:
        interface: One pattern, or several in order of preference, separated by commas. A pattern is a name ("ib0"), a
            glob ("ib*"), a network ("10.149.0.0/16"), "infiniband" (hardware of this type, or if there is none, the
            names ib* and hsn*), "fastest" (the highest link speed), or a host name with "{host}" ("{host}-ib0").
        node: Slurm's name of this node, which replaces "{host}".

    Raises:
        InterfaceError: No interface with an address matches, or the first pattern with a match matches several
            interfaces. The message lists the interfaces. Also raised if a network is invalid.
    """
    found = list_interfaces()
    for pattern in interface.split(","):
        addresses = _matching_addresses(pattern.strip(), found, node)
        if len(addresses) > 1:
            names = ", ".join(f"{each.name} ({a})" for a in addresses for each in found if a in each.addresses)
            raise InterfaceError(
                f"Interface {pattern!r} matches several on node {node}: {names}. Choose one, or list several in order "
                "of preference.",
                interface=pattern,
            )
        if addresses:
            return addresses[0]
    usable = [each.name for each in found if each.addresses]
    exists = any(each.name == interface for each in found)
    raise InterfaceError(
        f"Interface {interface!r} {'has no address or is down' if exists else 'does not exist'} on node "
        f"{node}. Found: {', '.join(usable) or 'none'}. "
        "Choose one of these, or omit --interface to use the route to the launcher.",
        interface=interface,
        available=usable,
    )


def task_address(interface: str | None, node: str, launcher: str) -> str:
    """Return the address of this host at which other tasks reach a task.

    Args:
        interface: See `interface_address`. None for the address on the route to the launcher.
        node: Slurm's name of this node.
        launcher: Address or name of the launcher's host.

    Raises:
        InterfaceError: See `interface_address`.
        OSError: See `route_address`.
    """
    return interface_address(interface, node) if interface else route_address(launcher)


def list_interfaces() -> tuple[Interface, ...]:
    """Return all interfaces of this host, also those that are down, sorted by name."""
    import psutil  # imported here, because the import takes 20 ms and most agents do not need psutil

    stats = psutil.net_if_stats()
    result = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        is_up = name in stats and stats[name].isup
        texts = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6) and "%" not in e.address]
        usable = [text for text in texts if is_up and not ipaddress.ip_address(text).is_link_local]
        speed = stats[name].speed if name in stats else 0
        result.append(Interface(name, tuple(sorted(usable, key=_is_ipv6)), _is_infiniband(name), speed))
    return tuple(result)


def route_address(host: str) -> str:
    """Return this host's address on the route to `host`. No packet is sent.

    Raises:
        OSError: The host name is unknown, or there is no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def list_connected_interfaces() -> list[Interface]:
    """Return the interfaces of this host that have an address, except loopback."""
    return [each for each in list_interfaces() if each.addresses and not is_loopback(each.addresses[0])]


def host_addresses() -> tuple[str, ...]:
    """Return the addresses of all interfaces of this host except loopback, IPv4 first."""
    return tuple(sorted((a for each in list_connected_interfaces() for a in each.addresses), key=_is_ipv6))


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address in 127.0.0.0/8, ::1, or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _matching_addresses(pattern: str, found: Sequence[Interface], node: str) -> list[str]:
    usable = [each for each in found if each.addresses]
    if "{host}" in pattern:
        named: set[object] = set()
        with contextlib.suppress(OSError):  # an unknown name has no address
            named = {entry[4][0] for entry in socket.getaddrinfo(pattern.replace("{host}", node), None)}
        return [address for each in usable for address in each.addresses if address in named][:1]
    if "/" in pattern:
        try:
            network = ipaddress.ip_network(pattern, strict=False)
        except ValueError as error:
            text = f'Interface {pattern!r} is not a network: {error}. Write it as "10.149.0.0/16".'
            raise InterfaceError(text, interface=pattern) from error
        inside = ([a for a in each.addresses if ipaddress.ip_address(a) in network] for each in usable)
        return [addresses[0] for addresses in inside if addresses]
    if pattern == INFINIBAND:
        fast = [each for each in usable if any(fnmatch.fnmatch(each.name, name) for name in _FAST_NAMES)]
        matching = [each for each in usable if each.is_infiniband] or fast
    elif pattern == FASTEST:
        others = [each for each in usable if not is_loopback(each.addresses[0])]
        matching = [each for each in others if each.speed == max(other.speed for other in others)]
    else:
        matching = [each for each in usable if fnmatch.fnmatchcase(each.name, pattern)]
    return [each.addresses[0] for each in matching]


def _is_infiniband(name: str) -> bool:
    try:
        return int(Path("/sys/class/net", name, "type").read_text()) == _ARPHRD_INFINIBAND
    except (OSError, ValueError):
        return False


def _is_ipv6(address: str) -> bool:
    return ":" in address
