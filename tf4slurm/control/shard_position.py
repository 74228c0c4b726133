"""The position of data shards, a compact value for messages that tells which shards are done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MAX_OPEN = 1_000_000  # protects the launcher's memory


@dataclass(frozen=True)
class ShardPosition:
    """Tells which shards of all epochs are done. Shards are numbered as in `ShardRequest`.

    Attributes:
        fingerprint: A hash of the data and the shard size.
        next: The number of the first shard that was never leased.
        runs: How many consecutive shards from number 0 are done, how many after them are not done, and so on in turns.
            The remaining shards before `next` are done. With (3, 2) and `next` 9, only shards 3 and 4 are not done.
    """

    fingerprint: str
    next: int = 0
    runs: tuple[int, ...] = ()

    @classmethod
    def of(cls, fingerprint: str, next: int = 0, open: Iterable[int] = ()) -> ShardPosition:
        """Return the position in which all shards before `next` are done, except those in `open`.

        Raises:
            ValueError: The numbers in `open` do not increase, or one is negative or not less than `next`.
        """
        runs: list[int] = []
        end = 0  # of the last run
        for number in open:
            if not end <= number < next:
                raise ValueError(f"open has {number}: expected increasing numbers from 0 to less than {next}")
            if runs and number == end:
                runs[-1] += 1
            else:
                runs += [number - end, 1]
            end = number + 1
        return cls(fingerprint, next, tuple(runs))

    def is_valid(self, total: int) -> bool:
        """Return whether this is a position in `total` shards. At most 1,000,000 before `next` may be not done."""
        is_positive = all(length >= (1 if index else 0) for index, length in enumerate(self.runs))
        num_open = sum(self.runs[1::2])
        return is_positive and sum(self.runs) <= self.next and 0 <= self.next <= total and num_open <= _MAX_OPEN

    @property
    def num_bytes(self) -> int:
        """The size in bytes of `runs` in a message, where it is JSON."""
        return sum(len(str(length)) + 1 for length in self.runs)

    def open(self) -> list[int]:
        """Return the numbers of the shards before `next` that are not done."""
        numbers: list[int] = []
        start = 0
        for done, count in zip(self.runs[::2], self.runs[1::2], strict=False):
            numbers.extend(range(start + done, start + done + count))
            start += done + count
        return numbers
