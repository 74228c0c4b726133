"""`data_shards()`: shards of the data that the launcher leases to the processes of a job."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tf4slurm.control.messages import MAX_POSITION_BYTES, ShardGrant, ShardRequest
from tf4slurm.control.shard_leases import ShardLeases
from tf4slurm.control.shard_position import ShardPosition
from tf4slurm.errors import DataShardsError
from tf4slurm.scripts.channel import ScriptChannel, find_script_channel
from tf4slurm.scripts.functions import sort_files
from tf4slurm.system.typed_json import from_exact_json

_MAX_NAME_CHARACTERS = 100
_POSITION_SECONDS = 60.0
_LEASE_SECONDS = 2.0  # one exchange per second with each of 1,000 tasks costs the launcher 0.36 core
_MAX_LEASED = 8
_names: set[tuple[int, str]] = set()  # (process id, name of shards)


@dataclass(frozen=True)
class Shard:
    """A part of the data: some files or some rows.

    Attributes:
        number: Number of the shard, counted from 0 through all epochs.
        epoch: Number of the epoch, from 0.
        files: Paths of the files; empty if the data are rows.
        rows: Numbers of the rows; empty if the data are files.
    """

    number: int
    epoch: int
    files: tuple[str, ...] = ()
    rows: range = range(0)


def data_shards(
    data: int | range | Iterable[str | os.PathLike[str]],
    *,
    epochs: int,
    shard_size: int | None = None,
    name: str = "data",
    position: Mapping[str, Any] | None = None,
) -> DataShards:
    """Return an iterator over the shards that the job leases to this process.

        for shard in tf4slurm.data_shards(paths, epochs=3):
            train(shard.files)

    A `for` loop leases several shards together: as many as the process finishes in about 2 s, from 1 to 8. When all of
    them are finished, the loop reports them done and leases the next ones. A fast process gets more shards than a slow
    one.

    The shards of a lost process go to other processes, so each row is seen at least once per epoch. A row is seen again
    if its shard was leased to a lost process, also if that process had finished it, but not yet reported it done. It is
    seen again, too, if an error or `break` left the loop with its shard. Each attempt of the job begins with the first
    shard, or at `position`.

    Iteration ends when all shards of all processes are done, or when the job was asked to stop. A process that has no
    shard left waits, because a shard leased elsewhere may come back. Without an agent this process gets all shards. The
    loop raises the errors of `DataShards.take`.

    All processes give the same data, in any order of files. Shards are leased in order, epoch after epoch. The first
    shards of an epoch may be leased before the last ones of the previous epoch are done.

    Args:
        data: Paths of files, a number of rows, or a range of rows.
        epochs: Number of passes through the data.
        shard_size: Files or rows of a shard (default: 1 file; required for rows).
        name: Name of these shards in the job, at most 100 characters. Other data need another name. A process uses a
            name once.
        position: The result of `DataShards.position`, from which to continue.

    Raises:
        ValueError, TypeError: An argument is invalid.
    """
    epochs = _check("epochs", epochs)
    items: range | list[str]
    if isinstance(data, range) or hasattr(data, "__index__"):
        items = data if isinstance(data, range) else range(_check("data", data))
        if shard_size is None:
            raise ValueError("The data are rows: give shard_size, the number of rows of a shard, such as 10_000.")
    elif isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise TypeError(f"data is {data!r}: expected a list of paths, a number of rows, or a range.")
    else:
        items = sort_files(data, 0)
    if not len(items):
        raise ValueError("The data are empty: expected at least one file or row.")
    if len(name) > _MAX_NAME_CHARACTERS:
        raise ValueError(
            f"The name of data shards has at most {_MAX_NAME_CHARACTERS} characters, this one {len(name)}."
        )
    channel = find_script_channel()
    if channel is not None and (os.getpid(), name) in _names:
        raise ValueError(f"This process has shards named {name!r} already. Give all epochs at once, or another name.")
    shards = DataShards(items, epochs, _check("shard_size", 1 if shard_size is None else shard_size), name, position)
    _names.add((os.getpid(), name))
    return shards


@dataclass(frozen=True)
class _SavedPosition:
    """The result of `DataShards.position`."""

    fingerprint: str
    next: int = 0
    open: tuple[int, ...] = ()


class DataShards(Iterator[Shard]):
    """The shards that the job leases to this process. Only one thread may use them. See `data_shards`.

    A forked process leases shards of its own.
    """

    def __init__(
        self, items: range | list[str], epochs: int, shard_size: int, name: str, position: Mapping[str, Any] | None
    ) -> None:
        self._items = items
        self._shard_size = shard_size
        size = -(-len(items) // shard_size)
        self._request = ShardRequest(name, "", size, epochs, _fingerprint(items, shard_size))
        self._sent: ShardRequest | None = None
        self._grant = ShardGrant("")
        self._channel: ScriptChannel | None = None
        self._leases: ShardLeases | None = None  # without an agent
        self._in_hand: set[int] = set()
        self._again: set[int] = set()  # shards in hand that a `for` loop has still to repeat
        self._done: set[int] = set()  # finished shards that the launcher has not yet confirmed
        self._leased_at = 0.0  # when the loop last leased shards
        self._finished = 0  # number of shards finished since then
        self._process = 0
        if position is not None:
            self.restore(position)

    def __iter__(self) -> DataShards:
        """Begin a `for` loop. If an earlier loop ended by an error or `break`, first repeat the shards in hand."""
        self._begin()
        self._again = set(self._in_hand)
        return self

    def __next__(self) -> Shard:
        self._begin()
        self._finish(self._in_hand - self._again)
        if self._again and not self.is_stopped:
            number = min(self._again)
            self._again.remove(number)
            return self._shard(number)
        self._read()
        if self._free() and not self.is_stopped:
            return self._take_free()
        shard = self.take(0 if self.is_stopped else self._count_ahead())
        self._finished, self._leased_at = 0, time.monotonic()
        # `position` sends the request too, and must not lease shards ahead: when the loop leases the next ones, it
        # decides how many.
        self._request = dataclasses.replace(self._request, capacity=min(self._request.capacity, 1))
        if shard is None:
            raise StopIteration
        return shard

    def take(self, capacity: int = 1, *, wait: bool = True) -> Shard | None:
        """Return one more shard. Return None if no shard is available.

        No shard is available while `capacity` shards are `in_hand`, and after `is_over` or `is_stopped` became true.

        Args:
            capacity: The number of shards that this process wants in hand, at most 1,000. The launcher leases them
                ahead, so that later calls return at once. With 0, this process gives all its shards back to the
                launcher.
            wait: Wait for a shard (default). With False, return None if the launcher has not leased one yet. Do not
                wait with a shard in hand: if it is the last one, the wait never ends.

        Raises:
            DataShardsError: The launcher refuses the request, for example because another task has other data, or the
                request is too long.
            RendezvousConnectionError: The agent has exited.
        """
        self._exchange(capacity=capacity)
        if len(self._in_hand) >= capacity:
            return None
        if wait:
            self._wait_until(lambda: bool(self._free() or self._grant.is_over or self.is_stopped), None)
        if self._sent is not None and self._sent.start is not None and self._request.start is None:
            self._exchange()  # without the start position, so that later messages are short
        if self._grant.is_over and self._channel is not None and self._sent is not None:
            self._channel.send_shards(self._request.token, None)
        return None if self.is_stopped or not self._free() else self._take_free()

    @property
    def in_hand(self) -> tuple[Shard, ...]:
        """The shards that this process has taken and has not marked as done, sorted by number."""
        self._begin()
        return tuple(map(self._shard, sorted(self._in_hand)))

    @property
    def is_over(self) -> bool:
        """Whether all shards of all processes are done, according to the launcher's last answer."""
        return self._grant.is_over

    @property
    def is_stopped(self) -> bool:
        """Whether the job was asked to stop, so that no more shards are leased."""
        return self._channel is not None and bool(self._channel.desired.stop_reason)

    def done(self, *shards: Shard) -> None:
        """Mark these shards as done. Without arguments, mark all shards in hand.

        The next call of `take` or `position` reports them to the launcher. A `for` loop marks and reports its shards
        itself, when it needs the next ones. Within a loop, call this function before a save. Call it also before a
        `break`, if the shard in hand is trained. Otherwise the shard is repeated.
        """
        self._finish({shard.number for shard in shards} if shards else self._in_hand)

    def _finish(self, finished: set[int]) -> None:
        numbers = finished & self._in_hand
        self._done |= numbers
        self._in_hand -= numbers
        self._again -= numbers
        self._finished += len(numbers)

    def position(self) -> dict[str, Any]:
        """Return which shards of all processes are done, as JSON values for `restore`.

        Two kinds of shard are repeated after a restore: those in hand, and finished ones that other processes have not
        yet reported (at most 8 in each process with a `for` loop).

        Call this function before the variables are saved, so that each shard that counts as done is in the variables.

        Raises:
            DataShardsError: As for `take`, or the launcher did not answer within 60 s.
            RendezvousConnectionError: The agent has exited.
        """
        number = self._request.position_request + 1
        self._exchange(position_request=number)
        self._wait_until(lambda: self._grant.position_reply == number, _POSITION_SECONDS)
        position = self._grant.position
        if position is None or self._grant.position_reply != number:
            raise DataShardsError(f"The launcher did not send the position of {self._request.name!r} in time.")
        return {"fingerprint": position.fingerprint, "next": position.next, "open": position.open()}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue from the result of `position`. Call this before the first shard is taken.

        If several processes take shards, all of them call this function. Or one of them calls it and takes a shard,
        while the others wait at a barrier. In each attempt of the job, the launcher uses the position in the first
        request for these shards. It ignores the positions in later requests, because it knows a newer one.

        Raises:
            ValueError: This is no position, it belongs to other data or is too long, or shards were taken already.
        """
        if self._sent is not None:
            raise ValueError("A position can be restored only before the first shard is taken.")
        try:
            saved = from_exact_json(_SavedPosition, dict(position))
            start = ShardPosition.of(saved.fingerprint, saved.next, saved.open)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{position!r} is not the position of data shards: {error}") from error
        if start.fingerprint != self._request.fingerprint:
            raise ValueError(
                "The position is one of other data or another shard_size: start with these, or without it."
            )
        if start.num_bytes > MAX_POSITION_BYTES:
            raise ValueError(
                f"The position has {start.num_bytes:,} bytes, at most {MAX_POSITION_BYTES:,} can be restored. Start "
                "without it."
            )
        self._request = dataclasses.replace(self._request, start=start)

    def _free(self) -> set[int]:
        return set(self._grant.held) - self._in_hand - self._done

    def _take_free(self) -> Shard:
        number = min(self._free())
        self._in_hand.add(number)
        return self._shard(number)

    def _count_ahead(self) -> int:
        """Return how many shards the loop leases together: as many as it finishes in 2 s at its speed, from 1 to 8."""
        seconds = max(time.monotonic() - self._leased_at, 0.001)
        return min(max(round(self._finished * _LEASE_SECONDS / seconds), 1), _MAX_LEASED)

    def _exchange(self, **changes: Any) -> None:
        """Change fields of the request, and send it if it differs from the last one. Read the launcher's answer."""
        self._begin()
        done = tuple(sorted(self._done))
        self._request = dataclasses.replace(self._request, done=done, **changes)
        if self._request != self._sent:
            if self._channel is not None:
                self._channel.send_shards(self._request.token, self._request)
            elif self._leases is not None:
                leases = copy.deepcopy(self._leases)  # a Ctrl-C in the update leaves the old ones
                leases.update(0, (self._request,))
                self._leases = leases
            self._sent = self._request  # last: after a Ctrl-C the next call sends it
        self._read()

    def _begin(self) -> None:
        """Start with no shards in a process that has not used this object before, such as a fork. Idempotent."""
        if self._process == os.getpid():
            return
        self._channel = find_script_channel()
        self._leases = ShardLeases() if self._channel is None else None
        self._request = dataclasses.replace(self._request, token=os.urandom(8).hex(), position_request=0)
        self._grant, self._sent = ShardGrant(self._request.token), None
        self._in_hand, self._again, self._done, self._finished = set(), set(), set(), 0
        self._process = os.getpid()  # last: after a Ctrl-C the next call begins again

    def _read(self) -> None:
        """Read the launcher's latest answer, which may be older than the last request. If it has an error, raise it."""
        if self._channel is not None:
            grants = self._channel.desired.shards
        else:
            grants = self._leases.grants_of(0) if self._leases is not None else ()
        for grant in grants:
            if grant.token == self._request.token:
                self._done &= set(grant.held)
                self._grant = dataclasses.replace(grant, held=tuple(set(grant.held) - self._done))
                if self._request.start is not None:  # the launcher has it now
                    self._request = dataclasses.replace(self._request, start=None)
                if grant.error:
                    raise DataShardsError(f"The shards {self._request.name!r} are not leased: {grant.error}.")

    def _wait_until(self, condition: Callable[[], bool], timeout_seconds: float | None) -> None:
        def is_true() -> bool:
            self._read()
            return condition()

        if self._channel is not None:
            self._channel.wait_until(is_true, timeout_seconds)

    def _shard(self, number: int) -> Shard:
        epoch, index = divmod(number, self._request.size)
        items = self._items[index * self._shard_size : (index + 1) * self._shard_size]
        return Shard(number, epoch, rows=items) if isinstance(items, range) else Shard(number, epoch, tuple(items))


def _fingerprint(items: range | list[str], shard_size: int) -> str:
    described = [items.start, items.stop, items.step] if isinstance(items, range) else items
    return hashlib.sha256(json.dumps([described, shard_size]).encode()).hexdigest()[:16]


def _check(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: expected an integer.") from None
    if number < 1:
        raise ValueError(f"{name} is {number}: expected at least 1.")
    return number
