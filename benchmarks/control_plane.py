"""The control plane at N tasks: each has its own connection, simulated in a few processes; no children, no Slurm.

The service runs in a process of its own, as the launcher has it. Times are of CLOCK_MONOTONIC, which all processes of
a machine share. Decoding the map, which real hosts do side by side, is not in them and told apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import multiprocessing.connection
import resource
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure
from tf4slurm import __version__
from tf4slurm.cluster import Address, Task
from tf4slurm.control.client import Membership
from tf4slurm.control.limits import Limits
from tf4slurm.control.messages import Hello, Report, Usage, Waiting, pack_map, unpack_map
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState

_SPAWN = multiprocessing.get_context("spawn")
_Pipe = multiprocessing.connection.Connection
_PROCESSES = 4
_SECRET = "the secret of a benchmark"
_STEADY_SECONDS = 20.0
_PATIENCE_SECONDS = 120.0
_CROWD = 1_000  # more tasks than that, in so few processes, do not answer within the usual dead time


def _limits(num_tasks: int) -> Limits:
    dead_after = 10.0 if num_tasks <= _CROWD else 60.0
    return Limits(start_timeout_seconds=_PATIENCE_SECONDS, dead_after_seconds=dead_after, max_attempts=2)


@dataclass(frozen=True)
class Run:
    """What one run at N tasks took, in seconds; `service_share` of one core, memory in MB, traffic in kB/s."""

    rendezvous: float
    barrier: float
    restart: float
    verdict: float
    decode: float
    service_share: float
    traffic: float
    memory: float
    map_kilobytes: float


def measure_control_plane(num_tasks: int, runs: int) -> list[Figure]:
    """Return the figures of `runs` runs at `num_tasks` tasks."""
    results = [run(num_tasks) for _ in range(runs)]
    named = f"{num_tasks:,} tasks"
    rows = (
        ("rendezvous", f"{named}: from the start to every task has the verified map", "s"),
        ("barrier", f"{named}: a barrier of all, told to all", "s"),
        ("restart", f"{named}: attempt 2, from a task's failure to all children started again", "s"),
        ("verdict", f"{named}: a task's end to the verdict reaching all others", "s"),
        ("decode", f"{named}: decoding the map, in each task", "s"),
        ("service_share", f"{named}: the service's processor time in steady state", "core"),
        ("traffic", f"{named}: what the service and its tasks say in steady state", "kB/s"),
        ("memory", f"{named}: resident memory of the service's process", "MB"),
        ("map_kilobytes", f"{named}: the map's message", "kB"),
    )
    return [
        Figure(what, unit, tuple(getattr(each, field) for each in results), _bound(field, num_tasks))
        for field, what, unit in rows
    ]


def _bound(field: str, num_tasks: int) -> str:
    bounds = {
        1_000: {"restart": "< 3", "verdict": "< 0.5", "service_share": "< 0.03", "traffic": "< 100", "memory": "< 250"},
        10_000: {"rendezvous": "< 12", "memory": "< 1500", "map_kilobytes": "< 200"},
    }
    return bounds.get(num_tasks, {}).get(field, "")


def run(num_tasks: int) -> Run:
    """Let a service and N tasks live through a job."""
    _raise_files(num_tasks + 1_000)  # the service has the most
    pipes, processes = [], []
    try:
        service, ours = _SPAWN.Pipe()
        processes.append(_SPAWN.Process(target=_serve, args=(ours, num_tasks), daemon=True))
        processes[0].start()
        port = _hear(service)
        for index in range(_PROCESSES):
            pipe, theirs = _SPAWN.Pipe()
            ranks = range(index, num_tasks, _PROCESSES)
            processes.append(_SPAWN.Process(target=_be_tasks, args=(theirs, port, ranks, num_tasks), daemon=True))
            processes[-1].start()
            pipes.append(pipe)
        for pipe in pipes:
            _hear(pipe)  # its imports are over
        rendezvous = _ask(pipes, "rendezvous")
        size = pipes[0].recv()
        decode = pipes[0].recv()
        _ask(pipes, "start")
        barrier = _ask(pipes, "barrier")
        before = _told(service, "usage")
        steady = _ask(pipes, "steady")
        after = _told(service, "usage")
        restart = _ask(pipes, "restart")
        verdict = _ask(pipes, "verdict")
        return Run(
            rendezvous,
            barrier,
            restart,
            verdict,
            decode,
            (after[0] - before[0]) / steady,
            (after[1] - before[1]) / 1000 / steady,
            after[2] / 1000,
            size / 1000,
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


def _ask(pipes: list[_Pipe], what: str) -> float:
    """Let all do something at once; return the seconds until the last is done."""
    started = time.monotonic()
    for pipe in pipes:
        pipe.send(what)
    ended: float = max(_hear(pipe) for pipe in pipes)
    return ended - started


def _told(pipe: _Pipe, what: str) -> Any:
    pipe.send(what)
    return _hear(pipe)


def _hear(pipe: _Pipe) -> Any:
    if not pipe.poll(_PATIENCE_SECONDS):
        raise TimeoutError("a process of the benchmark does not answer")
    return pipe.recv()


def _raise_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard < needed:
            raise SystemExit(f"{needed} open files are needed, the hard limit is {hard}: raise it (ulimit -Hn).")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# The service's process


def _serve(pipe: _Pipe, num_tasks: int) -> None:
    asyncio.run(_serve_on(pipe, num_tasks))


async def _serve_on(pipe: _Pipe, num_tasks: int) -> None:
    tasks = [Task("chief", 0), Task("ps", 0), *(Task("worker", index) for index in range(num_tasks - 2))]
    state = JobState(tasks, _limits(num_tasks), time.monotonic(), lambda *_: None)
    service = ControlService(state, _SECRET)
    said = Counter[str]()
    pipe.send(await service.start("127.0.0.1"))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, pipe.recv):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        said["bytes"] = _bytes_on_loopback()
        pipe.send((usage.ru_utime + usage.ru_stime, said["bytes"], int(status["VmRSS"].split()[0])))


def _bytes_on_loopback() -> int:
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


# The processes of the tasks


def _be_tasks(pipe: _Pipe, port: int, ranks: range, num_tasks: int) -> None:
    asyncio.run(_Tasks(pipe, port, ranks, num_tasks).live())


class _Tasks:
    """Some of the tasks, in one process."""

    def __init__(self, pipe: _Pipe, port: int, ranks: range, num_tasks: int) -> None:
        self._pipe = pipe
        self._limits = _limits(num_tasks)
        self._num_tasks = num_tasks
        self._at = Address("127.0.0.1", port)
        self._members = [self._member(rank) for rank in ranks]
        self._has_chief = 0 in ranks

    def _member(self, rank: int) -> Membership:
        hello = Hello(
            rank, f"node{rank:05}", f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}", 40001, "1", __version__
        )
        return Membership(
            lambda: ((self._at,), _SECRET),
            lambda _: hello,
            dead_after_seconds=self._limits.dead_after_seconds,
            join_seconds=_PATIENCE_SECONDS,
            num_tasks=self._num_tasks,
        )

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        self._pipe.send("ready")
        running = []
        while what := await loop.run_in_executor(None, self._pipe.recv):
            if what == "rendezvous":
                running = [asyncio.create_task(member.run()) for member in self._members]
            await asyncio.gather(*(getattr(self, f"_{what}")(member) for member in self._members))
            self._pipe.send(time.monotonic())
            if what == "rendezvous":
                self._tell_of_map()
        del running

    def _tell_of_map(self) -> None:
        if not self._has_chief:
            return
        started = time.perf_counter()
        agreed = self._members[0].map
        taken = time.perf_counter() - started
        assert agreed is not None
        assert unpack_map(pack_map(agreed)) == agreed
        self._pipe.send(len(self._members[0].packed_map))
        self._pipe.send(taken)

    async def _rendezvous(self, member: Membership) -> None:
        while not member.packed_map:
            await member.wait_for_change()

    async def _start(self, member: Membership) -> None:
        member.report(state="proved")
        while not member.order.starts:
            await member.wait_for_change()
        member.report(state="running", starts=1, process_id=1)

    async def _steady(self, member: Membership) -> None:
        """Only live, and tell what the child uses, as agents do."""
        pause = max(5.0, self._num_tasks / 100)
        for sample in range(int(_STEADY_SECONDS / pause)):
            await asyncio.sleep(pause)
            member.mention(Usage(1_234_567_890 + sample, 1_000.25 + sample, 9_876_543_210 + sample, 10**10 + sample))

    async def _restart(self, member: Membership) -> None:
        before = member.packed_map
        if self._has_chief and member is self._members[0]:
            member.report(state="exited", returncode=1)
        while member.order.attempt == 1:
            await member.wait_for_change()
        member.begin_attempt(2, port=40002)
        while member.packed_map is before:
            await member.wait_for_change()
        await self._start(member)

    async def _barrier(self, member: Membership) -> None:
        member.note(dataclasses.replace(Report(), waiting=Waiting("all", "here", _PATIENCE_SECONDS)))
        while member.order.released != "here":
            await member.wait_for_change()

    async def _verdict(self, member: Membership) -> None:
        if self._has_chief and member is self._members[0]:
            member.report(state="exited", returncode=2)
        while not member.order.leave:
            await member.wait_for_change()
