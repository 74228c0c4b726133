"""Addresses of this host: on a requested interface, on the route to another host, or on all interfaces."""

from __future__ import annotations

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
        addresses: All addresses that are not link-local, IPv4 first; empty while the interface is down.
        hardware_type: The number in /sys/class/net/*/type (ARPHRD_…); None if unknown.
        speed: Link speed in Mbit/s; 0 if unknown.
    """

    name: str
    addresses: tuple[str, ...]
    hardware_type: int | None
    speed: int


def interface_address(interface: str, node: str) -> str:
    """Return the address of this host on the requested interface, IPv4 before IPv6.

    Args:
        interface: A name ("ib0"), a glob ("ib*"), a network ("10.149.0.0/16"), "infiniband" (by hardware type, or else
            the names ib* and hsn*), "fastest" (by link speed), or a host name pattern ("{host}-ib0"), if the names of
            nodes differ in that network; or several of these, separated by commas, in order of preference.
        node: Slurm's name of this node (`slurm.step.own_node_name`), which replaces "{host}".

    Raises:
        InterfaceError: No interface matches, or one pattern matches several interfaces, which the message lists.
    """
    found = list_interfaces()
    for pattern in interface.split(","):
        addresses = _matching_addresses(pattern.strip(), found, node)
        if len(addresses) > 1:
            what = f"Interface {pattern!r} matches several on node {node}: {_describe(found, addresses)}"
            message = f"{what}. Choose one, or list several in order of preference."
            raise InterfaceError(message, interface=pattern)
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
    """Return a task's address on this node: on the requested interface, or else on the route to the launcher.

    Raises:
        InterfaceError: See `interface_address`.
        OSError: See `route_address`.
    """
    return interface_address(interface, node) if interface else route_address(launcher)


def list_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces of this host, by name."""
    import psutil  # imported here, because that takes 20 ms and most agents do not need it

    stats = psutil.net_if_stats()
    result = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        is_up = name in stats and stats[name].isup
        texts = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6) and "%" not in e.address]
        usable = [text for text in texts if is_up and not ipaddress.ip_address(text).is_link_local]
        speed = stats[name].speed if name in stats else 0
        result.append(Interface(name, tuple(sorted(usable, key=_is_ipv6)), _hardware_type(name), speed))
    return tuple(result)


def route_address(host: str) -> str:
    """Return the source address of this host for packets to `host`, without sending any packet.

    Raises:
        OSError: The host name is unknown, or there is no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def host_addresses() -> tuple[str, ...]:
    """Return the addresses of all interfaces that are up, except loopback; IPv4 first."""
    found = [address for interface in list_interfaces() for address in interface.addresses]
    return tuple(sorted((address for address in found if not is_loopback(address)), key=_is_ipv6))


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address (127.0.0.0/8, ::1)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _matching_addresses(pattern: str, found: Sequence[Interface], node: str) -> list[str]:
    """Return one address of each interface that `pattern` matches."""
    if "{host}" in pattern:
        named = _resolve(pattern.replace("{host}", node))
        return [address for each in found for address in each.addresses if address in named][:1]
    if "/" in pattern:
        network = _network(pattern)
        inside = ([a for a in each.addresses if ipaddress.ip_address(a) in network] for each in found)
        return [addresses[0] for addresses in inside if addresses]
    usable = [each for each in found if each.addresses]
    if pattern == INFINIBAND:
        matching = [each for each in usable if each.hardware_type == _ARPHRD_INFINIBAND]
        matching = matching or [
            each for each in usable if any(fnmatch.fnmatch(each.name, name) for name in _FAST_NAMES)
        ]
    elif pattern == FASTEST:
        others = [each for each in usable if not is_loopback(each.addresses[0])]
        matching = [each for each in others if each.speed == max(other.speed for other in others)]
    else:
        matching = [each for each in usable if fnmatch.fnmatchcase(each.name, pattern)]
    return [each.addresses[0] for each in matching]


def _network(pattern: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(pattern, strict=False)
    except ValueError as error:
        text = f'Interface {pattern!r} is not a network: {error}. Write it as "10.149.0.0/16".'
        raise InterfaceError(text, interface=pattern) from error


def _resolve(name: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def _describe(found: Sequence[Interface], addresses: Sequence[str]) -> str:
    return ", ".join(f"{each.name} ({a})" for a in addresses for each in found if a in each.addresses)


def _hardware_type(name: str) -> int | None:
    try:
        return int(Path("/sys/class/net", name, "type").read_text())
    except (OSError, ValueError):
        return None


def _is_ipv6(address: str) -> bool:
    return ":" in address
