"""What a worker or a chief does: tell every ps that it is done, or that it failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tf4slurm.completion_signal import CompletionSignal
from tf4slurm.errors import ShutdownError
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.shutdown.choice import choose_method


def signal_done(
    failed: bool = False,
    *,
    method: str = "barrier",
    cluster: Mapping[str, Sequence[str]] | None = None,
    task_type: str | None = None,
    task_index: int | None = None,
) -> None:
    """Tell every ps that this worker needs it no more. The first signal of a process counts, others do nothing.

    Args:
        failed: Whether it did not do what it was to do.
        method: As the ps waits, see `wait_for_workers`; there also for the rest. An evaluator, which is not in the
            cluster, signals nothing.
        cluster: The addresses of each role.
        task_type: The role of this process.
        task_index: Its index in its role.

    Raises:
        ShutdownError: A ps does not answer, or this process is a ps.
        SlurmEnvironmentError: No cluster is given or known.
        ValueError: There is no such method, or `cluster` is given in part.
    """
    _completion_signal(method, cluster, task_type, task_index).say(failed)


@contextmanager
def done_at_end(
    *,
    method: str = "barrier",
    cluster: Mapping[str, Sequence[str]] | None = None,
    task_type: str | None = None,
    task_index: int | None = None,
) -> Iterator[None]:
    """Signal at the end of the block: failed where it raises, or exits with a code other than 0. See `signal_done`."""
    word = _completion_signal(method, cluster, task_type, task_index)
    try:
        yield
    except SystemExit as exit_:
        word.say(failed=exit_.code not in (None, 0))
        raise
    except BaseException:
        word.say(failed=True)
        raise
    word.say()


def signal_at_exit(
    *,
    method: str = "barrier",
    cluster: Mapping[str, Sequence[str]] | None = None,
    task_type: str | None = None,
    task_index: int | None = None,
) -> None:
    """From now on signal when this process exits: failed where an exception ends it, done otherwise. See `signal_done`.

    sys.exit() counts as done, whatever its code. A process that is killed signals nothing.
    """
    _completion_signal(method, cluster, task_type, task_index).say_at_exit()


def _completion_signal(
    method: str, cluster: Mapping[str, Sequence[str]] | None, task_type: str | None, task_index: int | None
) -> CompletionSignal:
    own = current_server_dictionary(cluster, task_type, task_index)
    if own.task_type == "ps":
        raise ShutdownError(f"{own.task} is a ps: it waits for signals, and sends none. Call wait_for_workers() there.")
    return choose_method(method, own).completion_signal()
