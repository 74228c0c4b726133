"""The addresses of the host that the tests run on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tf4slurm.errors import InterfaceError
from tf4slurm.network.interfaces import (
    host_addresses,
    interface_address,
    is_loopback,
    list_interfaces,
    route_address,
    task_address,
)

LOOPBACK = "lo" if Path("/sys/class/net/lo").exists() else "lo0"


def can_bind(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def test_loopback_interface_has_its_address() -> None:
    assert interface_address(LOOPBACK, "n1") == "127.0.0.1"


@pytest.mark.parametrize(
    "pattern",
    [
        f"{LOOPBACK[:-1]}[{LOOPBACK[-1]}]",
        "127.0.0.0/8",
        "127.0.0.1/24",
        f"ib-nowhere,{LOOPBACK}",
        f"10.255.255.252/30, {LOOPBACK} ,ib-nowhere",
    ],
)
def test_pattern_matches_the_loopback_interface(pattern: str) -> None:
    assert interface_address(pattern, "n1") == "127.0.0.1"


def test_host_name_pattern() -> None:
    assert interface_address("{host}", "localhost") in ("127.0.0.1", "::1")
    assert interface_address("local{host}", "host") in ("127.0.0.1", "::1")


def test_pattern_that_matches_several_is_refused() -> None:
    usable = [each for each in list_interfaces() if each.addresses]
    if len(usable) < 2:
        pytest.skip("this host has one interface only")
    with pytest.raises(InterfaceError) as caught:
        interface_address("*", "n1")
    assert "Interface '*' matches several on node " in str(caught.value)
    for each in usable:
        assert f"{each.name} ({each.addresses[0]})" in str(caught.value)


@pytest.mark.parametrize("pattern", ["10.0.0.0/33", "ib0/24", "/"])
def test_invalid_network_is_refused(pattern: str) -> None:
    with pytest.raises(InterfaceError, match="is not a network") as caught:
        interface_address(pattern, "n1")
    assert caught.value.interface == pattern


def test_interfaces_are_those_of_the_system() -> None:
    found = list_interfaces()
    assert {LOOPBACK} <= {each.name for each in found} <= {name for _, name in socket.if_nameindex()}
    assert [each.name for each in found] == sorted(each.name for each in found)
    for each in found:
        assert all(map(can_bind, each.addresses))


def test_fastest_interface_is_never_loopback() -> None:
    others = [each for each in list_interfaces() if each.addresses and not is_loopback(each.addresses[0])]
    found: str | InterfaceError
    try:
        found = interface_address("fastest", "n1")
    except InterfaceError as error:
        found = error
    if others and max(each.speed for each in others) > min(each.speed for each in others):
        assert found in [each.addresses[0] for each in others]
    elif len(others) == 1:
        assert found == others[0].addresses[0]
    else:
        assert isinstance(found, InterfaceError)


def test_unknown_name_lists_the_interfaces() -> None:
    with pytest.raises(InterfaceError) as caught:
        interface_address("ib-nowhere", "n1")
    error = caught.value
    assert str(error).startswith("Interface 'ib-nowhere' does not exist on node n1. Found: ")
    assert error.interface == "ib-nowhere"
    assert LOOPBACK in error.available
    assert ", ".join(error.available) in str(error)


@pytest.mark.parametrize("name", [name for _, name in socket.if_nameindex()])
def test_every_interface_has_an_address_of_this_host_or_an_error_with_the_reason(name: str) -> None:
    found: str | InterfaceError
    try:
        found = interface_address(name, "n1")
    except InterfaceError as error:
        found = error
    if isinstance(found, InterfaceError):
        assert f"Interface {name!r} has no address or is down" in str(found)
        assert name not in found.available
    else:
        assert can_bind(found)


@pytest.mark.parametrize("host", ["127.0.0.1", *host_addresses()])
def test_route_to_an_own_address_is_that_address(host: str) -> None:
    assert route_address(host) == host


def test_route_to_a_host_name() -> None:
    assert is_loopback(route_address("localhost"))


def test_no_route_is_an_error() -> None:
    with pytest.raises(OSError, match=r"denied|unreachable"):
        route_address("255.255.255.255")


def test_addresses_of_the_host_have_ipv4_first_and_no_loopback() -> None:
    addresses = host_addresses()
    assert all(map(can_bind, addresses))
    assert not any(map(is_loopback, addresses))
    versions = [":" in address for address in addresses]
    assert versions == sorted(versions)
    if not addresses:
        pytest.skip("this host has no address but loopback")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("fd00::1", False),
        ("n001", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_task_address_is_that_of_the_interface_or_of_the_route() -> None:
    assert task_address(LOOPBACK, "n1", "192.0.2.1") == interface_address(LOOPBACK, "n1")
    assert task_address(None, "n1", "127.0.0.1") == "127.0.0.1"
    assert task_address("{host}", "localhost", "192.0.2.1") in ("127.0.0.1", "::1")
