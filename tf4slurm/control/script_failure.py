"""What ended a script that failed: an exception, a signal or an exit code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScriptFailure:
    """What ended a script that failed, as the script's output shows it.

    Attributes:
        type: The type of the exception, such as "ValueError", without its module. For a script that ended without an
            exception it is the name of a signal, such as "SIGSEGV", or the exit code, such as "exit code 3".
        message: The message of the exception in one line. Without an exception, it is what the process printed last,
            or why it was killed. A long message is shortened in the middle.
        file: The file of the user's code that raised the exception, relative to the working directory of the script if
            it is below. None if the output names no file.
        line: The line in `file`.
        task: The task whose process failed. Empty in a message, because its sender is that task.
        worker: The task on which a closure of the chief, or an operation of a session, has failed. None if it is the
            same as `task`, or unknown.
        ran_in_task: Whether the process of `task` ran the Python function that failed, for a closure of `worker`.
            TensorFlow calls a function given to tf.py_function or from_generator in the process that has defined it,
            also for the dataset of a worker.
        caused_by: Type and message of the exception that is the direct cause of this one (`raise … from …`), or empty.
    """

    type: str = ""
    message: str = ""
    file: str | None = None
    line: int | None = None
    task: str = ""
    worker: str | None = None
    ran_in_task: bool = False
    caused_by: str = ""

    def has_same_place(self, other: ScriptFailure) -> bool:
        """Return whether `other` is an exception of the same type on the same line. The messages may differ."""
        return self.line is not None and (self.type, self.file, self.line) == (other.type, other.file, other.line)

    def headline(self, *, with_task: bool = True) -> str:
        """Return the failure in one line, such as "ValueError: bad rate (train.py:12, worker/1)".

        A Python function that ran for a worker ends with "(train.py:12, chief/0 for worker/1)". With
        `with_task=False`, the task is left out, but not the worker of a closure.
        """
        text = f"{self.type}: {self.message}" if self.message else self.type
        cause = self.caused_by.partition(": ")[2]
        if self.caused_by and not (cause and cause in self.message):
            text = f"{text.removesuffix('.')}, because of {self.caused_by}"
        task = self.task if with_task else ""
        if self.worker is not None:
            task = f"{task} for {self.worker}".lstrip() if self.ran_in_task else self.worker
        places = [f"{self.file}:{self.line}" if self.line else self.file, task]
        found = ", ".join(place for place in places if place)
        return f"{text} ({found})" if found else text
