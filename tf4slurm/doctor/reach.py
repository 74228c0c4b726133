"""Which nodes reach each other, from what each found of the others' addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf4slurm.doctor.finding import Finding
from tf4slurm.slurm.nodelist import fold_nodelist

_TODO = (
    "Look for a firewall or a cable there; leave the node out (sbatch --exclude), or choose a network with --interface."
)


def judge_reach(peers: Sequence[Mapping[str, Any]], faults: Mapping[int, Sequence[Sequence[Any]]]) -> list[Finding]:
    """Return one finding for each address that others did not reach, or one that says that all are reached.

    Args:
        peers: {"rank", "node", "addresses": {address: interface}, "address": the one that a job would use, None if
            there is none}; the last is the launcher's host, whose addresses are a list: a job tries each in turn.
        faults: By the rank of who asked: [rank, address, why] of each that was not reached.
    """
    *nodes, launcher = peers
    names = {peer["rank"]: str(peer["node"]) for peer in nodes}
    has_address = {peer["rank"] for peer in nodes if peer["address"] is not None}  # else that is told already
    missed_by: dict[tuple[int, str], dict[str, str]] = {}
    for asker, found in faults.items():
        for rank, address, why in found if asker in has_address else ():
            missed_by.setdefault((rank, address), {})[names[asker]] = str(why)
    findings = []
    for peer in nodes:
        for address, interface in peer["addresses"].items():
            if askers := missed_by.get((peer["rank"], address)):
                is_used = address == peer["address"]
                findings.append(_judge_address(str(peer["node"]), address, str(interface), askers, is_used))
    missed = [set(missed_by.get((launcher["rank"], address), ())) for address in launcher["addresses"]]
    if missed and (lost := sorted(set.intersection(*missed))):
        where = f"{launcher['node']}, where the launcher would run,"
        text = f"{where} is reached at none of its addresses from {fold_nodelist(lost)}"
        findings.append(Finding("fail", "reach", text, "Start the job from a node (sbatch), not from this host."))
    if not findings and has_address:
        count = f"{len(has_address)} nodes reach each other and" if len(has_address) > 1 else "the node reaches"
        findings.append(Finding("ok", "reach", f"{count} this host, at every address"))
    return findings


def _judge_address(node: str, address: str, interface: str, askers: Mapping[str, str], is_used: bool) -> Finding:
    text = f"{node} is not reached at {address} ({interface}) from {fold_nodelist(askers)}"
    detail = next(iter(askers.values()))
    if is_used:
        return Finding("fail", "reach", f"{text}, and a job would use that address", _TODO, detail=detail)
    return Finding("warn", "reach", f"{text}; a job would use another address", _TODO, detail=detail)
