# ruff: noqa: E402, UP031
# mypy: ignore-errors
"""A script for tf4slurm before 0.1: synchronous training. Only its import of TensorFlow is new."""

import argparse

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

from tf4slurm import DistributedTFQueueHook
from tf4slurm.ServerDictionary import GetServerDictionary

parser = argparse.ArgumentParser()
parser.add_argument("-ps", type=int, default=1)
parser.add_argument("-workers", type=int, default=1)
parser.add_argument("-steps", type=int, default=100)
args = parser.parse_args()

cluster, job_name, task_index = GetServerDictionary(["ps"] * args.ps + ["worker"] * args.workers)
server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)

if job_name == "ps":
    queue = DistributedTFQueueHook.create_done_queue(task_index, args.workers)
    session = tf.Session(server.target)
    for i in range(args.workers):
        session.run(queue.dequeue())
        print("ps %d received done %d" % (task_index, i), flush=True)
else:
    is_chief = task_index == 0
    with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:%d" % task_index, cluster=cluster)):
        x = tf.random_uniform([32, 1])
        weight = tf.get_variable("weight", [1, 1])
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 3.0 * x))
        global_step = tf.train.get_or_create_global_step()
        optimizer = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(0.1),
            replicas_to_aggregate=args.workers,
            total_num_replicas=args.workers,
        )
        train_op = optimizer.minimize(loss, global_step=global_step)

    hooks = [
        optimizer.make_session_run_hook(is_chief, num_tokens=0),
        DistributedTFQueueHook.QueueManagementHook(NumberOfPS=args.ps, NumberOfWorkers=args.workers),
        tf.train.StopAtStepHook(last_step=args.steps),
    ]
    with tf.train.MonitoredTrainingSession(master=server.target, is_chief=is_chief, hooks=hooks) as session:
        while not session.should_stop():
            value, step = session.run([loss, global_step, train_op])[:2]
    print("worker %d stopped at step %d" % (task_index, step), flush=True)
