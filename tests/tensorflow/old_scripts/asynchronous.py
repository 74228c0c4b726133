# ruff: noqa: E402, UP031
# mypy: ignore-errors
"""A script for tf4slurm before 0.1: asynchronous training. Only its import of TensorFlow is new."""

import argparse

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

import tf4slurm.DistributedTFQueueHook
import tf4slurm.ServerDictionary

parser = argparse.ArgumentParser()
parser.add_argument("-ps", type=int, default=1)
parser.add_argument("-workers", type=int, default=1)
parser.add_argument("-steps", type=int, default=200)
args = parser.parse_args()

tasks = ["ps"] * args.ps + ["worker"] * args.workers
cluster, job_name, task_index = tf4slurm.ServerDictionary.GetServerDictionary(tasks)
server = tf.train.Server(tf.train.ClusterSpec(cluster), job_name=job_name, task_index=task_index)

if job_name == "ps":
    queue = tf4slurm.DistributedTFQueueHook.create_done_queue(task_index, args.workers)
    session = tf.Session(server.target)
    for i in range(args.workers):
        session.run(queue.dequeue())
        print("ps %d received done %d" % (task_index, i), flush=True)
else:
    is_chief = task_index == 0
    with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:%d" % task_index, cluster=cluster)):
        x = tf.random_uniform([32, 1])
        weight = tf.get_variable("weight", [1, 1])
        bias = tf.get_variable("bias", [1])
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) + bias - (3.0 * x + 1.0)))
        global_step = tf.train.get_or_create_global_step()
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=global_step)

    hooks = [
        tf4slurm.DistributedTFQueueHook.QueueManagementHook(NumberOfPS=args.ps, NumberOfWorkers=args.workers),
        tf.train.StopAtStepHook(last_step=args.steps),
    ]
    steps = 0
    with tf.train.MonitoredTrainingSession(master=server.target, is_chief=is_chief, hooks=hooks) as session:
        while not session.should_stop():
            value, step = session.run([loss, global_step, train_op])[:2]
            steps += 1
    print("worker %d made %d steps" % (task_index, steps), flush=True)
