"""Floods of strangers from several processes, over real sockets: they end, memory is bounded, and the job goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs import Job
from tests.unit.test_service_and_client import cancel, make_hello, serving, until
from tf4slurm.cluster import Address
from tf4slurm.control.client import Membership

FLOOD = Path(__file__).with_name("flood.py")
PROCESSES = 4
MEMORY = 64 * 2**20  # bytes: 500 strangers take about 8 MB, and 60 KB of each that has begun a message


class Floods:
    """The processes of one flood; they end with the test, for their stdin does."""

    def __init__(self, kind: str, port: int, connections: int, seconds: float) -> None:
        arguments = (kind, "127.0.0.1", str(port), str(connections // PROCESSES), str(seconds))
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(FLOOD), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(PROCESSES)
        ]

    def wait_until_flooding(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "flooding\n"

    @property
    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def reports(self) -> list[dict[str, float]]:
        """Wait for the end of all; return what each says became of its connections."""
        for process in self._processes:
            process.wait(timeout=80)
        answers = [process.communicate(timeout=60)[0] for process in self._processes]
        return [json.loads(answer.splitlines()[-1]) for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                process.communicate()


@contextlib.contextmanager
def flooding(kind: str, port: int, connections: int, seconds: float) -> Iterator[Floods]:
    floods = Floods(kind, port, connections, seconds)
    try:
        yield floods
    finally:
        floods.close()


def live(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 90))


class Meter:
    """The most memory and open files that this process has had, beyond those at the start."""

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process or psutil.Process()
        self._memory, self._files = self._process.memory_info().rss, self._process.num_fds()
        self.memory = self.files = 0

    def look(self) -> None:
        self.memory = max(self.memory, self._process.memory_info().rss - self._memory)
        self.files = max(self.files, self._process.num_fds() - self._files)


def some_often(*often: str, rarely: tuple[str, ...]) -> list[Any]:
    """Return kinds of floods as parameters, some of them only for `make test-long`."""
    return [*often, *(pytest.param(kind, marks=pytest.mark.long) for kind in rarely)]


@pytest.mark.parametrize(
    "kind", some_often("http2", "stream", rarely=("nonce", "silent", "deaf", "half", "slow", "garbage"))
)
def test_ten_thousand_strangers_are_sent_away_and_the_job_goes_on(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with serving() as job:
            members = await job.form(2)
            before, meter = list(job.events), Meter()
            with flooding(kind, job.port, 10_000, 40) as floods:
                while not floods.is_over:
                    meter.look()
                    await asyncio.sleep(0.02)
                reports = floods.reports()
            assert sum(report["opened"] for report in reports) == 10_000
            assert [report["open"] for report in reports] == [0] * PROCESSES
            assert meter.memory < MEMORY
            assert meter.files < 600
            assert job.events == before
            members[0].report(state="exited", starts=1, returncode=0)
            await until(lambda: members[1].order.leave)

    live(story)
    assert [record.getMessage() for record in caplog.records if is_a_warning_of_this_loop(record)] == []


def is_a_warning_of_this_loop(record: logging.LogRecord) -> bool:
    """gRPC has one queue for all event loops of a process, and wakes those of earlier tests, too, which are closed."""
    cause = record.exc_info[1] if record.exc_info else None
    return record.levelno >= logging.WARNING and str(cause) != "Event loop is closed"


@pytest.mark.long
def test_who_opens_stream_after_stream_does_not_stay() -> None:
    async def story() -> None:
        async with serving() as job:
            members = await job.form(2)
            before = list(job.events)
            with flooding("reopen", job.port, 400, 60) as floods:
                reports = await asyncio.to_thread(floods.reports)
            assert [report["closed"] for report in reports] == [100] * PROCESSES
            assert job.events == before
            members[0].report(state="exited", starts=1, returncode=0)
            await until(lambda: members[1].order.leave)

    live(story)


@pytest.mark.parametrize("kind", some_often("http2", rarely=("silent", "nonce")))
def test_a_job_forms_under_a_flood(kind: str) -> None:
    async def story() -> None:
        async with serving() as job:
            with flooding(kind, job.port, 10_000, 60) as floods:
                await asyncio.to_thread(floods.wait_until_flooding)
                members = [patient_member(job.port, rank) for rank in range(2)]
                running = [asyncio.create_task(member.run()) for member in members]
                await until(lambda: all(member.map for member in members), timeout_seconds=30)
            await cancel(*running)

    live(story)


def patient_member(port: int, rank: int) -> Membership:
    return Membership(
        lambda: ([Address("127.0.0.1", port)], "the secret of this job"),
        lambda _: make_hello(rank),
        dead_after_seconds=10,
        join_seconds=60,
    )


@pytest.mark.long
def test_a_job_under_attack_ends_as_it_should(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "2")
    assert job.process is not None
    for name in ("chief-0", "ps-0", "worker-0", "worker-1"):
        job.wait_for_child(name)
    meter = Meter(psutil.Process(job.process.pid))
    connections = psutil.Process(job.process.pid).net_connections()
    (port,) = (each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN)
    with contextlib.ExitStack() as stack:
        kinds = ("silent", "http2", "stream", "nonce", "half", "garbage")
        floods = [stack.enter_context(flooding(kind, port, 2_000, 60)) for kind in kinds]
        while not all(flood.is_over for flood in floods):
            meter.look()
            time.sleep(0.05)  # between two looks
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert meter.memory < MEMORY
    assert {event["kind"] for event in job.events}.isdisjoint({"disconnected", "lost", "reconnected"})
