# mypy: ignore-errors
"""A TensorFlow 1 script whose sessions have no device_filters. Worker 1 makes its session when worker 0 has exited.

It waits until the file of the first argument exists. Worker 2, if there is one, exits when the file "release" exists.
"""

import json
import os
import sys
import time
from pathlib import Path

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
flag = Path(sys.argv[1])
config = json.loads(os.environ["TF_CONFIG"])
job_name, task_index = config["task"]["type"], config["task"]["index"]
cluster = tf.train.ClusterSpec(config["cluster"])
server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)
if job_name == "ps":
    server.join()
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{task_index}", cluster=cluster)):
    global_step = tf.train.get_or_create_global_step()
    train = tf.assign_add(global_step, 1)


def wait_for(path):
    while not path.exists():
        time.sleep(0.1)


if task_index == 1:
    wait_for(flag)
if task_index == 2:
    wait_for(flag.with_name("release"))
    sys.exit(0)
with tf.train.MonitoredTrainingSession(server.target, is_chief=task_index == 0) as session:
    print(f"worker {task_index} is at step {session.run(train)}", flush=True)
