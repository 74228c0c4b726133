"""The control plane compared with its peers: rendezvous, barrier and leave of N tasks, in turns on the same machine.

Each uses the same number of processes for the tasks. Every task receives the whole cluster spec, and each verifies it.
Ours uses TLS and authentication; JAX's and torch's services have neither.
"""

from __future__ import annotations

from collections import defaultdict

from benchmarks.measure import Figure, ratio
from benchmarks.peer_processes import PeerProcesses
from benchmarks.simulation import Simulation

_PEERS = {"jax": "JAX", "torch": "torch"}
_OURS = "tf4slurm"
_Times = dict[tuple[str, str], list[float]]


def measure_rendezvous(num_tasks: int, rounds: int) -> list[Figure]:
    """Return the figures of `rounds` rounds; each runs tf4slurm, JAX's coordination service and torch's TCPStore."""
    times: _Times = defaultdict(list)
    for _ in range(rounds):
        for name, seconds in _run_ours(num_tasks).items():
            times[name, _OURS].append(seconds)
        for peer, title in _PEERS.items():
            for name, seconds in _run_peer(peer, num_tasks).items():
                times[name, title].append(seconds)
    return _figures(times, num_tasks)


def _run_ours(num_tasks: int) -> dict[str, float]:
    with Simulation(num_tasks) as ours:
        times = {"rendezvous": ours.ask("rendezvous")}
        ours.ask("start")
        times["barrier"] = ours.ask("barrier")
        times["leave"] = ours.ask("leave")
        times["decode"] = ours.ask("decode")
        times["rendezvous and decode"] = times["rendezvous"] + times["decode"]
    return times


def _run_peer(peer: str, num_tasks: int) -> dict[str, float]:
    with PeerProcesses(peer, num_tasks) as theirs:
        times = {"rendezvous": theirs.ask("rendezvous"), "barrier": theirs.ask("barrier")}
        if peer == "jax":
            times["leave"] = theirs.ask_to_leave()
    return times


def _figures(times: _Times, num_tasks: int) -> list[Figure]:
    def measured(what: str, name: str, who: str) -> Figure:
        return Figure(what, "s", tuple(times[name, who]), at=num_tasks)

    def faster(what: str, ours: str, bound: str) -> Figure:
        return ratio(what, times["rendezvous", "JAX"], times[ours, _OURS], bound, beside="JAX", at=num_tasks)

    def slower(what: str, name: str, peer: str, bound: str) -> Figure:
        return ratio(what, times[name, _OURS], times[name, peer], bound, beside=peer, at=num_tasks)

    is_large = num_tasks >= 1_000
    no_slower = "<= 1" if is_large else ""
    return [
        measured("rendezvous, ours", "rendezvous", _OURS),
        measured("rendezvous, JAX", "rendezvous", "JAX"),
        measured("rendezvous, torch", "rendezvous", "torch"),
        faster("rendezvous, so many times as fast", "rendezvous", ">= 1.2" if is_large else ""),
        measured("decoding the cluster spec in every task, all on this machine", "decode", _OURS),
        faster("the same, ours with that decoding", "rendezvous and decode", ""),
        measured("barrier, ours", "barrier", _OURS),
        measured("barrier, JAX", "barrier", "JAX"),
        measured("barrier, torch", "barrier", "torch"),
        slower("barrier, ours over JAX's", "barrier", "JAX", no_slower),
        slower("barrier, ours over torch's", "barrier", "torch", ""),
        measured("leave, ours: the last task done to all informed", "leave", _OURS),
        measured("leave, JAX's shutdown", "leave", "JAX"),
        slower("leave, ours over JAX's", "leave", "JAX", no_slower),
    ]
