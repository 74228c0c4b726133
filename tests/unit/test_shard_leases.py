"""Leases of data shards: every shard is done, whatever is lost, and repeated only if it was in hand or not saved."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf4slurm.control import shard_leases
from tf4slurm.control.messages import (
    MAX_SCRIPT_BYTES,
    ScriptState,
    ShardGrant,
    ShardRequest,
    encode,
)
from tf4slurm.control.shard_leases import MAX_CAPACITY, MAX_OPEN, ShardChanges, ShardLeases, ShardProgress
from tf4slurm.control.shard_position import ShardPosition


def request(token: str = "a", **changes: object) -> ShardRequest:
    return dataclasses.replace(ShardRequest("data", token, 3, 2, "hash"), **changes)  # type: ignore[arg-type]


def lease(leases: ShardLeases, rank: int, *requests: ShardRequest) -> tuple[int, ...]:
    leases.update(rank, requests)
    return held(leases, rank)


def held(leases: ShardLeases, rank: int) -> tuple[int, ...]:
    return tuple(number for grant in leases.grants_of(rank) for number in grant.held)


def test_shards_are_leased_in_order_across_epochs() -> None:
    leases = ShardLeases()
    found = [lease(leases, 0, request(done=tuple(range(number)))) for number in range(7)]
    assert found == [(0,), (1,), (2,), (3,), (4,), (5,), ()]
    assert leases.grants_of(0) == (ShardGrant("a", is_over=True),)


def test_repeated_request_leases_nothing_more() -> None:
    leases = ShardLeases()
    assert [lease(leases, 0, request(capacity=2)) for _ in range(2)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("requests", [(), (request(capacity=0),)], ids=["released", "given back"])
def test_lost_shards_go_to_waiting_task_before_new_ones(requests: tuple[ShardRequest, ...]) -> None:
    leases = ShardLeases()
    assert lease(leases, 0, request(capacity=6)) == tuple(range(6))
    assert lease(leases, 1, request("b", capacity=2)) == ()
    assert lease(leases, 2, request("c")) == ()
    assert leases.update(0, requests) == ShardChanges(frozenset({0, 1, 2}))
    assert (held(leases, 1), held(leases, 2)) == ((0, 1), (2,))
    assert leases.progress() == (ShardProgress("data", 2, done=0, total=6, in_hand=3, repeated=3),)


def test_end_is_sent_to_all_waiting_tasks_once() -> None:
    leases = ShardLeases()
    lease(leases, 0, request(capacity=6))
    lease(leases, 1, request("b"))
    changes = leases.update(0, (request(capacity=6, done=tuple(range(6))),))
    assert changes == ShardChanges(frozenset({0, 1}), (ShardProgress("data", 2, done=6, total=6),))
    assert held(leases, 0) == ()
    assert all(grant.is_over for rank in (0, 1) for grant in leases.grants_of(rank))
    assert leases.release(0) == ShardChanges(frozenset({0}))


def test_new_attempt_continues_from_saved_position_and_counts_repeated_leases() -> None:
    leases = ShardLeases()
    lease(leases, 0, request(capacity=3))
    lease(leases, 0, request(capacity=3, done=(0, 2), position_request=1))  # leases 3 and 4, too
    (grant,) = leases.grants_of(0)
    assert grant.position == ShardPosition.of("hash", 3, (1,))
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
        (request("b", start=ShardPosition("other", 2)), "other data"),
        (request("b", start=ShardPosition("hash", 7)), "not one of"),
        (request("b", start=ShardPosition("hash", 2, (1, 2))), "not one of"),
        (request("b", start=ShardPosition("hash", 2, (1, 0, 1))), "not one of"),
        (request("b", start=ShardPosition("hash", 2, (-1, 1))), "not one of"),
        (request("b", size=10**9, start=ShardPosition("hash", 10**9, (0, 10**7))), "not one of"),
    ],
)
def test_invalid_request_is_refused_without_effect_on_others(other: ShardRequest, error: str) -> None:
    leases = ShardLeases()
    lease(leases, 0, request())
    before = leases.progress()
    assert lease(leases, 1, other) == ()
    assert error in leases.grants_of(1)[0].error
    leases.release(1)
    assert leases.progress() == before
    assert lease(leases, 0, request(done=(0,))) == (1,)


def test_position_given_after_another_task_has_begun_without_one_is_ignored() -> None:
    leases = ShardLeases()
    assert lease(leases, 0, request()) == (0,)
    assert lease(leases, 1, request("b", start=ShardPosition("hash", 3))) == (1,)
    assert not leases.grants_of(1)[0].error


def test_position_of_restarted_task_is_ignored() -> None:
    leases = ShardLeases()
    assert lease(leases, 0, request(start=ShardPosition("hash", 2))) == (2,)
    assert lease(leases, 1, request("b", start=ShardPosition("hash", 1))) == (3,)


POSITIONS = [(), (0,), (0, 1, 2), (3,), (1, 2, 5, 9), (0, 2, 4, 6, 8), tuple(range(10))]


@pytest.mark.parametrize("open_shards", POSITIONS)
def test_position_has_the_shards_that_are_not_done(open_shards: tuple[int, ...]) -> None:
    position = ShardPosition.of("hash", 10, open_shards)
    assert tuple(position.open()) == open_shards
    assert position.is_valid(10)
    assert not position.is_valid(9)


@pytest.mark.parametrize("open_shards", [(-1,), (1, 1), (2, 1), (10,)])
def test_position_of_numbers_that_do_not_increase_is_refused(open_shards: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected increasing numbers"):
        ShardPosition.of("hash", 10, open_shards)


@pytest.mark.parametrize("num_tasks", [10, 100])
def test_largest_position_fits_into_the_message_that_restores_it(num_tasks: int) -> None:
    """Each task holds 1,000 shards and finishes every other one, again and again."""
    leases, size, chance = ShardLeases(), 10**9, random.Random(num_tasks)
    done: list[tuple[int, ...]] = [()] * num_tasks

    def make(rank: int, **changes: object) -> ShardRequest:
        return request(f"{rank}", size=size, capacity=MAX_CAPACITY, done=done[rank], **changes)

    for _ in range(20):
        for rank in range(num_tasks):
            numbers = lease(leases, rank, make(rank))
            done[rank] = tuple(sorted(chance.sample(numbers, len(numbers) // 2)))
    assert held(leases, num_tasks - 1)
    leases.update(0, (make(0, position_request=1),))
    (grant,) = leases.grants_of(0)
    assert grant.position is not None
    assert min(num_tasks * MAX_CAPACITY, MAX_OPEN) // 2 < len(grant.position.open()) <= MAX_OPEN + num_tasks
    leases.clear()
    start = make(1, start=grant.position)
    message = encode(ScriptState(shards=(start,)))
    assert len(message) < MAX_SCRIPT_BYTES
    assert lease(leases, 1, dataclasses.replace(start, done=())) == tuple(grant.position.open()[:MAX_CAPACITY])


def test_each_task_gets_a_shard_when_the_most_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_leases, "MAX_OPEN", 4)
    leases = ShardLeases()
    wide: dict[str, Any] = {"size": 100, "capacity": 3}
    assert lease(leases, 0, request(**wide)) == (0, 1, 2)
    assert lease(leases, 1, request("b", **wide)) == (3,)
    assert lease(leases, 2, request("c", **wide)) == (4,)
    assert lease(leases, 2, request("c", **wide, done=(4,))) == (5,)
    leases.release(0)
    assert lease(leases, 2, request("c", **wide, done=(4, 5))) == (0, 1, 2)


def test_position_that_could_not_be_restored_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_leases, "MAX_POSITION_BYTES", 3)
    leases = ShardLeases()
    leases.update(0, (request(position_request=1),))
    assert not leases.grants_of(0)[0].error
    leases.update(0, (request(capacity=3, done=(1,), position_request=2),))
    (grant,) = leases.grants_of(0)
    assert "has 4 bytes, at most 3 can be restored" in grant.error
    assert grant.position is None


class Tasks:
    """Tasks that lease shards; `seen` counts how often each shard was in hand, `trained` how often it was done."""

    def __init__(self, size: int, epochs: int, num_tasks: int) -> None:
        self.size, self.epochs = size, epochs
        self.leases = ShardLeases()
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
        self.bound += sum(number >= position.next or number in position.open() for number in self.seen)
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
