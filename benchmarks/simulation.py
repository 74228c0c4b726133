"""A job of N tasks without children and without Slurm: each task has its own connection, all live in a few processes.

The service has a process of its own, as the launcher has it. Times are of CLOCK_MONOTONIC, which all processes of a
machine share. A task has the map when it has received it and opened its seal; reading it into Python's values, which
real hosts do side by side, is a step of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.simulated_tasks import PATIENCE_SECONDS, be_tasks, limits_of
from tf4slurm.cluster import Task
from tf4slurm.control import auth
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState
from tf4slurm.join import Place, Service
from tf4slurm.launch.launcher import Launcher, Reporter
from tf4slurm.launch.plan import LaunchPlan
from tf4slurm.launch.spawner import SpawnerListener
from tf4slurm.run_directory import RunDirectory

PROCESSES = 4
"""Over so many the tasks are spread, ours as those of the peers."""

_SPAWN = multiprocessing.get_context("spawn")
_SECRET = "the secret of a benchmark"


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
        self._pipes: list[Connection] = []
        self._service: Connection

    def __enter__(self) -> Simulation:
        raise_files(self._num_tasks + 1_000)
        try:
            self._service = self._start(_serve, self._num_tasks, self._directory)
            port, secret = _hear(self._service)
            for index in range(PROCESSES):
                ranks = range(index, self._num_tasks, PROCESSES)
                self._pipes.append(self._start(be_tasks, port, secret, ranks, self._num_tasks))
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

    def _start(self, target: Callable[..., None], *arguments: object) -> Connection:
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


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_SECONDS):
        raise TimeoutError("a process of the benchmark does not answer")
    said = pipe.recv()
    if isinstance(said, RuntimeError):
        raise said
    return said


# The service's process


def _serve(pipe: Connection, num_tasks: int, directory: Path | None) -> None:
    said = _count_messages()
    asyncio.run(_launch(pipe, num_tasks, directory, said) if directory else _serve_alone(pipe, num_tasks, said))


async def _serve_alone(pipe: Connection, num_tasks: int, said: Counter[str]) -> None:
    tasks = [Task("chief", 0), Task("ps", 0), *(Task("worker", index) for index in range(num_tasks - 2))]
    service = ControlService(JobState(tasks, limits_of(num_tasks), time.monotonic(), lambda *_: None), _SECRET)
    pipe.send((await service.start("127.0.0.1"), _SECRET))
    await _tell_load(pipe, said)


async def _launch(pipe: Connection, num_tasks: int, directory: Path, said: Counter[str]) -> None:
    counts = {"chief": 1, "ps": 1, "worker": num_tasks - 2}
    plan = LaunchPlan(counts, ("true",), "large", directory, limits_of(num_tasks))
    run_directory = RunDirectory.create(directory, "large")
    launcher = Launcher(plan, _NoSpawner(pipe), run_directory, Reporter())
    await asyncio.gather(launcher.run(), _tell_load(pipe, said))


class _NoSpawner:
    """Starts nothing: the tasks are told where the launcher is."""

    is_local = True

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        service = Service.from_environ(environment, Place(0, ""))
        self._pipe.send((service.addresses[0].port, service.secret))

    async def close(self, grace_seconds: float) -> None:
        pass


async def _tell_load(pipe: Connection, said: Counter[str]) -> None:
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
