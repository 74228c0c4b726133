"""The addresses of this host: of a named interface, towards another host, or all of them."""

from __future__ import annotations

import ipaddress
import socket

from tf4slurm.errors import InterfaceError

_DISCARD_PORT = 9


def interface_address(interface: str) -> str:
    """Return the address of a network interface of this host, IPv4 before IPv6.

    Raises:
        InterfaceError: No such interface, or it is down or has no address; the text lists those that do.
    """
    addresses = _addresses_by_interface()
    if addresses.get(interface):
        return addresses[interface][0]
    usable = [name for name, found in addresses.items() if found]
    what = "has no address or is down" if interface in addresses else "does not exist"
    raise InterfaceError(
        f"Interface {interface!r} {what} on node {socket.gethostname()}. Found: {', '.join(usable) or 'none'}. "
        "Choose one of these, or leave it out for the route to the launcher.",
        interface=interface,
        available=usable,
    )


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
    found = [address for addresses in _addresses_by_interface().values() for address in addresses]
    return tuple(sorted((a for a in found if not is_loopback(a)), key=lambda address: ":" in address))


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this host itself can reach (127.0.0.0/8, ::1)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses_by_interface() -> dict[str, list[str]]:
    """Return every interface; those that are down, and link-local addresses, bring no address."""
    import psutil  # here, because most agents never ask: it costs them 20 ms

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    result: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        found = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6) and "%" not in e.address]
        found = [a for a in found if not ipaddress.ip_address(a).is_link_local]
        result[name] = sorted(found, key=lambda address: ":" in address) if name in up else []
    return result
