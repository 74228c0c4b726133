"""A job of N tasks without children and without Slurm: each task has its own connection, all live in a few processes.

The service has a process of its own, as the launcher has it. Times are of CLOCK_MONOTONIC, which all processes of a
machine share. A task has the map when it has received it and opened its seal; reading it into Python's values, which
real hosts do side by side, is a step of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import resource
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tf4slurm import __version__
from tf4slurm.cluster import Address, Task
from tf4slurm.control import auth
from tf4slurm.control.client import Membership
from tf4slurm.control.limits import Limits
from tf4slurm.control.messages import Hello, Report, Usage, Waiting, pack_map
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState
from tf4slurm.join import Place, Service
from tf4slurm.launch.launcher import Launcher, Reporter
from tf4slurm.launch.plan import LaunchPlan
from tf4slurm.launch.spawner import SpawnerListener
from tf4slurm.run_directory import RunDirectory

PROCESSES = 4
"""Over so many the tasks are spread, ours as those of the peers."""
PATIENCE_SECONDS = 120.0

_SPAWN = multiprocessing.get_context("spawn")
_Pipe = multiprocessing.connection.Connection
_SECRET = "the secret of a benchmark"
_CROWD = 1_000  # of more, those of one process get no turn within the usual dead time
_USAGE_SECONDS = 5.0
_STEADY_SECONDS = 20.0


def limits_of(num_tasks: int) -> Limits:
    """Return the usual limits, but for what so many tasks in so few processes need."""
    limits = Limits(start_timeout_seconds=PATIENCE_SECONDS, max_attempts=2)
    return limits if num_tasks <= _CROWD else dataclasses.replace(limits, dead_after_seconds=60.0)


class Load(NamedTuple):
    """What the service has used by now: processor seconds, resident bytes, messages and bytes both ways.

    `sealed_bytes` are those of its messages; `loopback_bytes` all that crossed the loopback, headers included.
    """

    cpu_seconds: float
    memory_bytes: int
    messages: int
    sealed_bytes: int
    loopback_bytes: int


class Simulation:
    """A context: the service and its tasks are there inside, and gone outside.

    What `ask` names is done by all tasks at once: rendezvous, start, barrier, steady, restart, then either leave or
    fail. Last may come decode, or decode_one in each process: who reads hundreds of maps is silent meanwhile.
    """

    def __init__(self, num_tasks: int, launcher_directory: Path | None = None) -> None:
        """With a directory a whole launcher holds the service: its record, its status and its events are kept there."""
        self._num_tasks = num_tasks
        self._directory = launcher_directory
        self._processes: list[Any] = []
        self._pipes: list[_Pipe] = []
        self._service: _Pipe

    def __enter__(self) -> Simulation:
        raise_files(self._num_tasks + 1_000)
        try:
            self._service = self._start(_serve, self._num_tasks, self._directory)
            port, secret = _hear(self._service)
            for index in range(PROCESSES):
                ranks = range(index, self._num_tasks, PROCESSES)
                self._pipes.append(self._start(_be_tasks, port, secret, ranks, self._num_tasks))
            for pipe in self._pipes:
                _hear(pipe)  # its imports are over
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, what: str) -> float:
        """Let all tasks do something at once; return the seconds until the last is done."""
        started = time.monotonic()
        for pipe in self._pipes:
            pipe.send(what)
        ended: float = max(_hear(pipe) for pipe in self._pipes)
        return ended - started

    def load(self) -> Load:
        self._service.send("load")
        found: Load = _hear(self._service)
        return found

    def map_bytes(self) -> tuple[int, int]:
        """Return the size of the map's message, and what it would be without compression."""
        self._pipes[0].send("map_bytes")
        packed, plain = _hear(self._pipes[0])
        return packed, plain

    def _start(self, target: Callable[..., None], *arguments: object) -> _Pipe:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        self._processes.append(process)
        theirs.close()
        return ours

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def raise_files(needed: int) -> None:
    """Raise this process's soft limit of open files, and so that of those it starts.

    Raises:
        SystemExit: The hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(f"{needed} open files are needed, the hard limit is {hard}: raise it (ulimit -Hn).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _hear(pipe: _Pipe) -> Any:
    if not pipe.poll(PATIENCE_SECONDS):
        raise TimeoutError("a process of the benchmark does not answer")
    said = pipe.recv()
    if isinstance(said, RuntimeError):
        raise said
    return said


# The service's process


def _serve(pipe: _Pipe, num_tasks: int, directory: Path | None) -> None:
    said = _count_messages()
    asyncio.run(_launch(pipe, num_tasks, directory, said) if directory else _serve_alone(pipe, num_tasks, said))


async def _serve_alone(pipe: _Pipe, num_tasks: int, said: Counter[str]) -> None:
    tasks = [Task("chief", 0), Task("ps", 0), *(Task("worker", index) for index in range(num_tasks - 2))]
    service = ControlService(JobState(tasks, limits_of(num_tasks), time.monotonic(), lambda *_: None), _SECRET)
    pipe.send((await service.start("127.0.0.1"), _SECRET))
    await _tell_load(pipe, said)


async def _launch(pipe: _Pipe, num_tasks: int, directory: Path, said: Counter[str]) -> None:
    counts = {"chief": 1, "ps": 1, "worker": num_tasks - 2}
    plan = LaunchPlan(counts, ("true",), "large", directory, limits_of(num_tasks))
    run_directory = RunDirectory.create(directory, "large")
    launcher = Launcher(plan, _NoSpawner(pipe), run_directory, Reporter())
    await asyncio.gather(launcher.run(), _tell_load(pipe, said))


class _NoSpawner:
    """Starts nothing: the tasks are told where the launcher is."""

    is_local = True

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        service = Service.from_environ(environment, Place(0, ""))
        self._pipe.send((service.addresses[0].port, service.secret))

    async def close(self, grace_seconds: float) -> None:
        pass


async def _tell_load(pipe: _Pipe, said: Counter[str]) -> None:
    while await asyncio.get_running_loop().run_in_executor(None, pipe.recv):
        used = resource.getrusage(resource.RUSAGE_SELF)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
        memory, crossed = 1000 * int(status["VmRSS"].split()[0]), int(line.split()[1])
        pipe.send(Load(used.ru_utime + used.ru_stime, memory, said["messages"], said["bytes"], crossed))


def _count_messages() -> Counter[str]:
    """Count what goes through seals from now on: that is every message, in its final form."""
    said = Counter[str]()
    seal, unseal = auth.Seal.seal, auth.Seal.open

    def counting_seal(self: auth.Seal, payload: bytes) -> bytes:
        sealed = seal(self, payload)
        said["messages"] += 1
        said["bytes"] += len(sealed)
        return sealed

    def counting_open(self: auth.Seal, sealed: bytes) -> bytes:
        said["messages"] += 1
        said["bytes"] += len(sealed)
        return unseal(self, sealed)

    auth.Seal.seal, auth.Seal.open = counting_seal, counting_open  # type: ignore[method-assign]
    return said


# The processes of the tasks


def _be_tasks(pipe: _Pipe, port: int, secret: str, ranks: range, num_tasks: int) -> None:
    asyncio.run(_Tasks(pipe, port, secret, ranks, num_tasks).live())


class _Tasks:
    """Some of the tasks, in one process."""

    def __init__(self, pipe: _Pipe, port: int, secret: str, ranks: range, num_tasks: int) -> None:
        self._pipe = pipe
        self._num_tasks = num_tasks
        self._limits = limits_of(num_tasks)
        self._service = ((Address("127.0.0.1", port),), secret)
        self._members = [self._member(rank) for rank in ranks]
        self._chief = self._members[0] if 0 in ranks else None

    def _member(self, rank: int) -> Membership:
        host = f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}"
        hello = Hello(rank, f"node{rank:05}", host, 40001, "1", __version__)
        return Membership(
            lambda: self._service,
            lambda _: hello,
            dead_after_seconds=self._limits.dead_after_seconds,
            join_seconds=PATIENCE_SECONDS,
            num_tasks=self._num_tasks,
        )

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        self._pipe.send("ready")
        running = []
        while what := await loop.run_in_executor(None, self._pipe.recv):
            if what == "map_bytes":
                agreed = self._members[0].map
                assert agreed is not None
                packed = pack_map(agreed)
                self._pipe.send((len(packed) + auth.MAC_BYTES, len(zlib.decompress(packed)) + auth.MAC_BYTES))
                continue
            if what == "rendezvous":
                running = [asyncio.create_task(member.run()) for member in self._members]
            do: Callable[[Membership], Coroutine[Any, Any, None]] = getattr(self, f"_{what}")
            try:
                await asyncio.gather(*map(do, self._members))
            except RuntimeError as error:
                self._pipe.send(error)
                os._exit(1)  # without a word of each of its tasks
            self._pipe.send(time.monotonic())
        del running

    async def _rendezvous(self, member: Membership) -> None:
        await _wait(member, lambda: bool(member.packed_map))

    async def _decode(self, member: Membership) -> None:
        assert member.map is not None

    async def _decode_one(self, member: Membership) -> None:
        """One task of each process reads the map."""
        if member is self._members[0]:
            await self._decode(member)

    async def _start(self, member: Membership) -> None:
        member.report(state="proved")
        await _wait(member, lambda: bool(member.order.starts))
        member.report(state="running", starts=1, process_id=1)

    async def _barrier(self, member: Membership) -> None:
        member.note(dataclasses.replace(Report(), waiting=Waiting("all", "here", PATIENCE_SECONDS)))
        await _wait(member, lambda: member.order.released == "here")

    async def _steady(self, member: Membership) -> None:
        """Only live, and tell what the child uses, as agents do."""
        pause = max(_USAGE_SECONDS, self._num_tasks / 100)
        for sample in range(round(_STEADY_SECONDS / pause)):
            await asyncio.sleep(pause)
            member.mention(Usage(1_500_000_000 + sample, 1000.5 + sample, 10**10 + sample, 10**11 + sample))

    async def _restart(self, member: Membership) -> None:
        """The chief fails; all take another port, and the cluster forms again until all may start."""
        if member is self._chief:
            member.report(state="exited", returncode=1)
        before = member.packed_map
        await _wait(member, lambda: member.order.attempt == 2)
        member.begin_attempt(2, port=40002)
        await _wait(member, lambda: member.packed_map is not before)
        await self._start(member)

    async def _fail(self, member: Membership) -> None:
        await self._end(member, 1)

    async def _leave(self, member: Membership) -> None:
        await self._end(member, 0)

    async def _end(self, member: Membership, returncode: int) -> None:
        """The chief's child ends; all are told to leave."""
        if member is self._chief:
            member.report(state="exited", returncode=returncode)
        while not member.order.leave:
            await member.wait_for_change()


async def _wait(member: Membership, is_there: Callable[[], bool]) -> None:
    """Wait until an order says what it should; that to leave is the end of the benchmark."""
    while not is_there():
        if member.order.leave:
            raise RuntimeError(f"the job has ended too early: {member.order.reason}")
        await member.wait_for_change()
