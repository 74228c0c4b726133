"""`DoneQueues`: a queue on each ps in which every other task leaves a number when it is done."""

from __future__ import annotations

from tf4slurm.cluster import Task
from tf4slurm.completion_signal import CompletionSignal, completion_signal
from tf4slurm.errors import ShutdownError
from tf4slurm.script_api import find_script_channel
from tf4slurm.server_dictionary import ServerDictionary
from tf4slurm.tensorflow.queues import PsQueue


class DoneQueues:
    """The done queues of one cluster, as one of its tasks uses them.

    The number is the task's place among all that train, from 1; negative if it failed. The names and sizes of the
    queues are those that scripts for the old `create_done_queue` read.
    """

    def __init__(self, own: ServerDictionary) -> None:
        self._own = own
        self._queues = [
            PsQueue(address, index, done_queue_name(index), len(own.training_tasks))
            for index, address in enumerate(own.ps_addresses)
        ]

    def signal(self, failed: bool) -> None:
        """Tell every ps that this task is done. It takes 5 s for each ps that is gone.

        Raises:
            ShutdownError: A ps did not take it; all have been tried.
        """
        if self._own.task not in self._own.training_tasks:  # an evaluator is outside the cluster, and not waited for
            return
        number = self._own.training_tasks.index(self._own.task) + 1
        errors = []
        for queue in self._queues:
            try:
                queue.put(-number if failed else number)
            except ShutdownError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def take(self, timeout_seconds: float | None) -> tuple[Task, bool]:
        """Wait on this ps for the next signal; return whose it is, and whether it failed.

        Raises:
            TimeoutError: None came within the time.
            ShutdownError: The queue holds what no task of this cluster puts there.
        """
        number = self._queues[self._own.task_index].take(timeout_seconds)
        if not 0 < abs(number) <= len(self._own.training_tasks):
            raise ShutdownError(
                f"The done queue holds {number}, but the cluster has {len(self._own.training_tasks)} tasks that train. "
                "Give every process the same cluster."
            )
        return self._own.training_tasks[abs(number) - 1], number < 0


def done_queue_name(ps_index: int) -> str:
    """Return the name by which the done queue of a ps is shared."""
    return f"done_queue{ps_index}"


def done_word(own: ServerDictionary) -> CompletionSignal:
    """Return the one word by which this process tells all ps that it is done, for all who may say it."""
    queues = DoneQueues(own)

    def tell(failed: bool) -> None:
        try:
            queues.signal(failed)
        finally:  # only now: a ps that waits for the control service's word leaves at once, and takes no signal then
            line = find_script_channel()
            if line is not None:
                line.say(completion="failed" if failed else "done")

    return completion_signal(f"queues of {own.task}", tell)
