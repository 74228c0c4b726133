"""What is looked at of one host: its interfaces, proxies, limits, ports, and MUNGE."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import shutil
from collections.abc import Mapping, Sequence

from tf4slurm.control.munge import seal_for_this_user
from tf4slurm.doctor.finding import Finding
from tf4slurm.errors import InterfaceError, PlacementError
from tf4slurm.network.interfaces import Interface, interface_address, is_loopback, list_interfaces
from tf4slurm.network.ports import HeldPort, format_ports, hold_port
from tf4slurm.slurm.step import own_node_name

# Measured: of 3 tasks each has 13 open, and one more for each further task; with 40 they run, with 24 none starts.
_FEW_FILES, _TOO_FEW_FILES = 1024, 64
# Measured with TensorFlow 2.21: with one of these its cluster never forms; all_proxy and HTTP_PROXY do no harm. Spared
# is what no_grpc_proxy names, or where that is not set no_proxy, whole or by its network; NO_PROXY, "*" and an ending
# without a dot spare nothing.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_PORTS = 64  # as many of a range are tried


def check_host(environ: Mapping[str, str], interface: str | None, ports: Sequence[int]) -> list[Finding]:
    """Look at this host; `interface` and `ports` are what a job would be told."""
    return [
        check_interfaces(interface, own_node_name(environ)),
        check_proxies(environ, [address for each in network_interfaces() for address in each.addresses]),
        check_open_files(),
        check_ports(ports),
        check_munge(),
    ]


def network_interfaces() -> list[Interface]:
    """Return the interfaces that other hosts can reach, by name."""
    return [each for each in list_interfaces() if each.addresses and not is_loopback(each.addresses[0])]


def check_interfaces(interface: str | None, node: str) -> Finding:
    """Tell which interfaces there are, and whether the one that is asked for is."""
    found = network_interfaces()
    names = ", ".join(f"{each.name} (InfiniBand)" if each.hardware_type == 32 else each.name for each in found)
    detail = ", ".join(f"{each.name} {each.addresses[0]}" for each in found)
    if interface is not None:
        try:
            interface_address(interface, node)
        except InterfaceError as error:
            todo = "Bring it up, leave the node out (sbatch --exclude), or choose another interface."
            return Finding("fail", "interfaces", " ".join(str(error).split(". ")[:1]), todo)
    if not found:
        return Finding("warn", "interfaces", "only this host reaches itself", "Jobs of several hosts need a network.")
    return Finding("ok", "interfaces", f"up: {names}", detail=detail)


def check_proxies(environ: Mapping[str, str], addresses: Sequence[str]) -> Finding:
    """Tell whether gRPC would ask a proxy for one of these addresses. The proxy's own address may hold a password."""
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    if proxy is None:
        return Finding("ok", "proxy", "no proxy is set")
    spared = environ.get("no_grpc_proxy") or environ.get("no_proxy", "")
    lacking = [address for address in addresses if not _is_spared(address, spared)]
    if not lacking:
        return Finding("ok", "proxy", f"{proxy} is set, and no_proxy names this host's addresses")
    todo = (
        "tf4slurm adds the job's addresses to no_proxy by itself. In scripts that have their map from elsewhere: "
        f"unset {' '.join(_PROXIES)}; or add the networks of all nodes to no_proxy, such as 10.1.0.0/16."
    )
    text = f"{proxy} is set, and no_proxy lacks this host's addresses: TensorFlow asks the proxy for them, and hangs"
    return Finding("warn", "proxy", text, todo, detail=f"not named: {', '.join(lacking)}")


def check_open_files() -> Finding:
    """Tell how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a process may have {'any number of' if soft == resource.RLIM_INFINITY else soft} files open"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Finding("ok", "open files", text)
    high = 65536 if hard == resource.RLIM_INFINITY else hard
    todo = f"ulimit -n {high}, in the shell that submits too: Slurm takes its limits along."
    if high < _FEW_FILES:
        todo = f"Ask those who run this host for at least {_FEW_FILES} (limits.conf, LimitNOFILE of slurmd)."
    if soft < _TOO_FEW_FILES:
        return Finding("fail", "open files", f"{text}: too few for TensorFlow to start", todo)
    return Finding("warn", "open files", f"{text}: too few for jobs of hundreds of tasks", todo)


def check_ports(candidates: Sequence[int]) -> Finding:
    """Hold ports for a moment: of these, or any."""
    held: list[HeldPort] = []
    tried = candidates[:_PORTS]
    try:
        for port in tried or (0,):
            try:
                held.append(hold_port((port,) if port else ()))
            except PlacementError:
                continue
    except OSError as error:
        return Finding(
            "fail", "free ports", f"no port can be had: {error.strerror}", "Look at the limits of this host."
        )
    finally:
        for each in held:
            each.close()
    if not candidates:
        return Finding("ok", "free ports", "ports can be had")
    text = f"of {len(tried)} ports ({format_ports(tried)}) {len(held)} are free"
    if not held:
        return Finding("fail", "free ports", text, "Give --ports another range, or leave it out.")
    return Finding("ok", "free ports", text)


def check_munge() -> Finding:
    """Seal a word and open it again."""
    if seal_for_this_user("probe") is not None:
        return Finding("ok", "munge", "MUNGE works")
    if shutil.which("munge") is None:
        return Finding("ok", "munge", "there is no MUNGE here: the job's secret lies in a file that only you can read")
    text = "MUNGE is installed but does not work: munged does not run, or not for this user"
    return Finding("warn", "munge", text, "Start munged; each job asks it in vain for 2 s.")


def _is_spared(address: str, no_proxy: str) -> bool:
    """Whether no_proxy names an address, whole or by its network."""
    for entry in filter(None, (part.strip() for part in no_proxy.split(","))):
        with contextlib.suppress(ValueError):  # a name: it spares no address
            if ipaddress.ip_address(address) in ipaddress.ip_network(entry, strict=False):
                return True
    return False
