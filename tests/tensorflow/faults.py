"""Random faults of repeated calls, for tests: interrupts, failing steps, time-outs and killed workers."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import tensorflow as tf

import tf4slurm
from tests.tensorflow.elastic_cluster import ElasticCluster
from tf4slurm.errors import TrainingTimeoutError
from tf4slurm.tensorflow import closures

MOST_CALLS = 25
_HELD_SECONDS = 2.5  # longer than the time-out; what the chief evaluates itself has none
_ERRORS: dict[str, type[BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "interrupts": KeyboardInterrupt,
    "failure": tf.errors.InvalidArgumentError,
    "timeout": TrainingTimeoutError,
}
_PACKAGE = os.path.dirname(tf4slurm.__file__)
_TRACING = "/func_graph.py"
"""TensorFlow's tracing cannot be interrupted: later ones in the thread may fail with "Concurrent access?"."""


class Faults:
    """Faults at random moments, of which the calls of one scenario have at most some.

    Attributes:
        calls: The calls so far.
        count: The faults so far.
        kills: The killed workers so far.
    """

    def __init__(self, cluster: ElasticCluster, chance: random.Random) -> None:
        self.chance = chance
        self.count = self.kills = self.calls = 0
        self._cluster = cluster
        self._left = chance.randint(2, 5)
        self._interrupts = 0
        self._threads: list[threading.Timer] = []
        with cluster.strategy.scope():
            self._failures = tf.Variable(0)
            self._is_held = tf.Variable(False)
        closures._STOP_SECONDS = chance.choice([0.1, 1.0, 10.0])  # with a short wait, closures remain after a call
        signal.signal(signal.SIGALRM, self._interrupt)

    def disturb(self) -> tf.Operation:
        """Return an operation of a step, which fails or does not end during a fault.

        It needs no Python: a numpy_function runs in the chief, where threads that wait for TensorFlow may block it.
        """
        with tf.control_dependencies([tf.debugging.assert_equal(self._failures, 0, "failure")]):
            return tf.while_loop(lambda _: self._is_held.read_value(), lambda turn: [turn + 1], [tf.constant(0)])[0].op

    def repeat(self, call: Callable[[float], Any]) -> Any:
        """Call `call(timeout_seconds)` until it returns; return its result."""
        for _ in range(MOST_CALLS):
            try:
                return self._call(call)
            except tuple(_ERRORS.values()) as error:
                print(f"{type(error).__name__}: {str(error)[:80]!r}", flush=True)
        raise AssertionError("too many calls")

    def hang(self, call: Callable[[float], Any]) -> None:
        """Let a call time out that has closures which would never end."""
        self._is_held.assign(True)
        try:
            call(1.0)
        except TrainingTimeoutError:
            return
        raise AssertionError("no time-out")

    def _call(self, call: Callable[[float], Any]) -> Any:
        kind = self.chance.choice((*_ERRORS, "kill")) if self._left else ""
        self._left = max(self._left - 1, 0)
        print(kind or "no fault", flush=True)
        self.calls += 1
        delay = self.chance.expovariate(4.0)
        try:
            if kind in ("interrupt", "interrupts"):
                self._interrupts = 1 if kind == "interrupt" else self.chance.randint(2, 4)
                signal.setitimer(signal.ITIMER_REAL, delay, 0.03)
            elif kind:
                if kind == "timeout":
                    self._is_held.assign(True)
                    delay = _HELD_SECONDS
                action = {"failure": self._fail, "kill": self._kill, "timeout": self._release}[kind]
                self._threads.append(threading.Timer(delay, action))
                self._threads[-1].start()
            return call(1.0 if kind == "timeout" else 90.0)
        except tuple(_ERRORS.values()) as error:
            if not isinstance(error, _ERRORS.get(kind, ())):
                raise AssertionError(kind) from error
            self.count += 1
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            while self._threads:
                self._threads[-1].cancel()
                self._threads.pop().join()
            self._failures.assign(0)
            self._release()

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, but only in a call of the package, and not while TensorFlow traces a function."""
        frames = []
        while frame is not None:
            frames.append(frame.f_code.co_filename)
            frame = frame.f_back
        is_tracing = any(name.endswith(_TRACING) for name in frames)
        if self._interrupts and not is_tracing and any(name.startswith(_PACKAGE) for name in frames):
            self._interrupts -= 1
            raise KeyboardInterrupt(frames[0])

    def _fail(self) -> None:
        self._failures.assign(1)

    def _release(self) -> None:
        self._is_held.assign(False)

    def _kill(self) -> None:
        """Kill a worker and start it again, at the same address."""
        index = self.chance.choice(sorted(self._cluster.wanted))
        self.count += 1
        self.kills += 1
        self._cluster.kill(index)
        self._cluster.start(index)
