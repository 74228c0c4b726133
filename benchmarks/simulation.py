"""A job of N tasks without children and without Slurm: each task has its own connection; a few processes run them.

The service runs in its own process, as in a launcher, and creates the credentials; the tasks check its certificate and
send its token as agents do. Times are from CLOCK_MONOTONIC, which all processes of a machine share. A task has the
cluster spec when its message has arrived. Decoding it is measured separately: real hosts decode it in parallel.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.simulated_tasks import PATIENCE_SECONDS, be_tasks, limits_of
from tf4slurm.cluster import Task
from tf4slurm.control.credentials import ControlEndpoint, create_credentials
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.spawners import SpawnerListener
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.system.proc import NO_OTHERS

PROCESSES = 4
"""Number of processes for the tasks, for tf4slurm and its peers."""

_SPAWN = multiprocessing.get_context("spawn")


class Load(NamedTuple):
    """Totals of the service so far: processor seconds, resident bytes, messages and bytes in both directions.

    `message_bytes` counts payloads, without the overhead of gRPC, TLS and TCP; `loopback_bytes` counts all bytes on the
    loopback, with headers.
    """

    cpu_seconds: float
    memory_bytes: int
    messages: int
    message_bytes: int
    loopback_bytes: int


class Simulation:
    """Context manager in which the service and its tasks run.

    `ask` starts an operation in all tasks at once: rendezvous, start, barrier, steady, restart, then either leave or
    fail. The last may be decode, or decode_one in each process: a process that decodes hundreds of cluster specs sends
    nothing meanwhile.
    """

    def __init__(self, num_tasks: int, launcher_directory: Path | None = None) -> None:
        """With a directory, run a whole launcher, which stores its record, status and events there."""
        self._num_tasks = num_tasks
        self._directory = launcher_directory
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._service: Connection

    def __enter__(self) -> Simulation:
        raise_files(self._num_tasks + 1_000)
        try:
            self._service = self._start(_serve, self._num_tasks, self._directory)
            port, credentials = _hear(self._service)
            for index in range(PROCESSES):
                ranks = range(index, self._num_tasks, PROCESSES)
                self._pipes.append(self._start(be_tasks, port, credentials, ranks, self._num_tasks))
            for pipe in self._pipes:
                _hear(pipe)  # its imports are done
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, what: str) -> float:
        """Start an operation in all tasks at once; return the seconds until the last is done."""
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
        """Return the size in bytes of the cluster spec's message, with and without compression."""
        self._pipes[0].send("map_bytes")
        compressed, plain = _hear(self._pipes[0])
        return compressed, plain

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
    """Raise the soft limit of open files of this process and of the processes that it starts.

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
    counts = _count_messages()
    asyncio.run(_launch(pipe, num_tasks, directory, counts) if directory else _serve_alone(pipe, num_tasks, counts))


async def _serve_alone(pipe: Connection, num_tasks: int, counts: Counter[str]) -> None:
    tasks = [Task("chief", 0), Task("ps", 0), *(Task("worker", index) for index in range(num_tasks - 2))]
    credentials = create_credentials()
    service = ControlService(
        JobState(tasks, limits_of(num_tasks), time.monotonic(), lambda *_, **__: None), credentials
    )
    pipe.send((await service.start("127.0.0.1"), credentials.shared))
    await _send_loads(pipe, counts)


async def _launch(pipe: Connection, num_tasks: int, directory: Path, counts: Counter[str]) -> None:
    limits = limits_of(num_tasks)
    plan = dataclasses.replace(limits, command=("true",), workers=num_tasks - 2, name="large", runs_directory=directory)
    run_directory = RunDirectory.create(directory, "large")
    launcher = Launcher(plan, _NoSpawner(pipe), run_directory, TerminalOutput())
    await asyncio.gather(launcher.run(), _send_loads(pipe, counts))


class _NoSpawner:
    """Spawner that starts nothing, and sends the address of the launcher to the tasks."""

    is_local = True
    is_external = False
    others = NO_OTHERS

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        service = ControlEndpoint.from_environ(environment)
        self._pipe.send((service.addresses[0].port, service.credentials))

    async def close(self, grace_period_seconds: float) -> None:
        pass


async def _send_loads(pipe: Connection, counts: Counter[str]) -> None:
    while await asyncio.get_running_loop().run_in_executor(None, pipe.recv):
        used = resource.getrusage(resource.RUSAGE_SELF)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
        memory, crossed = 1000 * int(status["VmRSS"].split()[0]), int(line.split()[1])
        pipe.send(Load(used.ru_utime + used.ru_stime, memory, counts["messages"], counts["bytes"], crossed))


def _count_messages() -> Counter[str]:
    """Count all messages that the service reads and writes from now on, including heartbeats."""
    counts = Counter[str]()
    serve = ControlService._serve

    def count(payload: object) -> None:
        if isinstance(payload, bytes):  # otherwise the end of the call
            counts["messages"] += 1
            counts["bytes"] += len(payload)

    class CountingContext:
        def __init__(self, context: Any) -> None:
            self._context = context

        def __getattr__(self, name: str) -> Any:
            return getattr(self._context, name)

        async def read(self) -> Any:
            payload = await self._context.read()
            count(payload)
            return payload

        async def write(self, payload: bytes) -> None:
            count(payload)
            await self._context.write(payload)

    async def counting_serve(self: ControlService, messages: AsyncIterator[bytes], context: Any) -> None:
        await serve(self, messages, cast(Any, CountingContext(context)))

    ControlService._serve = counting_serve  # type: ignore[method-assign, assignment]
    return counts
