"""A training by `run_steps` for tests: python training.py CHECKPOINTS STEPS EVERY_STEPS

Each step adds 1, computed on the worker, to a weight, so that the weight counts the applied steps. The chief prints
the restored step and the result as JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from tf4slurm.tensorflow import Checkpoints, run_steps


def main(directory: str, steps: int, every_steps: int) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()
    tf.get_logger().setLevel("ERROR")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoints = Checkpoints(directory, step=step, every_steps=every_steps, keep=100, weight=weight)
    print("restored", checkpoints.restored, int(step.numpy()), float(weight.numpy()), flush=True)

    def step_fn() -> None:
        numbers = tf.random.uniform((200, 200))
        weight.assign_add(tf.cast(tf.reduce_min(numbers @ numbers) >= 0.0, tf.float32))

    done = run_steps(coordinator, step_fn, steps, checkpoints=checkpoints)
    print("done", json.dumps({**done._asdict(), "steps": done.steps, "weight": float(weight.numpy())}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
