"""One node's part: look at itself, then prove each peer's addresses. Told by lines on standard input, which srun gives
to all tasks; it ends when that ends."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf4slurm.cluster import Address
from tf4slurm.control.munge import open_from_this_user
from tf4slurm.doctor.directory import TODO_SHARED, Probe
from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.here import Wishes, check_here
from tf4slurm.doctor.host import network_interfaces
from tf4slurm.doctor.wire import to_lines
from tf4slurm.errors import AuthenticationError, InterfaceError
from tf4slurm.network.interfaces import interface_address, route_address
from tf4slurm.network.ports import hold_port
from tf4slurm.network.reachability import ReachabilityServer, find_fault
from tf4slurm.slurm.step import SlurmStep

PROOF_SECONDS = 4.0  # for one address
_WAIT_SECONDS = 300.0  # for a line; whoever sends it is bounded too, and its end is the end of the input
_LINE_BYTES = 32 * 1024 * 1024
_AT_ONCE = 64


def be_node(environ: Mapping[str, str]) -> None:
    """Play this node's part to the end."""
    asyncio.run(_be_node(environ))


async def _be_node(environ: Mapping[str, str]) -> None:
    step = SlurmStep.from_environ(environ)
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    port, server = hold_port(), ReachabilityServer()
    try:
        if (task := await _read(lines)) is None:
            return
        await server.start(port.listen(), task["secret"], step.rank)
        _write(step.rank, {**await asyncio.to_thread(_examine, environ, step, task), "port": port.port})
        if (peers := await _read(lines)) is None:
            return
        _write(step.rank, await _prove_all(peers["peers"], step.rank, task["secret"]))
        await _read(lines)  # until all are done: the others prove this node
    finally:
        server.close()
        port.close()


async def _read(lines: asyncio.StreamReader) -> Any:
    line = await asyncio.wait_for(lines.readline(), _WAIT_SECONDS)
    return json.loads(line) if line.endswith(b"\n") else None


def _write(rank: int, value: Any) -> None:
    sys.stdout.write(to_lines(rank, value))
    sys.stdout.flush()


def _examine(environ: Mapping[str, str], step: SlurmStep, task: Mapping[str, Any]) -> dict[str, Any]:
    wishes = Wishes.from_json(task["wishes"])
    findings, skew = check_here(environ, wishes, f"{task['name']}.{step.rank}")
    if task["is_written"]:
        findings.append(_check_shared(wishes.runs_directory, task["name"]))
    if task["credential"] is not None:
        findings.append(_check_credential(task["credential"]))
    return {
        "node": step.node_name,
        "host": socket.gethostname(),
        "findings": [finding.to_json() for finding in findings],
        "skew": skew,
        "addresses": {address: each.name for each in network_interfaces() for address in each.addresses},
        "address": _own_address(wishes.interface, step.node_name, task["launcher"]),
    }


def _check_shared(runs_directory: Path, name: str) -> Finding:
    if Probe(runs_directory, name).wait_until_seen():
        return Finding("ok", "shared", "nodes see what the launcher's host writes in the run directory")
    text = f"a file that the launcher's host wrote in {runs_directory} is not seen: it is another directory there"
    return Finding("fail", "shared", text, TODO_SHARED)


def _check_credential(credential: str) -> Finding:
    try:
        open_from_this_user(credential)
    except AuthenticationError as error:
        todo = '"srun tf4slurm task" does not work so: munged must run on every node of the job, or on none.'
        words = str(error).split(". ")[0]
        return Finding("warn", "munge between nodes", f"what another host sealed is not opened: {words}", todo)
    return Finding("ok", "munge between nodes", "what another host sealed is opened")


def _own_address(interface: str | None, node: str, launcher: list[str]) -> str | None:
    """Return the address that a task of a job would take here; None if none can be told."""
    try:
        return interface_address(interface, node) if interface is not None else route_address(launcher[0])
    except (InterfaceError, OSError, IndexError):
        return None


async def _prove_all(peers: list[dict[str, Any]], own_rank: int, secret: str) -> list[list[Any]]:
    """Return [rank, address, why] for each address of another that does not prove what it should be."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def prove(peer: dict[str, Any], host: str) -> list[Any] | None:
        async with places:
            address = Address(host, peer["port"])
            why = await find_fault(peer["node"], peer["rank"], address, secret, PROOF_SECONDS)
        return [peer["rank"], host, why] if why is not None else None

    # From the next rank on, round: else all would ask the same one at the same time, which answers so many at once.
    turned = sorted(peers, key=lambda peer: (peer["rank"] - own_rank) % len(peers))
    others = [(peer, host) for peer in turned if peer["rank"] != own_rank for host in peer["addresses"]]
    answers = await asyncio.gather(*(prove(peer, host) for peer, host in others))
    return [answer for answer in answers if answer is not None]
