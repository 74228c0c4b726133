"""Check one host: software, directory for run directories, interfaces, proxies, open files, ports, and MUNGE."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tf4slurm.control.credentials import seal_for_this_user
from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.software import check_software
from tf4slurm.errors import InterfaceError, PortsInUseError
from tf4slurm.network.interfaces import host_addresses, interface_address, list_connected_interfaces
from tf4slurm.network.ports import format_ranges, hold_port
from tf4slurm.network.reachability import PROXY_VARIABLES
from tf4slurm.slurm.environ import own_node_name
from tf4slurm.spec.job_spec import JobSpec

_ADVICE_SHARED = "Choose a directory on a file system that all nodes share, with --runs-directory."
_PROBE_BYTES = 64 * 1024
_LARGE_SKEW_SECONDS = 2.0
_VISIBLE_SECONDS = 5.0  # NFS caches directories for some seconds
_MAX_PORTS = 4096  # maximum number of ports tested, in half a second
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
# Measured: each of 3 tasks has 13 files open, plus one per additional task. With a limit of 40 the tasks run. With a
# limit of 24 no task starts.
_FEW_FILES, _TOO_FEW_FILES = 1024, 64


def check_host(
    environ: Mapping[str, str], spec: JobSpec, *, is_quick: bool, probe_name: str
) -> tuple[list[Finding], float | None]:
    """Run all checks of this host.

    Args:
        spec: The options `runs_directory`, `interface` and `ports` of this job are checked.
        is_quick: Whether to skip the checks that start TensorFlow and pip.
        probe_name: Unique part of the name of the test file that is written into `runs_directory` for a moment.

    Returns:
        The findings, and the clock skew in seconds (see `probe_file`), or None if the test file cannot be written.
    """
    directory, skew = check_directory(spec.runs_directory, probe_name)
    findings = [
        *check_software(environ, is_quick=is_quick),
        directory,
        _check_interfaces(spec.interface, own_node_name(environ)),
        _check_proxies(environ, host_addresses()),
        _check_open_files(),
        _check_ports(spec.ports),
        _check_munge(),
    ]
    return findings, skew


def check_directory(runs_directory: Path, probe_name: str) -> tuple[Finding, float | None]:
    """Check that a test file can be written into `runs_directory`, and that its file system is not in memory.

    Returns:
        The finding, and the clock skew in seconds (see `probe_file`), or None if the test file cannot be written.
    """
    text = f"run directories in {runs_directory.absolute()}"
    path = probe_path(runs_directory, probe_name)
    try:
        with probe_file(path) as skew:
            pass
    except OSError as error:
        advice = "Choose a directory that you may write to and that has free space, with --runs-directory."
        return Finding("fail", "run directory", f"{text} cannot be written: {error.strerror}", advice), None
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    file_system = (
        max(reversed(mounts), key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown file system"
    )
    text += f" can be written ({file_system})"
    if file_system in _IN_MEMORY:
        text += ", but the file system is in this host's memory"
        return Finding("warn", "run directory", text, _ADVICE_SHARED), skew
    return Finding("ok", "run directory", text), skew


def check_shared(runs_directory: Path, probe_name: str) -> Finding:
    """Check that this node sees a test file which the launcher's host has written into `runs_directory`.

    The file has the path that `probe_path` returns for `probe_name`. It must appear within 5 s.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not (is_visible := probe_path(runs_directory, probe_name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_visible:
        return Finding("ok", "shared", "nodes see the files that the launcher's host writes in the run directory")
    text = f"a file that the launcher's host wrote in {runs_directory} is missing: the directory is not shared"
    return Finding("fail", "shared", text, _ADVICE_SHARED)


def check_clocks(skew_by_node: Mapping[str, float]) -> Finding:
    """Check that the clocks of the nodes agree within 2 s.

    `skew_by_node` has the clock skew in seconds that `probe_file` has yielded on each node.
    """
    first, last = min(skew_by_node, key=skew_by_node.__getitem__), max(skew_by_node, key=skew_by_node.__getitem__)
    spread = skew_by_node[last] - skew_by_node[first]
    if spread <= _LARGE_SKEW_SECONDS:
        return Finding("ok", "clocks", f"the clocks agree within {max(spread, 0.1):.1f} s")
    text = f"the clock of {first} is {spread:.1f} s ahead of that of {last}"
    advice = "Synchronize the clocks (chrony, ntp): MUNGE and Slurm refuse large differences, and log times mislead."
    return Finding("warn", "clocks", text, advice)


def probe_path(runs_directory: Path, name: str) -> Path:
    """Return the path of a test file in `runs_directory`, or in its nearest parent that exists."""
    path = runs_directory.absolute()
    parent = next((each for each in (path, *path.parents) if each.exists()), path)
    return parent / f".tf4slurm-doctor-{name}"


@contextlib.contextmanager
def probe_file(path: Path) -> Iterator[float]:
    """Write a test file of 64 KB, and remove it after the block.

    Yields:
        The clock skew in seconds: the distance of the file's modification time from the interval in which this host
        wrote the file. It is 0 inside of the interval, and positive if the file server's clock is ahead of this host's.

    Raises:
        OSError: The file cannot be written.
    """
    before = time.time()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        written = path.stat().st_mtime
        yield written - min(max(written, before), time.time())  # a slow file system must not count as skew
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _check_interfaces(interface: str | None, node: str) -> Finding:
    if interface is not None:
        try:
            interface_address(interface, node)
        except InterfaceError as error:
            advice = "Bring it up, exclude the node (sbatch --exclude), or choose another interface."
            return Finding("fail", "interfaces", str(error).split(". ")[0], advice)
    found = list_connected_interfaces()
    if not found:
        return Finding("warn", "interfaces", "only loopback is up", "Jobs on several hosts need a network.")
    names = ", ".join(f"{each.name} (InfiniBand)" if each.is_infiniband else each.name for each in found)
    return Finding(
        "ok", "interfaces", f"up: {names}", detail=", ".join(f"{each.name} {each.addresses[0]}" for each in found)
    )


def _check_proxies(environ: Mapping[str, str], addresses: Sequence[str]) -> Finding:
    """Warn if gRPC would use a proxy for these addresses. The proxy's URL is not shown: it can contain a password."""
    proxy = next((name for name in PROXY_VARIABLES if environ.get(name)), None)
    if proxy is None:
        return Finding("ok", "proxy", "no proxy is set")
    networks = []
    for entry in (environ.get("no_grpc_proxy") or environ.get("no_proxy", "")).split(","):
        with contextlib.suppress(ValueError):  # a host name exempts no address
            networks.append(ipaddress.ip_network(entry.strip(), strict=False))
    missing = [each for each in addresses if not any(ipaddress.ip_address(each) in network for network in networks)]
    if not missing:
        return Finding("ok", "proxy", f"{proxy} is set, and no_proxy contains this host's addresses")
    advice = (
        "tf4slurm itself adds the job's addresses to no_proxy. For scripts that do not get the cluster spec from it: "
        f"unset {' '.join(PROXY_VARIABLES)}; or add the networks of all nodes to no_proxy, such as 10.1.0.0/16."
    )
    text = f"{proxy} is set, and no_proxy lacks this host's addresses: TensorFlow connects to the proxy, and hangs"
    return Finding("warn", "proxy", text, advice, detail=f"missing: {', '.join(missing)}")


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "open files", "a process may have any number of files open")
    text = f"a process may have {soft} files open"
    if soft >= _FEW_FILES:
        return Finding("ok", "open files", text)
    high = 65536 if hard == resource.RLIM_INFINITY else hard
    advice = f"Run ulimit -n {high}, also in the shell that submits: Slurm passes its limits on to the job."
    if high < _FEW_FILES:
        advice = f"Ask the administrators of this host for at least {_FEW_FILES} (limits.conf, LimitNOFILE of slurmd)."
    if soft < _TOO_FEW_FILES:
        return Finding("fail", "open files", f"{text}: too few for TensorFlow to start", advice)
    return Finding("warn", "open files", f"{text}: too few for jobs of hundreds of tasks", advice)


def _check_ports(candidates: Sequence[int]) -> Finding:
    """Check that at least one port of `candidates` is free on this host. Of more than 4,096, only the first are tried.

    Without candidates, check that any port can be bound.
    """
    tried = candidates[:_MAX_PORTS]
    try:
        num_free = sum(map(_is_free, tried or (0,)))
    except OSError as error:
        text = f"no port can be bound: {error.strerror}"
        return Finding("fail", "free ports", text, "Check the limits of this host.")
    if not candidates:
        return Finding("ok", "free ports", "ports can be bound")
    text = f"{num_free} of {len(tried)} ports ({format_ranges(tried)}) are free"
    if left := len(candidates) - len(tried):
        text += f"; the other {left} were not tried"
    if not num_free:
        return Finding("fail", "free ports", text, "Give --ports another range, or omit it.")
    return Finding("ok", "free ports", text)


def _is_free(port: int) -> bool:
    try:
        hold_port((port,)).close()
    except PortsInUseError:
        return False
    return True


def _check_munge() -> Finding:
    if seal_for_this_user("probe") is not None:
        return Finding("ok", "munge", "MUNGE works")
    if shutil.which("munge") is None:
        text = "MUNGE is not installed: the job's credentials are kept in a file that only you can read"
        return Finding("ok", "munge", text)
    text = "MUNGE is installed but does not work: munged is not running, or refuses this user"
    return Finding("warn", "munge", text, "Start munged. Each job waits 2 s for it.")
