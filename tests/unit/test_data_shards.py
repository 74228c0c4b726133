"""`data_shards`: its arguments, the shards of a process without an agent, and the exchanges with an agent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tf4slurm
from tf4slurm.control.messages import DesiredState, ShardRequest
from tf4slurm.control.shard_leases import ShardLeases
from tf4slurm.scripts import data_shards
from tf4slurm.scripts.data_shards import DataShards

FILES = ["b", "a", "c"]


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        ("a.tfrecord", {}, TypeError, "expected a list of paths"),
        (b"a.tfrecord", {}, TypeError, "expected a list of paths"),
        ([], {}, ValueError, "empty"),
        (range(0), {"shard_size": 1}, ValueError, "empty"),
        (0, {"shard_size": 1}, ValueError, "data is 0: expected at least 1"),
        (100, {}, ValueError, "give shard_size"),
        (range(100), {}, ValueError, "give shard_size"),
        (2.5, {"shard_size": 1}, TypeError, "data is 2.5: expected a list of paths"),
        ([1, 2], {}, TypeError, "expected str, bytes or os.PathLike"),
        (["a", "a"], {}, ValueError, "'a' is named twice"),
        (FILES, {"epochs": 0}, ValueError, "epochs is 0: expected at least 1"),
        (FILES, {"epochs": 1.5}, TypeError, "epochs is 1.5: expected an integer"),
        (FILES, {"shard_size": 0}, ValueError, "shard_size is 0: expected at least 1"),
        (FILES, {"shard_size": "2"}, TypeError, "shard_size is '2': expected an integer"),
        (FILES, {"name": "n" * 101}, ValueError, "at most 100 characters, this one 101"),
        (FILES, {"position": {"next": 1}}, ValueError, "not the position of data shards"),
        (FILES, {"position": {"fingerprint": "f", "next": "1"}}, ValueError, "not the position of data shards"),
        (FILES, {"position": {"fingerprint": "f", "extra": 1}}, ValueError, "not the position of data shards"),
        (FILES, {"position": {"fingerprint": "f", "next": 1}}, ValueError, "other data or another shard_size"),
        (
            FILES,
            {"position": {"fingerprint": "f", "next": 3, "open": [2, 1]}},
            ValueError,
            "expected increasing numbers",
        ),
        (FILES, {"position": {"fingerprint": "f", "next": 3, "open": [3]}}, ValueError, "expected increasing numbers"),
    ],
)
def test_invalid_argument_is_refused(data: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tf4slurm.data_shards(data, **{"epochs": 1, **options})


def test_process_without_agent_gets_all_shards() -> None:
    shards = list(tf4slurm.data_shards(FILES, shard_size=2, epochs=2))
    assert [(shard.number, shard.epoch, shard.files) for shard in shards] == [
        (0, 0, ("a", "b")),
        (1, 0, ("c",)),
        (2, 1, ("a", "b")),
        (3, 1, ("c",)),
    ]


def test_position_is_refused_after_the_first_shard() -> None:
    shards = tf4slurm.data_shards(FILES, epochs=1)
    position = shards.position()
    with pytest.raises(ValueError, match="only before the first shard"):
        shards.restore(position)


class Channel:
    """A channel to an agent whose launcher answers at once. `now` is the monotonic clock of the script."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.desired = DesiredState()
        self.sent: list[ShardRequest] = []
        self.leases = ShardLeases()
        self._requests: dict[str, ShardRequest] = {}

    def monotonic(self) -> float:
        return self.now

    def send_shards(self, token: str, request: ShardRequest | None) -> None:
        self._requests.pop(token, None)
        if request is not None:
            self.sent.append(request)
            self._requests[token] = request
        self.leases.update(0, tuple(self._requests.values()))
        self.desired = dataclasses.replace(self.desired, shards=self.leases.grants_of(0))

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        assert condition()
        return True

    def begin_attempt(self) -> None:
        self._requests.clear()
        self.sent.clear()
        self.leases.clear()
        data_shards._names.clear()

    def stop(self) -> None:
        self.desired = dataclasses.replace(self.desired, stop_reason="stop")

    def train(self, shards: DataShards, seconds: float) -> int:
        """Take a shard in the loop, and let its training take so many seconds; return its number."""
        number = next(shards).number
        self.now += seconds
        return number


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    channel = Channel()
    monkeypatch.setattr(data_shards, "find_script_channel", lambda: channel)
    monkeypatch.setattr(data_shards, "_names", set())
    monkeypatch.setattr(data_shards, "time", channel)
    return channel


@pytest.mark.usefixtures("channel")
def test_name_of_refused_data_shards_can_be_used_again() -> None:
    with pytest.raises(ValueError, match="shard_size"):
        tf4slurm.data_shards(10, shard_size=0, epochs=1)
    assert tf4slurm.data_shards(10, shard_size=5, epochs=1) is not None
    with pytest.raises(ValueError, match="already"):
        tf4slurm.data_shards(10, shard_size=5, epochs=1)


def make_shards() -> DataShards:
    return tf4slurm.data_shards(100, shard_size=1, epochs=1)


@pytest.mark.parametrize(
    ("seconds", "capacity"), [(60.0, 1), (2.0, 1), (1.0, 2), (0.98, 2), (0.5, 4), (0.3, 7), (0.1, 8), (0.0, 8)]
)
def test_loop_leases_two_seconds_of_shards_together(channel: Channel, seconds: float, capacity: int) -> None:
    shards = make_shards()
    assert [channel.train(shards, seconds) for _ in range(1 + capacity)] == list(range(1 + capacity))
    assert [(request.capacity, request.done) for request in channel.sent] == [(1, ()), (capacity, (0,))]
    channel.train(shards, seconds)
    assert (channel.sent[-1].capacity, channel.sent[-1].done) == (capacity, tuple(range(1, 1 + capacity)))
    assert len(channel.sent) == 3


def test_capacity_follows_the_speed_since_the_last_lease(channel: Channel) -> None:
    shards = make_shards()
    for seconds in (0.1, *[10.0] * 8, 0.5, 1.0):
        channel.train(shards, seconds)
    assert [request.capacity for request in channel.sent] == [1, 8, 1, 4]


def test_stop_ends_the_loop_reports_finished_shards_and_gives_back_the_others(channel: Channel) -> None:
    shards = make_shards()
    for _ in range(3):
        channel.train(shards, 0.1)
    channel.stop()
    assert next(shards, None) is None
    (progress,) = channel.leases.progress()
    assert (progress.done, progress.in_hand) == (3, 0)
    assert shards.position()["next"] == 9
    assert channel.leases.progress()[0].in_hand == 0


def test_position_reports_finished_shards_and_leases_none_ahead(channel: Channel) -> None:
    shards = make_shards()
    for _ in range(3):
        channel.train(shards, 0.1)
    assert shards.position()["open"] == list(range(2, 9))
    shards.done()
    assert shards.position()["open"] == list(range(3, 9))
    assert [channel.train(shards, 0.1) for _ in range(6)] == list(range(3, 9))
    assert channel.leases.progress()[0].in_hand == 6


def test_position_can_be_restored_and_is_sent_once(channel: Channel) -> None:
    shards = make_shards()
    for _ in range(3):
        channel.train(shards, 0.1)
    position = json.loads(json.dumps(shards.position()))
    assert position == {"fingerprint": position["fingerprint"], "next": 9, "open": list(range(2, 9))}
    channel.begin_attempt()
    restored = tf4slurm.data_shards(100, shard_size=1, epochs=1, position=position)
    assert next(restored).number == 2
    assert [request.start is None for request in channel.sent] == [False, True]
    assert channel.leases.progress()[0].done == 2


def test_loop_that_saves_after_each_shard_leases_one(channel: Channel) -> None:
    shards = make_shards()
    for _ in range(10):
        channel.train(shards, 0.1)
        shards.done()
        shards.position()
        assert channel.leases.progress()[0].in_hand == 1


def test_fork_takes_no_shard_that_its_parent_has_leased(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards()
    assert [channel.train(shards, 0.1) for _ in range(2)] == [0, 1]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert channel.train(shards, 0.1) == 9
    assert channel.leases.progress()[0].in_hand == 9


def test_loop_after_an_error_or_break_repeats_the_shard_that_was_not_done() -> None:
    shards = tf4slurm.data_shards(10, shard_size=2, epochs=1)
    seen = []
    with contextlib.suppress(ZeroDivisionError):
        for shard in shards:
            seen.append(shard.number)
            if shard.number == 1:
                1 / 0  # noqa: B018
    for shard in shards:
        seen.append(shard.number)
        if shard.number == 2:
            shards.done()
            break
    seen += [shard.number for shard in shards]
    assert seen == [0, 1, 1, 2, 3, 4]


def test_interrupt_at_any_line_skips_no_shard() -> None:
    package = Path(tf4slurm.__file__).parent
    files = {
        str(package / name)
        for name in ("scripts/data_shards.py", "control/shard_leases.py", "control/shard_position.py")
    }
    is_interrupted, number = True, 0
    while is_interrupted:
        number, is_interrupted, left = number + 1, False, number

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left, is_interrupted
            if frame.f_code.co_filename not in files:
                return None
            left -= event == "line"
            if left < 0:
                sys.settrace(None)
                is_interrupted = True
                raise KeyboardInterrupt
            return trace

        shards = tf4slurm.data_shards(7, shard_size=2, epochs=2, name=f"interrupt {number}")
        seen: Counter[int] = Counter()
        sys.settrace(trace)
        try:
            train(shards, seen)
        except KeyboardInterrupt:
            train(shards, seen)
        finally:
            sys.settrace(None)
        assert shards.is_over
        assert sorted(seen) == list(range(7))
        assert min(seen.values()) >= 2
        assert max(seen.values()) <= 2 + is_interrupted
    assert number > 100


def train(shards: DataShards, seen: Counter[int]) -> None:
    """Take the shards one by one, first those in hand, as run_shards does."""
    waiting = list(shards.in_hand)
    while (shard := waiting.pop(0) if waiting else shards.take(1)) is not None:
        seen.update(shard.rows)
        shards.done(shard)
