# ruff: noqa: UP031
"""Tutorial 10, step 2: tf4slurm gives the cluster spec, and lets the ps exit when the workers have finished.

tf4slurm run --no-chief --ps 1 --workers 2 -- python modernize_2_cluster_spec.py
srun -n 3 python modernize_2_cluster_spec.py
"""

import argparse
import time

import digits
import numpy as np
import tensorflow.compat.v1 as tf

import tf4slurm
from tf4slurm.tensorflow import DoneHook, StartBarrierHook

tf.disable_v2_behavior()
parser = argparse.ArgumentParser()
parser.add_argument("--ps", type=int, default=1)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=1500, help="steps of all workers together")
FLAGS = parser.parse_args()

cluster, job_name, task_index = tf4slurm.get_server_dictionary({"ps": FLAGS.ps, "worker": FLAGS.workers})
server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)

if job_name == "ps":
    tf4slurm.shutdown.serve_until_done(server)
    raise SystemExit

data = digits.load()
with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:%d" % task_index, cluster=cluster)):
    images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf.placeholder(tf.int64, [None])
    first = tf.get_variable("first", [64, 128], initializer=tf.glorot_uniform_initializer(seed=0))
    first_bias = tf.get_variable("first_bias", [128], initializer=tf.zeros_initializer())
    last = tf.get_variable("last", [128, 10], initializer=tf.glorot_uniform_initializer(seed=0))
    last_bias = tf.get_variable("last_bias", [10], initializer=tf.zeros_initializer())
    hidden = tf.nn.relu(tf.matmul(tf.reshape(images, [-1, 64]), first) + first_bias)
    logits = tf.matmul(hidden, last) + last_bias
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
    global_step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdamOptimizer(0.003).minimize(loss, global_step=global_step)


class PrintAccuracy(tf.train.SessionRunHook):
    def end(self, session):
        values = session.run([global_step, accuracy], {images: data.test_images, labels: data.test_labels})
        print("step %d, test accuracy: %.4f" % tuple(values), flush=True)


hooks = [DoneHook(), StartBarrierHook(), tf.train.StopAtStepHook(last_step=FLAGS.steps)]
if task_index == 0:
    hooks.append(PrintAccuracy())
config = tf.ConfigProto(device_filters=["/job:ps", "/job:worker/task:%d" % task_index])
random = np.random.RandomState(task_index)
started, steps = time.time(), 0
with tf.train.MonitoredTrainingSession(server.target, task_index == 0, hooks=hooks, config=config) as session:
    while not session.should_stop():
        chosen = random.randint(len(data.train_labels), size=64)
        session.run(train_op, {images: data.train_images[chosen], labels: data.train_labels[chosen]})
        steps += 1
print("made %d steps, %.0f a second" % (steps, steps / (time.time() - started)), flush=True)
