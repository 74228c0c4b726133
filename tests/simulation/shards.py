"""Data shards in a simulated script: what `tf4slurm.scripts.data_shards.DataShards` does, with a virtual clock."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from tf4slurm.control.messages import ShardGrant, ShardRequest
from tf4slurm.control.shard_position import ShardPosition

if TYPE_CHECKING:
    from tests.simulation.script import ScriptProcess

NAME = "rows"
_FINGERPRINT = "0123456789abcdef"
_SHARD_SECONDS = 0.25


class SimulatedShards:
    """The `DataShards` object of one process; it takes all shards that it gets, two at a time."""

    def __init__(self, process: ScriptProcess) -> None:
        self.process, self._job = process, process.job
        size, epochs = self._job.plan.shards
        start = self._job.saved_position if self._job.plan.saves_positions else None
        self._job.shard_starts.setdefault(process.script.attempt, start)
        self._request = ShardRequest(NAME, process.name, size, epochs, _FINGERPRINT, capacity=2, start=start)
        self._sent: ShardRequest | None = None
        self._grant = ShardGrant(process.name)
        self.in_hand: set[int] = set()
        self._done: set[int] = set()

    async def run(self) -> None:
        """Take shards until all are done, or the job stops."""
        process = self.process
        step = 0
        while True:
            self._exchange()
            await process.wait_until(lambda: self._has_answer() or bool(process.desired.stop_reason), 60)
            if process.desired.stop_reason and process.plan.stop == "polls":
                await process._save_and_exit()
            if self._grant.is_over:
                self._job.check("shards are over", self)
                break
            if not self._free():
                break
            number = min(self._free())
            self.in_hand.add(number)
            self._job.on_shard(process, number)
            await asyncio.sleep(_SHARD_SECONDS)
            self._done.add(number)
            self.in_hand.discard(number)
            self._job.on_shard_done(process, number)
            step += 1
            process.send(step=step)
            if self._job.plan.saves_positions and step % 3 == 0:
                await self._save_position()
        process.send(shards=())

    async def _save_position(self) -> None:
        number = self._request.position_request + 1
        self._exchange(position_request=number)
        if await self.process.wait_until(lambda: self._read() or self._grant.position_reply == number, 10):
            position = self._grant.position
            if position is not None:
                self._job.on_position(self.process.script, position)

    def _has_answer(self) -> bool:
        self._read()
        return bool(self._free()) or self._grant.is_over

    def _free(self) -> set[int]:
        return set(self._grant.held) - self.in_hand - self._done

    def _exchange(self, **changes: int) -> None:
        self._read()
        self._request = dataclasses.replace(self._request, done=tuple(sorted(self._done)), **changes)  # type: ignore[arg-type]
        if self._request != self._sent:
            self._sent = self._request
            self.process.send(shards=(self._request,))

    def _read(self) -> bool:
        for grant in self.process.desired.shards:
            if grant.token == self._request.token:
                self._done &= set(grant.held)
                self._grant = dataclasses.replace(grant, held=tuple(set(grant.held) - self._done))
                if self._request.start is not None:
                    self._request = dataclasses.replace(self._request, start=None)
                if grant.error:
                    self._job.check("shards are refused", (self.process, grant.error))
                    self.process.end(1, "exit")
        return False


def done_shards(position: ShardPosition | None) -> set[int]:
    """Return the shards that are done in a position."""
    return set() if position is None else set(range(position.next)) - set(position.open())
