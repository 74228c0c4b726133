"""The process of `tf4slurm doctor --on-nodes` that srun starts on each node.

Each process reads two lines of JSON from standard input, the same on all nodes, and answers each with one line of JSON:
first a `NodeTask` (checks of the host), then the list of peers (reachability checks). It exits when standard input
ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tf4slurm.cluster import Address
from tf4slurm.control.munge import open_from_this_user
from tf4slurm.doctor.directory import ADVICE_SHARED, Probe
from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.host import check_host, network_interfaces
from tf4slurm.errors import AuthenticationError, InterfaceError
from tf4slurm.network.interfaces import task_address
from tf4slurm.network.ports import hold_port
from tf4slurm.network.reachability import ReachabilityServer, find_fault
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.spec import JobSpec

CHECK_SECONDS = 4.0  # for one address
ANSWER_START = '{"tf4slurm-doctor"'
_INPUT_SECONDS = 300.0  # the sender has shorter timeouts, and the input ends when it exits
_LINE_BYTES = 32 * 1024 * 1024
_MAX_CHECKS = 64  # at the same time


@dataclass(frozen=True)
class NodeTask:
    """The first line of input of each node.

    Attributes:
        name: Unique part of the probes' names.
        secret: The secret of the reachability checks.
        runs_directory, interface, ports: Options of the job.
        has_probe: Whether the launcher's host has written a probe.
        credential: MUNGE credential of the launcher's host; None if MUNGE does not work there.
    """

    name: str
    secret: str
    runs_directory: str
    interface: str | None
    ports: Sequence[int]
    is_quick: bool
    launcher_addresses: Sequence[str]
    has_probe: bool
    credential: str | None


@dataclass(frozen=True)
class Peer:
    """A host that answers reachability checks.

    Attributes:
        rank: Rank in the step; for the launcher's host, the number of nodes.
        addresses: Interface name of each address of the host.
        own_address: The address that a task would use on the host; None if there is none.
    """

    rank: int
    node: str
    port: int
    addresses: Mapping[str, str]
    own_address: str | None


def run_node(environ: Mapping[str, str]) -> None:
    """Run the checks of this node until standard input ends."""
    asyncio.run(_run_node(environ))


async def _run_node(environ: Mapping[str, str]) -> None:
    step = SlurmStep.from_environ(environ)
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    port, server = hold_port(), ReachabilityServer()
    try:
        if (line := await _read(lines)) is None:
            return
        task = NodeTask(**line)
        await server.start(port.listen(), task.secret, step.rank)
        _answer(await asyncio.to_thread(_check_node, environ, step, task, port.port))
        if (peers := await _read(lines)) is None:
            return
        _answer(await _find_faults([Peer(**peer) for peer in peers], step.rank, task.secret))
        await _read(lines)  # wait until all nodes have checked this one
    finally:
        server.close()
        port.close()


async def _read(lines: asyncio.StreamReader) -> Any:
    line = await asyncio.wait_for(lines.readline(), _INPUT_SECONDS)
    return json.loads(line) if line.endswith(b"\n") else None


def _answer(value: Any) -> None:
    print(json.dumps({"tf4slurm-doctor": value}), flush=True)


def _check_node(environ: Mapping[str, str], step: SlurmStep, task: NodeTask, port: int) -> dict[str, Any]:
    spec = JobSpec(runs_directory=Path(task.runs_directory), interface=task.interface, ports=tuple(task.ports))
    findings, skew = check_host(environ, spec, is_quick=task.is_quick, probe_name=f"{task.name}.{step.rank}")
    if task.has_probe:
        findings.append(_check_shared(spec.runs_directory, task.name))
    if task.credential is not None:
        findings.append(_check_credential(task.credential))
    addresses = {address: each.name for each in network_interfaces() for address in each.addresses}
    own_address = _own_address(spec.interface, step.node_name, task.launcher_addresses)
    peer = Peer(step.rank, step.node_name, port, addresses, own_address)
    return {"peer": asdict(peer), "findings": [finding.to_json() for finding in findings], "skew": skew}


def _check_shared(runs_directory: Path, name: str) -> Finding:
    if Probe(runs_directory, name).wait_until_visible():
        return Finding("ok", "shared", "nodes see the files that the launcher's host writes in the run directory")
    text = f"a file that the launcher's host wrote in {runs_directory} is missing: the directory is not shared"
    return Finding("fail", "shared", text, ADVICE_SHARED)


def _check_credential(credential: str) -> Finding:
    try:
        open_from_this_user(credential)
    except AuthenticationError as error:
        advice = '"srun tf4slurm task" fails: munged must run on every node of the job, or on none.'
        words = str(error).split(". ")[0]
        return Finding("warn", "munge between nodes", f"another host's credential cannot be decoded: {words}", advice)
    return Finding("ok", "munge between nodes", "another host's credential can be decoded")


def _own_address(interface: str | None, node: str, launcher_addresses: Sequence[str]) -> str | None:
    """Return the address that a task of a job would use on this node; None if there is none."""
    try:
        return task_address(interface, node, launcher_addresses[0])
    except (InterfaceError, OSError, IndexError):
        return None


async def _find_faults(peers: Sequence[Peer], own_rank: int, secret: str) -> list[tuple[int, str, str]]:
    """Return (rank, address, reason) for each address of another host that failed its reachability check."""
    limit = asyncio.Semaphore(_MAX_CHECKS)

    async def check(peer: Peer, host: str) -> tuple[int, str, str] | None:
        async with limit:
            reason = await find_fault(peer.node, peer.rank, Address(host, peer.port), secret, CHECK_SECONDS)
        return (peer.rank, host, reason) if reason is not None else None

    # Each node starts with the next rank, because a host answers a limited number of checks at a time.
    ordered = sorted(peers, key=lambda peer: (peer.rank - own_rank) % len(peers))
    others = [(peer, host) for peer in ordered if peer.rank != own_rank for host in peer.addresses]
    answers = await asyncio.gather(*(check(peer, host) for peer, host in others))
    return [answer for answer in answers if answer is not None]
