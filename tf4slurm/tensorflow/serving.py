"""A TensorFlow server that ends with the training it serves, where no agent ends it."""

from __future__ import annotations

import atexit
import gc
import os
from typing import NoReturn

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

from tf4slurm.completion_signal import completion_signal
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.script_api import ScriptChannel
from tf4slurm.server_dictionary import ServerDictionary


def serve(own: ServerDictionary, line: ScriptChannel | None) -> NoReturn:
    """Run the TensorFlow server of this task until training is over, then exit: with 1 if it failed, else with 0.

    Without a line to the other tasks the server runs until this process is ended, as by an agent.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # the failure of another server is told to the chief
    server = tf.distribute.Server(own.cluster, job_name=own.task_type, task_index=own.task_index, protocol="grpc")
    if line is None:
        server.join()
        raise AssertionError("a TensorFlow server that was joined does not end")
    if own.task_type == "worker":
        line.say(completion="done")  # it needs nobody: only the chief's end is the end
    try:
        line.wait_until(lambda: line.desired.is_training_over, None)
        leading = ["chief/0"] if "chief" in own.cluster else [str(task) for task in own.training_tasks]
        has_failed = any(task in line.desired.failed_tasks for task in leading)
    except RendezvousConnectionError:  # who hosted the control service is gone
        has_failed = True
    atexit.register(gc.freeze)  # see shutdown/ps.py
    raise SystemExit(1 if has_failed else 0)


def signal_end_at_exit(own: ServerDictionary, line: ScriptChannel) -> None:
    """Signal at this process's exit that its part of training is over, or has failed."""
    completion_signal(
        f"line of {own.task}", lambda failed: line.say(completion="failed" if failed else "done")
    ).say_at_exit()
