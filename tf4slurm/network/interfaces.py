"""The addresses of this host: on the interface somebody asks for, towards another host, or all of them."""

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
_FAST_NAMES = ("ib*", "hsn*")  # InfiniBand, and HPE Slingshot, where the driver says Ethernet
_DISCARD_PORT = 9


@dataclass(frozen=True)
class Interface:
    """One network interface of this host.

    Attributes:
        addresses: Those that other hosts can use, IPv4 first; none while the interface is down.
        hardware_type: As in /sys/class/net/*/type (ARPHRD_…); None where the system does not say.
        speed: In Mbit/s; 0 where the driver does not say.
    """

    name: str
    addresses: tuple[str, ...]
    hardware_type: int | None
    speed: int


def interface_address(interface: str, node: str) -> str:
    """Return the address of this host on the interface that is asked for, IPv4 before IPv6.

    Args:
        interface: One of these, or several in order of preference with commas between:
            a name ("ib0"), a glob ("ib*"), a network ("10.149.0.0/16"), "infiniband" (by hardware type, else named ib*
            or hsn*), "fastest" (by link speed), or a rule for sites that give the network other host names
            ("{host}-ib0").
        node: Slurm's name of this node, which such a rule is about; outside of Slurm the host name.

    Raises:
        InterfaceError: None fits, or several do where one was asked for; the text lists what there is.
    """
    found = list_interfaces()
    for wish in interface.split(","):
        addresses = _addresses_of(wish.strip(), found, node)
        if len(addresses) > 1:
            what = f"Interface {wish!r} fits several on node {node}: {_describe(found, addresses)}"
            raise InterfaceError(f"{what}. Name one, or several in order of preference.", interface=wish, available=())
        if addresses:
            return addresses[0]
    usable = [each.name for each in found if each.addresses]
    exists = any(each.name == interface for each in found)
    raise InterfaceError(
        f"Interface {interface!r} {'has no address or is down' if exists else 'does not exist'} on node "
        f"{node}. Found: {', '.join(usable) or 'none'}. "
        "Choose one of these, or leave it out for the route to the launcher.",
        interface=interface,
        available=usable,
    )


def list_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces of this host, by name."""
    import psutil  # here, because most agents never ask: it costs them 20 ms

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
    """Return the address of this host from which packets to `host` leave. Nothing is sent.

    Raises:
        OSError: The host name is unknown, or there is no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def host_addresses() -> tuple[str, ...]:
    """Return all addresses at which other hosts may reach this one: of interfaces that are up, IPv4 first."""
    found = [address for interface in list_interfaces() for address in interface.addresses]
    return tuple(sorted((address for address in found if not is_loopback(address)), key=_is_ipv6))


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this host itself can reach (127.0.0.0/8, ::1)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses_of(wish: str, found: Sequence[Interface], node: str) -> list[str]:
    """Return one address of each interface that one wish fits."""
    if "{host}" in wish:
        named = _resolve(wish.replace("{host}", node))
        return [address for each in found for address in each.addresses if address in named][:1]
    if "/" in wish:
        network = _network(wish)
        inside = ([a for a in each.addresses if ipaddress.ip_address(a) in network] for each in found)
        return [addresses[0] for addresses in inside if addresses]
    able = [each for each in found if each.addresses]
    if wish == INFINIBAND:
        fitting = [each for each in able if each.hardware_type == _ARPHRD_INFINIBAND]
        fitting = fitting or [each for each in able if any(fnmatch.fnmatch(each.name, name) for name in _FAST_NAMES)]
    elif wish == FASTEST:
        others = [each for each in able if not is_loopback(each.addresses[0])]
        fitting = [each for each in others if each.speed == max(other.speed for other in others)]
    else:
        fitting = [each for each in able if fnmatch.fnmatchcase(each.name, wish)]
    return [each.addresses[0] for each in fitting]


def _network(wish: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(wish, strict=False)
    except ValueError as error:
        text = f'Interface {wish!r} is not a network: {error}. Write it as "10.149.0.0/16".'
        raise InterfaceError(text, interface=wish) from error


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
