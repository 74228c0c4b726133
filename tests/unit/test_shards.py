"""Leases of data shards: every shard is done, whatever is lost, and repeated only if it was in hand or not saved."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf4slurm.control.messages import ShardGrant, ShardPosition, ShardRequest
from tf4slurm.control.shards import ShardLeases, ShardProgress


def request(token: str = "a", **changes: object) -> ShardRequest:
    return dataclasses.replace(ShardRequest("data", token, 3, 2, "hash"), **changes)  # type: ignore[arg-type]


def lease(leases: ShardLeases, rank: int, *requests: ShardRequest) -> tuple[int, ...]:
    leases.update(rank, requests)
    return held(leases, rank)


def held(leases: ShardLeases, rank: int) -> tuple[int, ...]:
    return tuple(number for grant in leases.grants_of(rank) for number in grant.held)


def test_shards_are_leased_in_order_across_epochs() -> None:
    leases = ShardLeases(set())
    found = [lease(leases, 0, request(done=tuple(range(number)))) for number in range(7)]
    assert found == [(0,), (1,), (2,), (3,), (4,), (5,), ()]
    assert leases.grants_of(0) == (ShardGrant("a", is_over=True),)


def test_repeated_request_leases_nothing_more() -> None:
    leases = ShardLeases(set())
    assert [lease(leases, 0, request(capacity=2)) for _ in range(2)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("requests", [(), (request(capacity=0),)], ids=["released", "given back"])
def test_lost_shards_go_to_waiting_task_before_new_ones(requests: tuple[ShardRequest, ...]) -> None:
    changed: set[int] = set()
    leases = ShardLeases(changed)
    assert lease(leases, 0, request(capacity=6)) == tuple(range(6))
    assert lease(leases, 1, request("b", capacity=2)) == ()
    assert lease(leases, 2, request("c")) == ()
    changed.clear()
    leases.update(0, requests)
    assert (held(leases, 1), held(leases, 2)) == ((0, 1), (2,))
    assert changed == {0, 1, 2}
    assert leases.progress() == (ShardProgress("data", 2, done=0, total=6, in_hand=3, repeated=3),)


def test_end_is_sent_to_all_waiting_tasks_once() -> None:
    changed: set[int] = set()
    ends: list[ShardProgress] = []
    leases = ShardLeases(changed, ends.append)
    lease(leases, 0, request(capacity=6))
    lease(leases, 1, request("b"))
    changed.clear()
    assert lease(leases, 0, request(capacity=6, done=tuple(range(6)))) == ()
    assert changed == {0, 1}
    assert all(grant.is_over for rank in (0, 1) for grant in leases.grants_of(rank))
    leases.release(0)
    assert len(ends) == 1


def test_new_attempt_continues_from_saved_position_and_counts_repeated_leases() -> None:
    leases = ShardLeases(set())
    lease(leases, 0, request(capacity=3))
    lease(leases, 0, request(capacity=3, done=(0, 2), position_request=1))  # leases 3 and 4, too
    (grant,) = leases.grants_of(0)
    assert grant.position == ShardPosition("hash", 3, (1,))
    assert grant.held == (1, 3, 4)
    leases.clear()
    assert lease(leases, 0, request("b", capacity=3, start=grant.position)) == (1, 3, 4)
    assert leases.progress()[0].repeated == 3
    assert lease(leases, 0, request("b", capacity=3, start=grant.position, done=(1,))) == (3, 4, 5)
    assert leases.progress()[0].repeated == 3


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (request("b", size=4), "same data"),
        (request("b", epochs=3), "same data"),
        (request("b", fingerprint="other"), "same data"),
        (request("b", size=0), "0 shards"),
        (request("b", epochs=0), "0 epochs"),
        (request("b", capacity=-1), "capacity -1"),
        (request("b", capacity=10**9), "capacity 1000000000"),
        (request("b", start=ShardPosition("hash", 2)), "after another task"),
        (request("b", start=ShardPosition("other", 2)), "other data"),
        (request("b", start=ShardPosition("hash", 7)), "not one of"),
        (request("b", start=ShardPosition("hash", 2, (5,))), "not one of"),
        (request("b", start=ShardPosition("hash", 2, (1, 1))), "not one of"),
    ],
)
def test_invalid_request_is_refused_without_effect_on_others(other: ShardRequest, error: str) -> None:
    leases = ShardLeases(set())
    lease(leases, 0, request())
    before = leases.progress()
    assert lease(leases, 1, other) == ()
    assert error in leases.grants_of(1)[0].error
    leases.release(1)
    assert leases.progress() == before
    assert lease(leases, 0, request(done=(0,))) == (1,)


def test_position_of_restarted_task_is_ignored() -> None:
    leases = ShardLeases(set())
    assert lease(leases, 0, request(start=ShardPosition("hash", 2))) == (2,)
    assert lease(leases, 1, request("b", start=ShardPosition("hash", 1))) == (3,)


class Tasks:
    """Tasks that lease shards; `seen` counts how often each shard was in hand, `trained` how often it was done."""

    def __init__(self, size: int, epochs: int, num_tasks: int) -> None:
        self.size, self.epochs = size, epochs
        self.leases = ShardLeases(set())
        self.seen: Counter[int] = Counter()
        self.bound = 0  # on repeated leases: shards in hand of lost tasks, and those done after the saved position
        self.saved: ShardPosition | None = None
        self.start: ShardPosition | None = None
        self.requests = [self.make(rank, 0) for rank in range(num_tasks)]
        self.known: list[set[int]] = [set() for _ in range(num_tasks)]
        self.starts = 0

    def make(self, rank: int, starts: int) -> ShardRequest:
        return ShardRequest("data", f"{rank}.{starts}", self.size, self.epochs, "hash", start=self.start)

    def send(self, rank: int, **changes: object) -> None:
        self.requests[rank] = dataclasses.replace(self.requests[rank], **changes)  # type: ignore[arg-type]
        self.leases.update(rank, (self.requests[rank],))
        self.look()

    def look(self) -> None:
        """Count the shards that tasks have newly in hand; no shard is in two hands."""
        hands: Counter[int] = Counter()
        for rank in range(len(self.requests)):
            now = set(held(self.leases, rank))
            self.seen.update(now - self.known[rank])
            self.known[rank] = now
            hands.update(now)
        assert not hands or max(hands.values()) == 1

    def finish(self, rank: int, count: int) -> None:
        self.send(rank, done=tuple(sorted(self.known[rank]))[:count])

    def kill(self, rank: int) -> None:
        self.bound += len(self.known[rank])
        self.leases.release(rank)
        self.starts += 1
        self.requests[rank] = self.make(rank, self.starts)
        self.look()

    def save(self, rank: int) -> None:
        self.send(rank, position_request=self.requests[rank].position_request + 1)
        (grant,) = self.leases.grants_of(rank)
        self.saved = grant.position

    def begin_attempt(self) -> None:
        """Lose all tasks and the launcher's progress; continue from the saved position."""
        position = self.saved or ShardPosition("hash")
        self.bound += sum(number >= position.next or number in position.open for number in self.seen)
        self.leases.clear()
        self.known = [set() for _ in self.known]
        self.start = position
        self.starts += 1
        self.requests = [self.make(rank, self.starts) for rank in range(len(self.requests))]


ACTIONS = st.tuples(
    st.sampled_from(["lease", "finish", "finish", "finish", "kill", "save", "attempt", "wider"]),
    st.integers(0, 3),
    st.integers(1, 3),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.lists(ACTIONS, max_size=60))
def test_every_shard_is_done_and_repeats_are_bounded_with_random_kills(
    size: int, epochs: int, actions: Sequence[tuple[str, int, int]]
) -> None:
    tasks = Tasks(size, epochs, 4)
    for action, rank, count in actions:
        if action == "lease":
            tasks.send(rank)
        elif action == "wider":
            tasks.send(rank, capacity=count)
        elif action == "finish":
            tasks.finish(rank, count)
        elif action == "kill":
            tasks.kill(rank)
        elif action == "save":
            tasks.save(rank)
        else:
            tasks.begin_attempt()
    for _ in range(3 * size * epochs + 1):
        for rank in range(4):
            tasks.send(rank)
            tasks.finish(rank, 1)
    assert all(grant.is_over for rank in range(4) for grant in tasks.leases.grants_of(rank))
    assert set(tasks.seen) == set(range(size * epochs))
    (progress,) = tasks.leases.progress()
    assert progress.done == progress.total == size * epochs
    assert sum(tasks.seen.values()) - size * epochs == progress.repeated <= tasks.bound
