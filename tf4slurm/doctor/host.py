"""Checks of one host: its software, run directory, interfaces, proxies, limits, ports, and MUNGE."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import shutil
from collections.abc import Mapping, Sequence

from tf4slurm.control.munge import seal_for_this_user
from tf4slurm.doctor.directory import check_directory
from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.software import check_software
from tf4slurm.errors import InterfaceError, PlacementError
from tf4slurm.network.interfaces import Interface, interface_address, is_loopback, list_interfaces
from tf4slurm.network.ports import HeldPort, format_ports, hold_port
from tf4slurm.slurm.environ import own_node_name
from tf4slurm.spec import JobSpec

# Measured: each of 3 tasks has 13 files open, plus one per additional task. With a limit of 40 the tasks run; with 24,
# no task starts.
_FEW_FILES, _TOO_FEW_FILES = 1024, 64
# Measured with TensorFlow 2.21: the cluster never forms if one of these is set; all_proxy and HTTP_PROXY have no
# effect. gRPC skips the proxy for addresses and networks in no_grpc_proxy, or if it is not set, in no_proxy. NO_PROXY,
# "*" and a suffix without a dot have no effect.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_MAX_PORTS = 64  # the most that are tested of a range


def check_host(
    environ: Mapping[str, str], spec: JobSpec, *, is_quick: bool, probe_name: str
) -> tuple[list[Finding], float | None]:
    """Run all checks of this host.

    Args:
        spec: The job whose `runs_directory`, `interface` and `ports` are checked.
        is_quick: Whether to skip the checks that start TensorFlow and pip.
        probe_name: Unique name of the test file that this host writes into the run directory.

    Returns:
        The findings, and the clock skew from `Probe.write` in seconds, None if unknown.
    """
    directory, skew = check_directory(spec.runs_directory, probe_name)
    findings = [
        *check_software(environ, is_quick=is_quick),
        directory,
        check_interfaces(spec.interface, own_node_name(environ)),
        check_proxies(environ, [address for each in network_interfaces() for address in each.addresses]),
        check_open_files(),
        check_ports(spec.ports),
        check_munge(),
    ]
    return findings, skew


def network_interfaces() -> list[Interface]:
    """Return the interfaces that other hosts can reach, sorted by name."""
    return [each for each in list_interfaces() if each.addresses and not is_loopback(each.addresses[0])]


def check_interfaces(interface: str | None, node: str) -> Finding:
    """Report the interfaces of this host, and fail if the requested one has no address."""
    found = network_interfaces()
    names = ", ".join(f"{each.name} (InfiniBand)" if each.hardware_type == 32 else each.name for each in found)
    detail = ", ".join(f"{each.name} {each.addresses[0]}" for each in found)
    if interface is not None:
        try:
            interface_address(interface, node)
        except InterfaceError as error:
            advice = "Bring it up, exclude the node (sbatch --exclude), or choose another interface."
            return Finding("fail", "interfaces", str(error).split(". ")[0], advice)
    if not found:
        return Finding("warn", "interfaces", "only loopback is up", "Jobs on several hosts need a network.")
    return Finding("ok", "interfaces", f"up: {names}", detail=detail)


def check_proxies(environ: Mapping[str, str], addresses: Sequence[str]) -> Finding:
    """Warn if gRPC would use a proxy for these addresses. Hide the proxy's URL: it can contain a password."""
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    if proxy is None:
        return Finding("ok", "proxy", "no proxy is set")
    exempt = environ.get("no_grpc_proxy") or environ.get("no_proxy", "")
    missing = [address for address in addresses if not _is_exempt(address, exempt)]
    if not missing:
        return Finding("ok", "proxy", f"{proxy} is set, and no_proxy contains this host's addresses")
    advice = (
        "tf4slurm itself adds the job's addresses to no_proxy. For scripts that do not get the cluster spec from it: "
        f"unset {' '.join(_PROXIES)}; or add the networks of all nodes to no_proxy, such as 10.1.0.0/16."
    )
    text = f"{proxy} is set, and no_proxy lacks this host's addresses: TensorFlow connects to the proxy, and hangs"
    return Finding("warn", "proxy", text, advice, detail=f"missing: {', '.join(missing)}")


def check_open_files() -> Finding:
    """Check the limit of open files per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a process may have {'any number of' if soft == resource.RLIM_INFINITY else soft} files open"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Finding("ok", "open files", text)
    high = 65536 if hard == resource.RLIM_INFINITY else hard
    advice = f"Run ulimit -n {high}, also in the shell that submits: Slurm passes its limits on to the job."
    if high < _FEW_FILES:
        advice = f"Ask the administrators of this host for at least {_FEW_FILES} (limits.conf, LimitNOFILE of slurmd)."
    if soft < _TOO_FEW_FILES:
        return Finding("fail", "open files", f"{text}: too few for TensorFlow to start", advice)
    return Finding("warn", "open files", f"{text}: too few for jobs of hundreds of tasks", advice)


def check_ports(candidates: Sequence[int]) -> Finding:
    """Check that ports can be bound: at most 64 of the candidates, or without candidates any port."""
    held: list[HeldPort] = []
    tried = candidates[:_MAX_PORTS]
    try:
        for port in tried or (0,):
            with contextlib.suppress(PlacementError):
                held.append(hold_port((port,) if port else ()))
    except OSError as error:
        return Finding(
            "fail", "free ports", f"no port can be bound: {error.strerror}", "Check the limits of this host."
        )
    finally:
        for each in held:
            each.close()
    if not candidates:
        return Finding("ok", "free ports", "ports can be bound")
    text = f"{len(held)} of {len(tried)} ports ({format_ports(tried)}) are free"
    if not held:
        return Finding("fail", "free ports", text, "Give --ports another range, or omit it.")
    return Finding("ok", "free ports", text)


def check_munge() -> Finding:
    """Encode and decode a credential with MUNGE."""
    if seal_for_this_user("probe") is not None:
        return Finding("ok", "munge", "MUNGE works")
    if shutil.which("munge") is None:
        text = "MUNGE is not installed: the job's credentials are kept in a file that only you can read"
        return Finding("ok", "munge", text)
    text = "MUNGE is installed but does not work: munged is not running, or refuses this user"
    return Finding("warn", "munge", text, "Start munged. Each job waits 2 s for it.")


def _is_exempt(address: str, no_proxy: str) -> bool:
    """Return whether no_proxy contains the address or its network."""
    for entry in filter(None, (part.strip() for part in no_proxy.split(","))):
        with contextlib.suppress(ValueError):  # a host name exempts no address
            if ipaddress.ip_address(address) in ipaddress.ip_network(entry, strict=False):
                return True
    return False
