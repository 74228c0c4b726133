"""The tasks of a simulated job: many in one process, each with its own connection."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import time
import zlib
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from tf4slurm import __version__
from tf4slurm.cluster import Address
from tf4slurm.control import client
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint, Credentials
from tf4slurm.control.messages import BarrierArrival, Registration, ScriptState, ShardRequest, Usage, decode_cluster
from tf4slurm.spec.job_spec import JobSpec

PATIENCE_SECONDS = 120.0
_CROWD = 1_000  # with more, the tasks of one process may exceed the default heartbeat timeout
_USAGE_SECONDS, _USAGES_PER_SECOND = 5.0, 100  # as in agents: see tf4slurm/agent/probes.py
LEASE_SECONDS = 20
_LEASED_TOGETHER = 2  # as in `DataShards` at one shard a second
_STEADY_SECONDS = 20.0  # or one interval between usage reports, if longer


def limits_of(num_tasks: int) -> JobSpec:
    """Return the default limits, raised where so many tasks in so few processes need it."""
    limits = JobSpec(start_timeout_seconds=PATIENCE_SECONDS, max_attempts=2)
    return limits if num_tasks <= _CROWD else dataclasses.replace(limits, heartbeat_timeout_seconds=60.0)


def be_tasks(pipe: Connection, port: int, credentials: Credentials, ranks: range, num_tasks: int) -> None:
    vars(client)["decode_cluster"] = lambda payload: (1, payload)  # `_decode` decodes it
    gc.disable()  # no real process has so many tasks; the service's collector stays on
    asyncio.run(_Tasks(pipe, port, credentials, ranks, num_tasks).live())


class _Tasks:
    """Some of the tasks, in one process."""

    def __init__(self, pipe: Connection, port: int, credentials: Credentials, ranks: range, num_tasks: int) -> None:
        self._pipe = pipe
        self._num_tasks = num_tasks
        self._limits = limits_of(num_tasks)
        self._service = ControlEndpoint((Address("127.0.0.1", port),), credentials)
        self._members = [self._member(rank) for rank in ranks]
        self._chief = self._members[0] if 0 in ranks else None

    def _member(self, rank: int) -> ControlClient:
        host = f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}"
        registration = Registration(rank, f"node{rank:05}", host, _port(), "1", __version__)
        return ControlClient(lambda: self._service, lambda _: registration, self._limits, self._num_tasks)

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        self._pipe.send("ready")
        running = []
        while what := await loop.run_in_executor(None, self._pipe.recv):
            if what == "map_bytes":
                encoded: Any = self._members[0].cluster
                self._pipe.send((len(encoded), len(zlib.decompress(encoded))))
                continue
            if what == "rendezvous":
                running = [asyncio.create_task(member.run()) for member in self._members]
            do: Callable[[ControlClient], Coroutine[Any, Any, None]] = getattr(self, f"_{what}")
            try:
                await asyncio.gather(*map(do, self._members))
            except RuntimeError as error:
                self._pipe.send(error)
                os._exit(1)  # skips the exit messages of its tasks
            self._pipe.send(time.monotonic())
        del running

    async def _rendezvous(self, member: ControlClient) -> None:
        await _wait(member, lambda: member.cluster is not None)

    async def _decode(self, member: ControlClient) -> None:
        encoded: Any = member.cluster
        decode_cluster(encoded)

    async def _decode_one(self, member: ControlClient) -> None:
        """Decode the cluster spec in one task of each process."""
        if member is self._members[0]:
            await self._decode(member)

    async def _start(self, member: ControlClient) -> None:
        member.update(state="ready")
        await _wait(member, lambda: bool(member.desired.start_count))
        member.update(state="running", start_count=1, process_id=1)

    async def _barrier(self, member: ControlClient) -> None:
        member.update_script(
            dataclasses.replace(ScriptState(), barrier=BarrierArrival("all", "here", PATIENCE_SECONDS))
        )
        await _wait(member, lambda: member.desired.released_barrier == "here")

    async def _steady(self, member: ControlClient) -> None:
        """Run without events, and send resource usage as often as agents do."""
        pause = max(_USAGE_SECONDS, self._num_tasks / _USAGES_PER_SECOND)
        for sample in range(max(1, round(_STEADY_SECONDS / pause))):
            member.update_usage(Usage(1_500_000_000 + sample, 1000.5 + sample, 10**10 + sample, 10**11 + sample))
            await asyncio.sleep(pause)

    async def _lease(self, member: ControlClient) -> None:
        """Take one data shard a second as a `for` loop does: lease two every 2 s, and report the previous two done."""
        request = ShardRequest("data", "here", LEASE_SECONDS * self._num_tasks, 2, "hash", capacity=_LEASED_TOGETHER)
        await asyncio.sleep(_LEASED_TOGETHER * random.random())
        due = time.monotonic()
        for _ in range(LEASE_SECONDS // _LEASED_TOGETHER):
            member.update_script(dataclasses.replace(ScriptState(), shards=(request,)))
            before = request.done
            await _wait(member, lambda before=before: bool(_new_shards(member, before)))  # type: ignore[misc]
            request = dataclasses.replace(request, done=_new_shards(member, before))
            due += _LEASED_TOGETHER
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _restart(self, member: ControlClient) -> None:
        """Let the chief fail; all tasks choose another port, and the cluster forms again until all may start."""
        if member is self._chief:
            member.update(state="exited", returncode=1)
        before = member.cluster
        await _wait(member, lambda: member.desired.attempt == 2)
        member.begin_attempt(2, port=_port())
        await _wait(member, lambda: member.cluster is not before)
        await self._start(member)

    async def _fail(self, member: ControlClient) -> None:
        await self._end(member, 1)

    async def _leave(self, member: ControlClient) -> None:
        await self._end(member, 0)

    async def _end(self, member: ControlClient, returncode: int) -> None:
        """Let the chief's child exit, and wait until the desired state is to terminate."""
        if member is self._chief:
            member.update(state="exited", returncode=returncode)
        while not member.desired.terminate:
            await member.wait_for_change()


def _new_shards(member: ControlClient, done: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shards in the launcher's answer that are not in `done`."""
    return tuple(number for grant in member.desired.shards for number in grant.held if number not in done)


def _port() -> int:
    """Return a random port, which compresses as badly as real ones."""
    return random.randrange(32_768, 61_000)


async def _wait(member: ControlClient, is_there: Callable[[], bool]) -> None:
    """Wait until the desired state meets the condition; raise RuntimeError if the job ends instead."""
    while not is_there():
        if member.desired.terminate:
            raise RuntimeError(f"the job ended too early: {member.desired.terminate_reason}")
        await member.wait_for_change()
