"""Place variables on the ps by bytes (`place_variables`), and report the bytes of each ps to the job.

TensorFlow places variables on the ps in turns. Kernels and biases alternate, so one of two ps would hold nearly all
bytes. TensorFlow has no public option for this.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf4slurm.scripts.channel import ScriptChannel

_PLACEMENTS = ("bytes", "round-robin")
_PRIVATE_NAMES = ("_create_variable", "_create_var_creator", "_create_variable_round_robin", "_variable_count")
_REPORT_SECONDS = 0.5  # delay, so that one report covers many new variables
_parts: contextvars.ContextVar[collections.Counter[int] | None] = contextvars.ContextVar("parts", default=None)
"""By ps, the number of variables that the current block of `on_different_ps` has created. None outside of a block."""


def check_placement(placement: str) -> None:
    """Raise ValueError if `placement` is unknown."""
    if placement not in _PLACEMENTS:
        raise ValueError(f"Unknown placement {placement!r}: expected one of {', '.join(map(repr, _PLACEMENTS))}.")


def place_variables(strategy: Any, placement: str, num_ps: int, channel: ScriptChannel | None) -> None:
    """Let a new ParameterServerStrategy place its variables by `placement`, and report the bytes on each ps.

    If TensorFlow's version lacks the private methods that this function replaces, do nothing: TensorFlow places the
    variables in turns.

    Args:
        placement: "bytes" puts a variable on the ps with the fewest bytes. "round-robin" takes turns, as TensorFlow.
        channel: The connection to the agent, which gets the reports, or None to report nothing.
    """
    if all(hasattr(strategy.extended, name) for name in _PRIVATE_NAMES):
        _Placement(strategy.extended, placement, num_ps, channel)


@contextlib.contextmanager
def on_different_ps() -> Iterator[None]:
    """Place the variables that the block creates on different ps, if the strategy's `placement` is "bytes".

    If there are more variables than ps, the numbers of variables on any two ps differ by at most 1. The variables of a
    nested block count for the outer block.
    """
    if _parts.get() is not None:
        yield
        return
    token = _parts.set(collections.Counter())
    try:
        yield
    finally:
        _parts.reset(token)


class _Placement:
    """Counts the bytes of the variables on each ps. Replaces the methods of a strategy that create variables."""

    def __init__(self, extended: Any, placement: str, num_ps: int, channel: ScriptChannel | None) -> None:
        self._extended = extended
        self._channel = channel
        self._bytes = [0] * num_ps
        self._num_variables = [0] * num_ps
        self._deleted: collections.deque[tuple[int, int]] = collections.deque()  # needs no lock in a finalizer
        self._lock = threading.Lock()
        self._is_report_due = False
        self._create_creator = extended._create_var_creator
        extended._create_var_creator = self._make_counting_creator
        if placement == "bytes":
            self._create = extended._create_variable
            self._create_in_turn = extended._create_variable_round_robin
            extended._create_variable = self._create_apart
            extended._create_variable_round_robin = self._create_on_emptiest

    def _create_apart(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        """Create a variable. With a partitioner, put its parts on different ps."""
        with on_different_ps():
            return self._create(next_creator, **options)

    def _create_on_emptiest(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        self._remove_deleted()
        parts = _parts.get()
        ps = range(len(self._bytes))
        assert parts is not None  # TensorFlow's method, which calls this one, is called only by `_create_apart`
        chosen = min(ps, key=lambda index: (parts[index], self._bytes[index], self._num_variables[index]))
        parts[chosen] += 1
        self._extended._variable_count = chosen  # TensorFlow's method takes it modulo the number of ps
        return self._create_in_turn(next_creator, **options)

    def _make_counting_creator(self, next_creator: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        create = self._create_creator(next_creator, **options)

        def create_and_count(**options: Any) -> Any:
            variable = create(**options)
            self._count(variable)
            return variable

        return create_and_count

    def _count(self, variable: Any) -> None:
        device = tf.DeviceSpec.from_string(variable.device)
        if device.job != "ps":
            return
        num_bytes = (variable.shape.num_elements() or 0) * variable.dtype.size
        with self._lock:
            self._bytes[device.task] += num_bytes
            self._num_variables[device.task] += 1
            is_first = not self._is_report_due
            self._is_report_due = True
        weakref.finalize(variable, self._deleted.append, (device.task, num_bytes)).atexit = False
        if is_first and self._channel is not None:
            timer = threading.Timer(_REPORT_SECONDS, self._report, (self._channel,))
            timer.daemon = True
            timer.start()

    def _remove_deleted(self) -> None:
        with self._lock:
            while self._deleted:
                index, num_bytes = self._deleted.popleft()
                self._bytes[index] -= num_bytes
                self._num_variables[index] -= 1

    def _report(self, channel: ScriptChannel) -> None:
        self._remove_deleted()
        with self._lock:
            self._is_report_due = False
            found = tuple(self._bytes)
        channel.send(ps_bytes=found)
