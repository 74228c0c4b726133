"""Leases of data shards to scripts: which shards are done, in hand, or to be leased next. No side effects."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tf4slurm.control.messages import ShardGrant, ShardPosition, ShardRequest

MAX_CAPACITY = 1_000


@dataclass(frozen=True)
class ShardProgress:
    """The progress of the shards of one name, in all epochs.

    Attributes:
        name: The name given to `data_shards`.
        epochs: Number of epochs.
        done: Shards that are done.
        total: Number of shards of all epochs.
        in_hand: Shards that are leased and not done.
        repeated: Leases of shards that had been leased before, so that rows may have been seen twice.
    """

    name: str = ""
    epochs: int = 0
    done: int = 0
    total: int = 0
    in_hand: int = 0
    repeated: int = 0

    def __str__(self) -> str:
        """Return the progress for a terminal."""
        repeated = f", {self.repeated:,} leased again after a loss" if self.repeated else ""
        return f"data shards {self.name!r}: {self.done:,} of {self.total:,} done in {self.epochs} epochs{repeated}"


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
    """The shards of one name. `returned` is a heap of leased shards that were given back."""

    def __init__(self, request: ShardRequest, start: ShardPosition, before: _Shards | None) -> None:
        """`before` are the same shards in the previous attempt."""
        self.request = request
        self.has_start = request.start is not None
        self.total = request.size * request.epochs
        self.next = start.next
        self.returned = sorted(start.open)
        self.num_held = 0
        self.was_over = False
        self.num_repeated: int = before.num_repeated if before is not None else 0
        self._leased_once: int = max(start.next, before.leased_once if before is not None else 0)
        self.consumers: dict[_Consumer, None] = {}  # in the order of their first requests
        self._waiting: dict[_Consumer, None] = {}

    @property
    def leased_once(self) -> int:
        """The number below which each shard was leased in this attempt or an earlier one."""
        return max(self._leased_once, self.next)

    @property
    def is_over(self) -> bool:
        return self.next == self.total and not self.returned and not self.num_held

    def position(self) -> ShardPosition:
        held = (number for consumer in self.consumers for number in consumer.held)
        return ShardPosition(self.request.fingerprint, self.next, tuple(sorted([*self.returned, *held])))

    def progress(self) -> ShardProgress:
        request, in_hand = self.request, self.num_held
        done = self.next - in_hand - len(self.returned)
        return ShardProgress(request.name, request.epochs, done, self.total, in_hand, self.num_repeated)

    def find_error(self, request: ShardRequest) -> str:
        """Return why this request contradicts the first one; empty if it does not."""
        mine, theirs = self.request, request
        if (mine.size, mine.epochs, mine.fingerprint) != (theirs.size, theirs.epochs, theirs.fingerprint):
            what = (
                f"{theirs.size} shards an epoch and {theirs.epochs} epochs, another task {mine.size} and {mine.epochs}"
            )
            return f"this task has {what}. All tasks must give the same data, shard_size and epochs"
        if theirs.start is not None and not self.has_start:
            return "a position was given after another task had begun without one. Let the tasks wait at a barrier"
        return ""

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
        """Lease shards to the waiting consumers, each up to its capacity; yield those that got some."""
        while self._waiting and (self.returned or self.next < self.total):
            consumer = next(iter(self._waiting))
            del self._waiting[consumer]
            while len(consumer.held) < consumer.request.capacity and (self.returned or self.next < self.total):
                consumer.held.add(self._take())
            yield consumer

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
    """The shards of a job, by name.

    Shards are leased in order, epoch after epoch, and those that were given back before new ones. The first shards of
    an epoch may be leased while the last ones of the previous epoch are still in hand.
    """

    def __init__(self, changed: set[int], on_end: Callable[[ShardProgress], None] = lambda _: None) -> None:
        """`changed` receives the ranks whose `grants_of` may have changed; `on_end` is called when all are done."""
        self._changed = changed
        self._on_end = on_end
        self._shards: dict[str, _Shards] = {}
        self._before: dict[str, _Shards] = {}
        self._consumers: dict[int, dict[str, _Consumer]] = {}

    def update(self, rank: int, requests: Sequence[ShardRequest]) -> None:
        """Apply the present requests of a task: finish, take back and lease shards."""
        consumers = self._consumers.setdefault(rank, {})
        touched = []
        for token in consumers.keys() - {request.token for request in requests}:
            consumer = consumers.pop(token)
            if consumer.shards is not None:
                consumer.shards.remove(consumer)
                touched.append(consumer.shards)
            self._changed.add(rank)
        for request in requests:
            known = consumers.get(request.token)
            if known is None or known.request != request:
                consumer = known or _Consumer(rank, request)
                consumers[request.token] = consumer
                touched += self._apply(consumer, request)
                self._changed.add(rank)
        for shards in touched:
            self._lease(shards)

    def release(self, rank: int) -> None:
        """Take back all shards of a task that has ended."""
        self.update(rank, ())

    def clear(self) -> None:
        """Forget all progress, because a new attempt begins. Shards that it leases again count as repeated."""
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

    def _apply(self, consumer: _Consumer, request: ShardRequest) -> list[_Shards]:
        consumer.request = request
        shards = self._shards.get(request.name)
        consumer.error = _find_invalid(request) or (
            shards.find_error(request) if shards and not consumer.shards else ""
        )
        if consumer.error:
            return []
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
        if request.position_request != consumer.position_reply:
            consumer.position, consumer.position_reply = shards.position(), request.position_request
        return [shards]

    def _lease(self, shards: _Shards) -> None:
        self._changed.update(consumer.rank for consumer in shards.lease())
        if shards.is_over and not shards.was_over:
            shards.was_over = True
            self._changed.update(consumer.rank for consumer in shards.consumers)
            self._on_end(shards.progress())


def _find_invalid(request: ShardRequest) -> str:
    """Return what is wrong in a request, which any process of the user can send; empty if it is valid."""
    total, start = request.size * request.epochs, request.start
    if request.size < 1 or request.epochs < 1 or not 0 <= request.capacity <= MAX_CAPACITY:
        return f"the request has {request.size} shards, {request.epochs} epochs and capacity {request.capacity}"
    if start is None:
        return ""
    if start.fingerprint != request.fingerprint:
        return "the position to continue from is one of other data or another shard_size"
    is_ordered = list(start.open) == sorted(set(start.open))
    if not 0 <= start.next <= total or not is_ordered or not all(0 <= number < start.next for number in start.open):
        return f"the position to continue from, shard {start.next}, is not one of these {total} shards"
    return ""
