"""A small real training on parameter servers, with misbehaviours on request.

    python train.py DIRECTORY [TASK=MISBEHAVIOUR…]

It writes under DIRECTORY, with times in seconds of the wall clock, which the hosts of the lab share:

    imports      "task attempt seconds time": duration of the import of TensorFlow, and when the task goes on
    steps        "attempt step time": after each batch of closures, by the chief
    saved        the time of the latest save
    checkpoints/ written every tenth turn and at the end; training resumes from them
    faulted      the time of the last misbehaviour of a task

It reads: `finish` ends the training normally; `worker-1.request` makes worker/1 exit with the code in the file.
Each closure prints "ran at MILLISECONDS" in the log of its worker.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tf4slurm

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
_STARTED = time.monotonic()
import tensorflow as tf  # noqa: E402 - at the top of the script, so that a preloader may import it

IMPORT_SECONDS = time.monotonic() - _STARTED
TASK = os.environ.get("TF4SLURM_TASK", "")
ATTEMPT = os.environ.get("TF4SLURM_ATTEMPT", "1")
LATE_SECONDS = 30.0
_TURNS_PER_SAVE = 10
_PAUSE_SECONDS = 0.02


def main(directory: Path, misbehaviour: str) -> None:
    if misbehaviour == "exception at import":
        note_fault(directory)
        importlib.import_module("a_module_that_is_not_there")
    elif misbehaviour == "never serves":
        note_fault(directory)
        threading.Event().wait()
    elif misbehaviour == "starts late":
        time.sleep(LATE_SECONDS)
    elif misbehaviour == "hang in atexit":
        atexit.register(lambda: threading.Event().wait())
        if not TASK.startswith("chief"):  # on termination, exit through the atexit handlers
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    append(directory / "imports", f"{TASK} {ATTEMPT} {IMPORT_SECONDS:.3f} {time.time():.3f}")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "chief":
        run_chief(resolver, directory, uses_tf4slurm=misbehaviour != "does not use tf4slurm")
    else:
        run_server(resolver, directory)


def run_server(resolver: Any, directory: Path) -> None:
    """Run a ps or a worker. The server has its own threads; this one waits for a request to exit."""
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    while server is not None:
        exit_on_request(directory)
        time.sleep(_PAUSE_SECONDS)


def run_chief(resolver: Any, directory: Path, *, uses_tf4slurm: bool) -> None:
    """Run the chief: train until asked to finish or to stop, and save."""
    tf.get_logger().setLevel("ERROR")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    if uses_tf4slurm:
        from tf4slurm.tensorflow.strategy import allow_exit_without_workers

        allow_exit_without_workers(coordinator)
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64)
        weight = tf.Variable(0.0)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=step, weight=weight), str(directory / "checkpoints"), max_to_keep=2
    )
    manager.restore_or_initialize()

    @tf.function  # type: ignore[untyped-decorator]
    def train() -> None:
        weight.assign_add(1.0)
        step.assign_add(1)
        tf.print("ran at", tf.cast(tf.timestamp() * 1000, tf.int64), output_stream=sys.stdout)

    def save() -> None:
        manager.save()
        (directory / "saved").write_text(f"{time.time():.3f}")

    turn = 0
    while not (directory / "finish").exists() and not (uses_tf4slurm and tf4slurm.should_stop()):
        for _ in range(2 * strategy._num_workers):  # two per worker, so that each runs some
            coordinator.schedule(train)
        coordinator.join()
        reached = int(step.numpy())
        append(directory / "steps", f"{ATTEMPT} {reached} {time.time():.3f}")
        if uses_tf4slurm:
            tf4slurm.report(step=reached)
        turn += 1
        if turn % _TURNS_PER_SAVE == 0:
            save()
        exit_on_request(directory)
        time.sleep(_PAUSE_SECONDS)
    save()


def exit_on_request(directory: Path) -> None:
    """Exit at once if requested; a request is carried out once."""
    request = directory / f"{TASK.replace('/', '-')}.request"
    if request.exists():
        code = int(request.read_text())
        request.unlink()
        note_fault(directory)
        os._exit(code)


def note_fault(directory: Path) -> None:
    (directory / "faulted").write_text(f"{time.time():.3f}")


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    _misbehaviours = dict(argument.split("=", 1) for argument in sys.argv[2:])
    main(Path(sys.argv[1]), _misbehaviours.get(TASK, ""))
