"""`evaluate_checkpoints()`: an evaluator follows the checkpoints of a job, beside its cluster, to the last one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.script_api import find_script_channel, report, should_stop
from tf4slurm.server_dictionary import current_server_dictionary

logger = logging.getLogger(__name__)


def evaluate_checkpoints(
    directory: str | os.PathLike[str],
    evaluate: Callable[[str], Mapping[str, float] | None],
    *,
    look_seconds: float = 1.0,
) -> None:
    """In an evaluator, evaluate each new checkpoint until training is over, and exit; in another task return at once.

    It evaluates the newest that it has not evaluated yet, so that it keeps up where that takes longer than training to
    the next. The last one is always evaluated: once the job says that training is over, it looks once more. Started
    again after its death, it begins with the newest.

    The job waits for it after the chief's end, for `tf4slurm run --finish-timeout` seconds. It ends it without waiting
    when it was asked to stop.

    Args:
        directory: Where tf.train.CheckpointManager, or tf4slurm.tensorflow.Checkpoints, writes.
        evaluate: Gets a checkpoint's path, for tf.train.Checkpoint(…).read. What it returns, such as
            {"accuracy": 0.97}, is reported to the job. Let it make its model outside of any strategy. If it fails
            because the checkpoint was deleted meanwhile, the next is taken.
        look_seconds: How often it looks for a new one.

    Raises:
        SystemExit: With 0, when all is evaluated.
        SlurmEnvironmentError: This process knows of no cluster.
        RendezvousConnectionError: Nobody can tell this evaluator when training is over, or its agent is gone.
    """
    own = current_server_dictionary()
    if own.task_type != "evaluator":
        return
    line = find_script_channel()
    if line is None:
        raise RendezvousConnectionError(
            "Nobody can tell this evaluator when training is over: it has no agent. Start the script with "
            '"tf4slurm run --evaluators 1", or under srun call tf4slurm.get_server_dictionary() first.',
            address="",
        )
    evaluated: str | None = None
    while not should_stop():
        is_over = line.wait_until(lambda: line.desired.is_finishing or line.desired.is_training_over, look_seconds)
        newest: str | None = tf.train.latest_checkpoint(os.fspath(directory))
        if newest is not None and newest != evaluated:
            figures = _evaluate(evaluate, newest)
            report(step=None, **{name: figures[name] for name in figures if name != "step"})
            evaluated = newest
        elif is_over:
            break
    raise SystemExit(0)


def _evaluate(evaluate: Callable[[str], Mapping[str, float] | None], checkpoint: str) -> Mapping[str, float]:
    try:
        return evaluate(checkpoint) or {}
    except Exception:
        if tf.io.gfile.exists(f"{checkpoint}.index"):
            raise
        logger.warning("%s was deleted while it was evaluated: the next one is taken", checkpoint)
        return {}
