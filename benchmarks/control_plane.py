"""Time and cost of the control plane alone: a job of N simulated tasks, from the rendezvous to its outcome."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from benchmarks.measure import Figure
from benchmarks.simulated_tasks import LEASE_SECONDS
from benchmarks.simulation import Simulation

_BOUNDS = {
    1_000: {"restart": "< 3", "outcome": "< 0.5", "share": "< 0.06", "lease": "< 0.3", "traffic": "< 150"},
    5_000: {"rendezvous": "< 30", "memory": "< 1000"},
}
_WHAT = {
    "rendezvous": ("rendezvous", "s"),
    "decode": ("a task decodes the cluster spec, four at a time", "s"),
    "start": ("proved to told to start", "s"),
    "barrier": ("barrier", "s"),
    "restart": ("restart (attempt 2): a failure to all told to start again", "s"),
    "outcome": ("outcome: a task's end to all others informed", "s"),
    "share": ("the service's processor time in steady state", "core"),
    "traffic": ("bytes on the network in steady state", "kB/s"),
    "lease": ("the service's processor time, each task takes one shard a second, two per lease", "core"),
    "memory": ("memory of the service", "MB"),
    "map": ("the cluster spec's message", "kB"),
    "plain": ("the same without compression", "kB"),
    "cpu": ("the service's processor time, rendezvous to told to start", "s"),
    "messages": ("messages, rendezvous to told to start", "messages"),
    "message bytes": ("bytes of messages, rendezvous to told to start", "kB"),
}


def measure_control_plane(num_tasks: int, runs: int) -> list[Figure]:
    """Return the figures of `runs` jobs of `num_tasks` tasks."""
    values: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        for name, value in live(num_tasks).items():
            values[name].append(value)
    bounds = _BOUNDS.get(num_tasks, {})
    return [
        Figure(*_WHAT[name], tuple(values[name]), bounds.get(name, ""), at=num_tasks) for name in _WHAT if values[name]
    ]


def measure_launcher(directory: Path, num_tasks: int, runs: int) -> list[Figure]:
    """Measure the memory and processor time of a launcher, which records events, samples and status of all tasks."""
    memory, share, rendezvous = [], [], []
    for number in range(runs):
        place = directory / f"{num_tasks}-{number}"
        place.mkdir()
        found = live(num_tasks, place)
        memory.append(found["memory"])
        share.append(found["share"])
        rendezvous.append(found["rendezvous"])
    bound = "< 250" if num_tasks == 1_000 else ""
    return [
        Figure("memory of the launcher", "MB", tuple(memory), bound, at=num_tasks),
        Figure("the whole launcher's processor time in steady state", "core", tuple(share), at=num_tasks),
        Figure("rendezvous with a whole launcher", "s", tuple(rendezvous), at=num_tasks),
    ]


def live(num_tasks: int, launcher_directory: Path | None = None) -> dict[str, float]:
    """Run one job through all phases; return the time or cost of each."""
    found: dict[str, float] = {}
    with Simulation(num_tasks, launcher_directory) as job:
        before = job.load()
        found["rendezvous"] = job.ask("rendezvous")
        found["start"] = job.ask("start")
        formed = job.load()
        found["cpu"] = formed.cpu_seconds - before.cpu_seconds
        found["messages"] = formed.messages - before.messages
        found["message bytes"] = (formed.message_bytes - before.message_bytes) / 1e3
        found["barrier"] = job.ask("barrier")
        since = job.load()
        seconds = job.ask("steady")
        until = job.load()
        found["share"] = (until.cpu_seconds - since.cpu_seconds) / seconds
        found["traffic"] = (until.loopback_bytes - since.loopback_bytes) / 1e3 / seconds
        since = job.load()
        job.ask("lease")  # takes longer than LEASE_SECONDS, because tasks do not start together
        found["lease"] = (job.load().cpu_seconds - since.cpu_seconds) / LEASE_SECONDS
        found["restart"] = job.ask("restart")
        found["memory"] = job.load().memory_bytes / 1e6
        found["outcome"] = job.ask("fail")
        found["decode"] = job.ask("decode_one")
        found["map"], found["plain"] = (size / 1e3 for size in job.map_bytes())
    return found
