"""Floods of unauthenticated connections from several processes, over real sockets.

The control service has its own process, so that its memory, files and processor time are measured alone. The
figures are printed: `pytest -s` shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs import Job
from tests.security.flood import KINDS
from tests.unit.test_service_and_client import Relay, cancel, make_registration, until
from tf4slurm.cluster import Address, Task
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint, Credentials, create_credentials
from tf4slurm.control.messages import ScriptState
from tf4slurm.control.service import _UNAUTHENTICATED_CONNECTIONS, ControlService
from tf4slurm.control.state import JobState
from tf4slurm.spec.job_spec import JobSpec

FLOOD = Path(__file__).with_name("flood.py")
ROOT = FLOOD.parents[2]
PROCESSES = 4
MANY, FEW = 10_000, 400
MEMORY = 2**30
"""Bytes: a connection takes 70 to 120 KB, and up to 200 KB if it sends without end; 4,096 may be open."""
OWN_FILES = 100
RETURN_SECONDS = 2.0
STILL_OPEN = {"stubborn": 0.02, "continuation": 0.1, "pings": 1.0}
"""The part of the connections that gRPC may leave open for as long as their clients send; see SECURITY.md."""

# The service's process


def serve(num_tasks: int) -> None:
    """Serve a job until stdin ends; print its address and credentials, then its events, as lines of JSON."""
    began = asyncio.run(_serve(num_tasks))
    print(f"closed after {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
    os._exit(0)  # as a launcher exits: the interpreter would wait for gRPC's connections


async def _serve(num_tasks: int) -> float:
    types = ["chief", "ps", *["worker"] * num_tasks][:num_tasks]
    tasks = [Task(task_type, rank - types.index(task_type)) for rank, task_type in enumerate(types)]
    credentials = create_credentials()

    def on_event(kind: str, task: str | None, _: str, **__: object) -> None:
        _print_line(kind=kind, task=task, at=time.monotonic())

    state = JobState(tasks, JobSpec(), time.monotonic(), on_event)
    service = ControlService(state, credentials)
    port = await service.start("127.0.0.1")
    _print_line(port=port, certificate=credentials.shared.certificate, token=credentials.shared.token)
    ended = asyncio.create_task(service.wait_for_end())
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await reading
    await cancel(ended)
    began = time.monotonic()
    await service.close()
    return began


def _print_line(**content: Any) -> None:
    print(json.dumps(content), flush=True)


class Meter:
    """The peak memory and open files of a process, minus those at the start."""

    def __init__(self, process_id: int) -> None:
        self._process = psutil.Process(process_id)
        self._memory, self._files = self._process.memory_info().rss, self._process.num_fds()
        self._cpu_seconds = self._current_cpu_seconds()
        self.memory = self.files = 0

    def measure(self) -> None:
        self.memory = max(self.memory, self._process.memory_info().rss - self._memory)
        self.files = max(self.files, self.current_files())

    def current_files(self) -> int:
        return self._process.num_fds() - self._files

    def _current_cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def __str__(self) -> str:
        cpu_seconds = self._current_cpu_seconds() - self._cpu_seconds
        return f"{self.memory / 2**20:.0f} MB, {self.files} files, {cpu_seconds:.1f} s of processor time"


class Served:
    """A control service in a separate process, and the clients of its tasks in this one."""

    def __init__(self, process: asyncio.subprocess.Process, num_tasks: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.members: list[ControlClient] = []
        self.port = 0
        self._process = process
        self._num_tasks = num_tasks
        self._credentials: Credentials | None = None
        self._running: list[asyncio.Task[None]] = []
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert self._process.stdout is not None
        first = json.loads(await self._process.stdout.readline())
        self.port = first.pop("port")
        self._credentials = Credentials(**first)
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            self.events.append(json.loads(line))

    def meter(self) -> Meter:
        return Meter(self._process.pid)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def begin(self, *ports: int) -> None:
        """Start all tasks; they connect to the service itself, or each to one of these ports."""
        for rank in range(self._num_tasks):
            assert self._credentials is not None
            endpoint = ControlEndpoint((Address("127.0.0.1", ports[rank] if ports else self.port),), self._credentials)
            member = ControlClient(
                lambda endpoint=endpoint: endpoint,  # type: ignore[misc]
                lambda _, rank=rank: make_registration(rank),  # type: ignore[misc]
                JobSpec(start_timeout_seconds=60),
                self._num_tasks,
            )
            self.members.append(member)
            self._running.append(asyncio.create_task(member.run()))

    async def start_children(self, *ports: int) -> None:
        """Bring all tasks up to the point where their children run."""
        self.begin(*ports)
        await until(lambda: all(member.cluster for member in self.members), timeout_seconds=30)
        for member in self.members:
            member.update(state="ready")
        await until(lambda: all(member.desired.start_count == 1 for member in self.members), timeout_seconds=30)
        for member in self.members:
            member.update(state="running", start_count=1, has_server=True)
        await until(lambda: self.kinds().count("started") == self._num_tasks)

    async def check_that_the_job_ends(self) -> None:
        """End the chief's child; the service must then terminate all tasks."""
        self.members[0].update(state="exited", start_count=1, returncode=0)
        await until(lambda: all(member.desired.terminate for member in self.members), timeout_seconds=15)

    async def close(self) -> None:
        await cancel(*self._running)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 15)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            if self._reading is not None:
                await self._reading


@contextlib.asynccontextmanager
async def serving(num_tasks: int = 2) -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"from tests.security.test_floods import serve; serve({num_tasks})",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )
    served = Served(process, num_tasks)
    try:
        await served.start()
        yield served
    finally:
        await served.close()


# The attackers' processes


class Floods:
    """The processes of floods; they end with the test, when their stdin is closed."""

    def __init__(self, port: int, seconds: float, *parts: tuple[str, int]) -> None:
        """`parts` are the kind and the number of connections of each process."""
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(FLOOD), kind, "127.0.0.1", str(port), str(connections), str(seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind, connections in parts
        ]

    def wait_until_flooding(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "flooding\n"

    @property
    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def reports(self) -> list[dict[str, float]]:
        """Wait for the end of all processes; return the report of each."""
        answers = [process.communicate(timeout=100)[0] for process in self._processes]
        return [json.loads(answer.splitlines()[-1]) for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                process.communicate()


@contextlib.contextmanager
def flooding(port: int, seconds: float, *parts: tuple[str, int]) -> Iterator[Floods]:
    floods = Floods(port, seconds, *parts)
    try:
        yield floods
    finally:
        floods.close()


def split(kind: str, connections: int) -> list[tuple[str, int]]:
    """Return the parts of a flood of one kind."""
    return [(kind, connections // PROCESSES)] * PROCESSES


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 170))


def in_normal_suite(*kinds: str, of: list[str]) -> list[Any]:
    """Return kinds of floods as parameters, most of them for `make test-long` only."""
    return [*kinds, *(pytest.param(kind, marks=pytest.mark.long) for kind in of if kind not in kinds)]


FAST = [name for name, kind in KINDS.items() if kind.is_fast]
ENDING = [name for name, kind in KINDS.items() if not (kind.is_fast or kind.reconnects)]


@pytest.mark.parametrize("kind", in_normal_suite("http2", "stream", of=ENDING))
def test_10000_unauthenticated_connections_are_closed_and_job_continues(kind: str) -> None:
    run(lambda: check_flood(kind, MANY))


@pytest.mark.parametrize("kind", in_normal_suite("rst", of=FAST))
def test_connections_that_send_without_end_are_closed_and_job_continues(kind: str) -> None:
    run(lambda: check_flood(kind, FEW))


async def check_flood(kind: str, connections: int) -> None:
    async with serving() as job:
        await job.start_children()
        before, meter = set(job.kinds()), job.meter()
        with flooding(job.port, 60, *split(kind, connections)) as floods:
            while not floods.is_over:
                meter.measure()
                await asyncio.sleep(0.02)  # between two measurements
            reports = floods.reports()
        print(f"\n{kind}: {meter}; longest {max(report['longest'] for report in reports)} s; {reports}")
        assert sum(report["opened"] for report in reports) == connections
        assert sum(report["open"] for report in reports) <= connections * STILL_OPEN.get(kind, 0)
        assert meter.memory < MEMORY
        assert meter.files < _UNAUTHENTICATED_CONNECTIONS + OWN_FILES
        assert set(job.kinds()) == before
        await until(lambda: meter.current_files() < OWN_FILES, timeout_seconds=30)  # the clients have exited
        await job.check_that_the_job_ends()


@pytest.mark.parametrize("kind", in_normal_suite("http2", of=["idle", "handshake", "stream", "metadata"]))
def test_rendezvous_completes_under_flood(kind: str) -> None:
    async def scenario() -> None:
        async with serving() as job:
            with flooding(job.port, 60, *split(kind, MANY)) as floods:
                await asyncio.to_thread(floods.wait_until_flooding)
                await job.start_children()
            await job.check_that_the_job_ends()

    run(scenario)


# Registered tasks that lose their connection during a flood


@pytest.mark.parametrize(
    ("num_tasks", "connections", "seconds"),
    [(10, 600, 10), pytest.param(100, 3_000, 60, marks=pytest.mark.long)],
)
def test_disconnected_task_is_registered_again_while_connections_reconnect(
    num_tasks: int, connections: int, seconds: float
) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            job = await stack.enter_async_context(serving(num_tasks))
            relays = [await stack.enter_async_context(Relay(job.port)) for _ in range(num_tasks)]
            await job.start_children(*(relay.port for relay in relays))
            meter = job.meter()
            parts = [part for kind in ("reconnect", "handshake-again") for part in [(kind, connections // 4)] * 2]
            floods = stack.enter_context(flooding(job.port, seconds + 60, *parts))  # `reports` ends them before
            await asyncio.to_thread(floods.wait_until_flooding)
            end = time.monotonic() + seconds
            cut: list[tuple[int, float]] = []
            step = 0
            while time.monotonic() < end - 2 * RETURN_SECONDS:
                for rank in [(len(cut) + number) % num_tasks for number in range(num_tasks // 20 + 1)]:
                    cut.append((rank, time.monotonic()))
                    relays[rank].cut()
                next_cut = time.monotonic() + 2 * RETURN_SECONDS
                while time.monotonic() < next_cut:
                    step += 1
                    for member in job.members:
                        member.update_script(ScriptState(step=step))
                    meter.measure()
                    await asyncio.sleep(0.25)  # the steps' period
            reports = await asyncio.to_thread(floods.reports)
            taken = [seconds_to_return(job, rank, at) for rank, at in cut]
            print(f"\n{num_tasks} tasks, {connections} connections that reconnect for {seconds} s: {meter}; {reports}")
            print(f"{len(cut)} cut: back after {statistics.median(taken):.2f} s (median), {max(taken):.2f} s (longest)")
            assert max(taken) < RETURN_SECONDS
            assert meter.memory < MEMORY
            assert meter.files < connections + 2 * num_tasks + OWN_FILES
            kinds = job.kinds()
            assert kinds.count("disconnected") == kinds.count("reconnected") == len(cut)
            assert not {"lost", "outcome"} & set(kinds)
            await job.check_that_the_job_ends()

    run(scenario)


def seconds_to_return(job: Served, rank: int, cut_at: float) -> float:
    """Return how long after a cut the service registered the task again; infinity if it did not."""
    name = job.members[rank].cluster.members[rank].task  # type: ignore[union-attr]
    back = (e["at"] for e in job.events if e["kind"] == "reconnected" and e["task"] == str(name) and e["at"] > cut_at)
    return next(back, float("inf")) - cut_at


@pytest.mark.long
def test_real_job_under_attack_ends_with_code_0_and_prints_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "2")
    assert job.process is not None
    for name in ("chief-0", "ps-0", "worker-0", "worker-1"):
        job.wait_for_child(name)
    meter = Meter(job.process.pid)
    connections = psutil.Process(job.process.pid).net_connections()
    (port,) = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    stderr = job.stderr
    kinds = ("idle", "http2", "stream", "garbage", "renegotiate", "plain-http")
    with flooding(port, 60, *((kind, 2_000) for kind in kinds)) as floods:
        while not floods.is_over:
            meter.measure()
            time.sleep(0.05)  # between two measurements
    printed = job.stderr[len(stderr) :]
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert meter.memory < MEMORY
    assert {event["kind"] for event in job.events}.isdisjoint({"disconnected", "lost", "reconnected"})
    assert printed == ""
