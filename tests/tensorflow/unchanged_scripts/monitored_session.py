# mypy: ignore-errors
"""Between-graph training with MonitoredTrainingSession and checkpoints, after TonY's examples. Reads TF_CONFIG only."""

import argparse
import json
import os

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

config = json.loads(os.environ["TF_CONFIG"])
job_name, task_index = config["task"]["type"], config["task"]["index"]
cluster = tf.train.ClusterSpec(config["cluster"])
server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)
if job_name == "ps":
    server.join()
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{task_index}", cluster=cluster)):
    x = tf.random_uniform([32, 1])
    weight = tf.get_variable("weight", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 3.0 * x))
    global_step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=global_step)
with tf.train.MonitoredTrainingSession(
    master=server.target,
    is_chief=task_index == 0,
    config=tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{task_index}"]),
    checkpoint_dir=arguments.directory,
    save_checkpoint_steps=20,
    hooks=[tf.train.StopAtStepHook(last_step=arguments.steps)],
) as session:
    step = session.run(global_step)
    print(f"worker {task_index} begins with step {step}", flush=True)
    while not session.should_stop():
        _, step = session.run([train, global_step])
print(f"worker {task_index} trained to step {step}", flush=True)
