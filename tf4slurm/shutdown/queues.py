"""`QueueMethod`: the workers tell each ps through a TensorFlow queue on it. Needs nothing but TensorFlow's servers."""

from __future__ import annotations

import time

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.completion_signal import CompletionSignal
from tf4slurm.errors import ShutdownTimeoutError
from tf4slurm.server_dictionary import ServerDictionary
from tf4slurm.shutdown.method import Ending

_REPLY_SECONDS = 0.2
"""How long a ps stays after the last signal. One that leaves at once takes the reply with it (seen: 6 of 8 times), and
the worker waits 5 s for that. 0.01 s is what the exchange takes."""


class QueueMethod:
    """A `ShutdownMethod`. A worker that is killed leaves nothing in a queue: only a timeout ends the wait for it."""

    def __init__(self, own: ServerDictionary) -> None:
        self._own = own

    def wait_for_workers(self, timeout_seconds: float | None) -> Ending:
        from tf4slurm.tensorflow.done import DoneQueues

        queues = DoneQueues(self._own)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        has_failed: dict[Task, bool] = {}
        while missing := [task for task in self._own.training_tasks if task not in has_failed]:
            try:
                task, failed = queues.take(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise ShutdownTimeoutError(
                    f"{format_tasks(missing)} did not signal within {timeout_seconds} s that training is over. Look at "
                    "their logs, or raise timeout_seconds.",
                    missing=[str(task) for task in missing],
                    seconds=timeout_seconds or 0.0,
                ) from None
            has_failed[task] = failed
        time.sleep(_REPLY_SECONDS)
        tasks = self._own.training_tasks
        return Ending(
            done=tuple(task for task in tasks if not has_failed[task]),
            failed=tuple(task for task in tasks if has_failed[task]),
        )

    def completion_signal(self) -> CompletionSignal:
        from tf4slurm.tensorflow.done import done_word

        return done_word(self._own)
