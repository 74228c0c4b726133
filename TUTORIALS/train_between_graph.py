"""Train in the way of TensorFlow 1, in which every worker leads itself ("between-graph replication").

    tf4slurm run --no-chief --ps 1 --workers 2 -- python train_between_graph.py
    srun -n3 python train_between_graph.py

Each worker builds the whole graph, keeps its variables on the ps, and steps as fast as it can. Worker 0 initializes the
variables. With `--synchronous` each step uses one batch from every worker.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import digits
import numpy as np
import tensorflow.compat.v1 as tf

import tf4slurm
from tf4slurm.tensorflow import DoneHook, StartBarrierHook

tf.logging.set_verbosity(tf.logging.ERROR)
tf.disable_v2_behavior()

parser = argparse.ArgumentParser()
parser.add_argument("--ps", type=int, default=1)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=600, help="steps of all workers together (default: %(default)s)")
parser.add_argument("--synchronous", action="store_true", help="let each step use one batch from every worker")
parser.add_argument("--num-steps", action="store_true", help="count from the start of each worker: see tutorial 3")
parser.add_argument("--no-barrier", action="store_true", help="do not wait for the other workers at the start")
parser.add_argument("--late", type=float, default=0.0, metavar="SECONDS", help="start the last worker later")
arguments = parser.parse_args()


def variable(name: str, shape: list[int]) -> tf.Variable:
    kind = tf.zeros_initializer() if len(shape) == 1 else tf.glorot_uniform_initializer(seed=0)
    return tf.get_variable(name, shape, initializer=kind)


def make_logits(images: tf.Tensor) -> tf.Tensor:
    """Build the model of digits.make_model from TensorFlow's own operations."""
    x = images
    for name, channels in (("first", 32), ("second", 64)):
        kernel = variable(f"{name}/kernel", [3, 3, int(x.shape[-1]), channels])
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, padding="VALID") + variable(f"{name}/bias", [channels]))
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    x = tf.reshape(x, [-1, math.prod(x.shape.as_list()[1:])])
    return tf.matmul(x, variable("last/kernel", [int(x.shape[-1]), 10])) + variable("last/bias", [10])


class Examine(tf.train.SessionRunHook):
    """Evaluates the model at the end of training, while the session is still open."""

    def end(self, session: tf.Session) -> None:
        right, made = session.run([accuracy, global_step], test)
        print(f"step {made}, test accuracy: {right:.4f}", flush=True)


tasks = {"ps": arguments.ps, "worker": arguments.workers}
cluster, task_type, task_index = tf4slurm.get_server_dictionary(tasks)
server = tf.train.Server(cluster, job_name=task_type, task_index=task_index)

if task_type == "ps":
    sys.exit(1 if tf4slurm.shutdown.serve_until_done(server).failed else 0)  # server.join() would never return

data = digits.load()
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{task_index}", cluster=cluster)):
    images = tf.placeholder(tf.float32, [None, *data.train_images.shape[1:]])
    labels = tf.placeholder(tf.int64, [None])
    logits = make_logits(images)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
    global_step = tf.train.get_or_create_global_step()
    optimizer = tf.train.AdamOptimizer(tf.train.cosine_decay(0.003, global_step, arguments.steps))
    if arguments.synchronous:
        optimizer = tf.train.SyncReplicasOptimizer(
            optimizer, replicas_to_aggregate=arguments.workers, total_num_replicas=arguments.workers
        )
    train_op = optimizer.minimize(loss, global_step=global_step)
test = {images: data.test_images, labels: data.test_labels}

is_leader = task_index == 0
stop = {"num_steps": arguments.steps} if arguments.num_steps else {"last_step": arguments.steps}
hooks = [DoneHook(), tf.train.StopAtStepHook(**stop)]
if not arguments.no_barrier:
    hooks.append(StartBarrierHook())
if arguments.synchronous:
    hooks.append(optimizer.make_session_run_hook(is_leader, num_tokens=0))
if is_leader:
    hooks.append(Examine())
if arguments.late and task_index == arguments.workers - 1:
    time.sleep(arguments.late)

random = np.random.default_rng(task_index)  # each worker draws its own batches
steps = 0
with tf.train.MonitoredTrainingSession(master=server.target, is_chief=is_leader, hooks=hooks) as session:
    started = time.monotonic()
    while not session.should_stop():
        chosen = random.integers(len(data.train_labels), size=64)
        batch = {images: data.train_images[chosen], labels: data.train_labels[chosen]}
        value, step, _ = session.run([loss, global_step, train_op], batch)
        steps += 1
        tf4slurm.report(step=int(step), loss=float(value))
        if is_leader and steps % 10 == 1 and not session.should_stop():
            seconds = time.monotonic() - started
            right = session.run(accuracy, test)
            print(f"second {seconds:.2f} step {step} loss {value:.4f} accuracy {right:.4f}", flush=True)
print(f"made {steps} steps", flush=True)
