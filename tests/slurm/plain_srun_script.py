"""A script under plain srun that waits for the end of training in one of several ways: WAY DIRECTORY ROLE...

At each of MOMENTS a task writes its node, its process id and that of its sidecar or agent to DIRECTORY/TASK.MOMENT, and
waits while DIRECTORY/hold.TASK.MOMENT exists. Training lasts until DIRECTORY/end exists. SIGUSR1 raises an exception.

The ways: "barrier", "queue", "serve" and "old" wait for completion signals, by tf4slurm.shutdown or the old package's
names; in "saving" the workers train until they are asked to stop; in "join" the ps call server.join(); in "strategy"
all but the chief do; in "sleep" the ps sleep, without TensorFlow.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import tf4slurm
from tf4slurm import server_dictionary
from tf4slurm.shutdown import done_at_end, serve_until_done, wait_for_workers

MOMENTS = ("start", "formed", "training", "step", "end")


def main(way: str, directory: Path, roles: list[str]) -> None:
    signal.signal(signal.SIGUSR1, fail)
    rank = int(os.environ["SLURM_PROCID"])
    name = f"{roles[rank]}-{roles[:rank].count(roles[rank])}"
    reach("start", name, directory)
    timeout_seconds = float(os.environ.get("TIMEOUT_SECONDS", "300"))
    current = tf4slurm.get_server_dictionary(roles, timeout_seconds=timeout_seconds, ps_exit_seconds=3)
    reach("formed", name, directory)
    server: Any = None if way in ("barrier", "saving", "sleep") else start_server(current)
    reach("training", name, directory)
    if current.task_type == "ps":
        serve(way, server, current)
    elif way == "strategy" and current.task_type == "worker":
        server.join()
    else:
        train(way, server, current, directory)
    reach("end", name, directory)
    print(current.task, "returns", flush=True)


def fail(*_: object) -> None:
    raise RuntimeError("the test asked for this")


def reach(moment: str, name: str, directory: Path) -> None:
    companion = server_dictionary._sidecars[0].pid if server_dictionary._sidecars else os.getppid()
    draft = directory / f"draft.{name}"
    draft.write_text(f"{os.environ['SLURMD_NODENAME']} {os.getpid()} {companion}")
    draft.rename(directory / f"{name}.{moment}")
    while (directory / f"hold.{name}.{moment}").exists():
        time.sleep(0.02)


def start_server(current: Any) -> Any:
    import tensorflow as tf

    return tf.distribute.Server(current.cluster, current.task_type, current.task_index)


def serve(way: str, server: Any, current: Any) -> None:
    if way == "sleep":
        time.sleep(1000)
    elif way in ("barrier", "queue", "saving", "serve"):
        method = "queue" if way == "queue" else "barrier"
        ending = serve_until_done(server) if way == "serve" else wait_for_workers(method=method)
        print(current.task, "done", *ending.done, "failed", *ending.failed, flush=True)
    elif way == "old":
        import tensorflow.compat.v1 as tf

        from tf4slurm import DistributedTFQueueHook

        tf.disable_eager_execution()
        number = len(current.training_tasks)
        queue = DistributedTFQueueHook.create_done_queue(current.task_index, number)
        with tf.Session(server.target) as session:
            for _ in range(number):
                session.run(queue.dequeue())
    else:
        server.join()


def train(way: str, server: Any, current: Any, directory: Path) -> None:
    if way in ("barrier", "queue", "serve"):
        with done_at_end(method="queue" if way == "queue" else "barrier"):
            wait_for_end(directory, current)
    elif way == "saving":
        with done_at_end():
            tf4slurm.should_stop()
            reach("step", f"{current.task_type}-{current.task_index}", directory)
            while not tf4slurm.should_stop():
                time.sleep(0.05)
            print(current.task, "saves", flush=True)
    elif way == "old":
        import tensorflow.compat.v1 as tf

        from tf4slurm import DistributedTFQueueHook

        tf.disable_eager_execution()
        device = f"/job:worker/task:{current.task_index}"
        with tf.device(tf.train.replica_device_setter(worker_device=device, cluster=current.cluster)):
            step = tf.assign_add(tf.train.get_or_create_global_step(), 1)
        hooks = [DistributedTFQueueHook.QueueManagementHook()]
        config = tf.ConfigProto(device_filters=["/job:ps", device])
        with tf.train.MonitoredTrainingSession(server.target, current.is_chief, hooks=hooks, config=config) as session:
            wait_for_end(directory, current, lambda: session.run(step))
    elif way == "strategy":
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(current.cluster), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            total = tf.Variable(0.0)
        function = tf.function(lambda: total.assign_add(1.0))

        def step() -> None:
            coordinator.schedule(function)
            coordinator.join()  # not fetch(), which raises an error if the worker is killed after its closure

        wait_for_end(directory, current, step)
    else:
        wait_for_end(directory, current)


def wait_for_end(directory: Path, current: Any, step: Any = lambda: None) -> None:
    step()
    reach("step", f"{current.task_type}-{current.task_index}", directory)
    while not (directory / "end").exists():
        step()
        time.sleep(0.05)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
