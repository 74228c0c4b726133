"""Lease data shards to scripts, and record which shards are done. This module does no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tf4slurm.control.messages import MAX_POSITION_BYTES, ShardGrant, ShardRequest
from tf4slurm.control.shard_position import ShardPosition

MAX_CAPACITY = 1_000
MAX_OPEN = 32_768
"""While this many shards of one name are leased, a `DataShards` object gets a new shard only if it holds none.

This limits the size of a `ShardPosition`, which must fit into a message. It does not hold for shards that were given
back."""


@dataclass(frozen=True)
class ShardProgress:
    """The progress of the shards of one name, in all epochs.

    Attributes:
        name: The name given to `data_shards`.
        epochs: Number of epochs.
        done: Number of shards that are done.
        total: Number of shards of all epochs.
        in_hand: Number of shards that are leased and not done.
        repeated: Number of leases of shards that had been leased before. Their rows may have been read twice.
    """

    name: str = ""
    epochs: int = 0
    done: int = 0
    total: int = 0
    in_hand: int = 0
    repeated: int = 0

    def __str__(self) -> str:
        """Return the progress for a terminal."""
        repeated = f", {self.repeated:,} leased again" if self.repeated else ""
        return f"data shards {self.name!r}: {self.done:,} of {self.total:,} done in {self.epochs} epochs{repeated}"


@dataclass(frozen=True)
class ShardChanges:
    """The effects of changed requests.

    Attributes:
        ranks: The ranks of the tasks for which `ShardLeases.grants_of` may return something else now.
        finished: The progress of the shards of each name whose shards are now all done.
    """

    ranks: frozenset[int] = frozenset()
    finished: tuple[ShardProgress, ...] = ()


@dataclass(eq=False)
class _Consumer:
    """A `DataShards` object of a script, and the shards that it holds."""

    rank: int
    request: ShardRequest
    shards: _Shards | None = None
    held: set[int] = field(default_factory=set)
    error: str = ""
    position: ShardPosition | None = None
    position_reply: int = 0


class _Shards:
    """The shards of one name in the current attempt.

    Attributes:
        next: The number of the next new shard. Shards with smaller numbers are done, leased or in `returned`.
        returned: A heap of the numbers of shards that were given back, or were not done at the start position.
    """

    def __init__(self, request: ShardRequest, start: ShardPosition, before: _Shards | None) -> None:
        """Create the shards of the name in `request`, the first request of the attempt with this name.

        Args:
            request: The request.
            start: The position at which the leases begin.
            before: The shards of this name in the previous attempt, so that repeated leases are counted. None if there
                were none.
        """
        self.request = request
        self.total = request.size * request.epochs
        self.next = start.next
        self.returned = start.open()
        self.num_held = 0
        self.was_over = False
        self.num_repeated: int = before.num_repeated if before is not None else 0
        self._leased_once: int = max(start.next, before.leased_once if before is not None else 0)
        self.consumers: dict[_Consumer, None] = {}  # in the order of their first requests
        self._waiting: dict[_Consumer, None] = {}

    @property
    def leased_once(self) -> int:
        """The number of the first shard that was never leased, neither in this attempt nor in an earlier one.

        A lease of a shard with a smaller number counts as repeated.
        """
        return max(self._leased_once, self.next)

    @property
    def is_over(self) -> bool:
        return self.next == self.total and not self.returned and not self.num_held

    def position(self) -> ShardPosition:
        held = (number for consumer in self.consumers for number in consumer.held)
        return ShardPosition.of(self.request.fingerprint, self.next, sorted([*self.returned, *held]))

    def progress(self) -> ShardProgress:
        request = self.request
        done = self.next - self.num_held - len(self.returned)
        return ShardProgress(request.name, request.epochs, done, self.total, self.num_held, self.num_repeated)

    def find_error(self, request: ShardRequest) -> str:
        """Return why a request contradicts the first request for these shards. Return "" if it does not."""
        mine, theirs = self.request, request
        if (mine.size, mine.epochs, mine.fingerprint) == (theirs.size, theirs.epochs, theirs.fingerprint):
            return ""
        what = f"{theirs.size} shards an epoch and {theirs.epochs} epochs, another task {mine.size} and {mine.epochs}"
        return f"this task has {what}. All tasks must give the same data, shard_size and epochs"

    def take_back(self, consumer: _Consumer) -> None:
        for number in consumer.held:
            heapq.heappush(self.returned, number)
        self.num_held -= len(consumer.held)
        consumer.held.clear()

    def finish(self, consumer: _Consumer, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in consumer.held:
                consumer.held.remove(number)
                self.num_held -= 1

    def lease(self) -> Iterator[_Consumer]:
        """Lease shards to the consumers that have free capacity. Yield the consumers that got shards."""
        while self._waiting and self._num_free:
            consumer = next(iter(self._waiting))
            del self._waiting[consumer]
            while self._num_free and len(consumer.held) < self._most_for(consumer):
                consumer.held.add(self._take())
            yield consumer

    @property
    def _num_free(self) -> int:
        return len(self.returned) + self.total - self.next

    def _most_for(self, consumer: _Consumer) -> int:
        is_full = not self.returned and self.num_held >= MAX_OPEN
        return min(consumer.request.capacity, 1) if is_full else consumer.request.capacity

    def _take(self) -> int:
        number = heapq.heappop(self.returned) if self.returned else self.next
        self.num_repeated += number < self.leased_once
        self.next = max(self.next, number + 1)
        self.num_held += 1
        return number

    def update_waiting(self, consumer: _Consumer) -> None:
        if len(consumer.held) < consumer.request.capacity:
            self._waiting[consumer] = None
        else:
            self._waiting.pop(consumer, None)

    def remove(self, consumer: _Consumer) -> None:
        self.take_back(consumer)
        self.consumers.pop(consumer, None)
        self._waiting.pop(consumer, None)


class ShardLeases:
    """The data shards of a job, by name.

    Shards are leased in order, epoch after epoch. Shards that were given back are leased before new ones. The first
    shards of an epoch may be leased before the last ones of the previous epoch are done.
    """

    def __init__(self) -> None:
        self._shards: dict[str, _Shards] = {}
        self._before: dict[str, _Shards] = {}
        self._consumers: dict[int, dict[str, _Consumer]] = {}

    def update(self, rank: int, requests: Sequence[ShardRequest]) -> ShardChanges:
        """Apply the current requests of a task: one for each of its `DataShards` objects. Return what changed.

        Shards that the object has leased and lists as done are done. An object gives its shards back if its request has
        capacity 0, or is not in `requests` any more. Then free shards are leased to the tasks that wait for shards of a
        name that a new, changed or missing request had.
        """
        consumers = self._consumers.setdefault(rank, {})
        touched: dict[_Shards, None] = {}
        ended = [consumers.pop(token) for token in consumers.keys() - {request.token for request in requests}]
        for consumer in ended:
            if consumer.shards is not None:
                consumer.shards.remove(consumer)
                touched[consumer.shards] = None
        changed = [request for request in requests if not self._is_known(rank, request)]
        for request in changed:
            consumer = consumers.setdefault(request.token, _Consumer(rank, request))
            if self._apply(consumer, request) and consumer.shards is not None:
                touched[consumer.shards] = None
        ranks, finished = _lease(touched)
        return ShardChanges(frozenset(ranks | ({rank} if ended or changed else set())), finished)

    def release(self, rank: int) -> ShardChanges:
        """Take back the shards that are leased to a task that has ended, and lease them to tasks that wait."""
        return self.update(rank, ())

    def clear(self) -> None:
        """Forget which shards are done, because a new attempt begins. New leases of these shards count as repeated."""
        self._before.update(self._shards)
        self._shards.clear()
        self._consumers.clear()

    def grants_of(self, rank: int) -> tuple[ShardGrant, ...]:
        return tuple(
            ShardGrant(
                token,
                tuple(sorted(consumer.held)),
                consumer.shards is not None and consumer.shards.is_over,
                consumer.error,
                consumer.position,
                consumer.position_reply,
            )
            for token, consumer in self._consumers.get(rank, {}).items()
        )

    def progress(self) -> tuple[ShardProgress, ...]:
        return tuple(shards.progress() for shards in self._shards.values())

    def _is_known(self, rank: int, request: ShardRequest) -> bool:
        consumer = self._consumers[rank].get(request.token)
        return consumer is not None and consumer.request == request

    def _apply(self, consumer: _Consumer, request: ShardRequest) -> bool:
        """Apply a new or changed request, but lease no shards. Return whether the request is valid."""
        consumer.request = request
        shards = self._shards.get(request.name)
        consumer.error = _find_invalid(request) or (
            shards.find_error(request) if shards and not consumer.shards else ""
        )
        if consumer.error:
            return False
        if shards is None:
            start = request.start or ShardPosition(request.fingerprint)
            before = self._before.get(request.name)
            if before is not None and before.request.fingerprint != request.fingerprint:
                before = None
            shards = self._shards[request.name] = _Shards(request, start, before)
        consumer.shards = shards
        shards.consumers[consumer] = None
        shards.finish(consumer, request.done)
        if not request.capacity:
            shards.take_back(consumer)
        shards.update_waiting(consumer)
        _answer_position(consumer, shards)
        return True


def _answer_position(consumer: _Consumer, shards: _Shards) -> None:
    """Set the consumer's `position` if its request has a new `position_request`. Otherwise remove the position.

    A position may be large, and each message to the task would contain it. If it is too large for a message, set the
    consumer's `error` instead.
    """
    number = consumer.request.position_request
    if number == consumer.position_reply:
        consumer.position = None
        return
    consumer.position, consumer.position_reply = shards.position(), number
    if (num_bytes := consumer.position.num_bytes) > MAX_POSITION_BYTES:
        consumer.position = None
        consumer.error = f"their position has {num_bytes:,} bytes, at most {MAX_POSITION_BYTES:,} can be restored. "
        consumer.error += "Let fewer tasks take shards, or give data_shards a larger shard_size"


def _lease(touched: Iterable[_Shards]) -> tuple[set[int], tuple[ShardProgress, ...]]:
    """Lease the free shards in `touched` to the tasks that wait for them.

    Returns:
        The ranks of the tasks whose grants may have changed, and the progress of those shards that are now all done.
    """
    ranks: set[int] = set()
    finished = []
    for shards in touched:
        ranks.update(consumer.rank for consumer in shards.lease())
        if shards.is_over and not shards.was_over:
            shards.was_over = True
            ranks.update(consumer.rank for consumer in shards.consumers)
            finished.append(shards.progress())
    return ranks, tuple(finished)


def _find_invalid(request: ShardRequest) -> str:
    """Return what is wrong in a request, or "". It is checked because any process of the user may have sent it."""
    total = request.size * request.epochs
    start = request.start
    if request.size < 1 or request.epochs < 1 or not 0 <= request.capacity <= MAX_CAPACITY:
        return f"the request has {request.size} shards, {request.epochs} epochs and capacity {request.capacity}"
    if start is None:
        return ""
    if start.fingerprint != request.fingerprint:
        return "the position to continue from is one of other data or another shard_size"
    if not start.is_valid(total):
        return f"the position to continue from, shard {start.next}, is not one of these {total} shards"
    return ""
