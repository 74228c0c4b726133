# mypy: ignore-errors
"""Between-graph training after TensorFlow 1's mnist_replica: configured by flags; its ps call join() for ever."""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
parser = argparse.ArgumentParser()
parser.add_argument("--ps_hosts")
parser.add_argument("--worker_hosts")
parser.add_argument("--job_name")
parser.add_argument("--task_index", type=int)
parser.add_argument("--sync_replicas", action="store_true")
parser.add_argument("--train_steps", type=int, default=60)
flags = parser.parse_args()

workers = flags.worker_hosts.split(",")
cluster = tf.train.ClusterSpec({"ps": flags.ps_hosts.split(","), "worker": workers})
server = tf.train.Server(cluster, job_name=flags.job_name, task_index=flags.task_index)
if flags.job_name == "ps":
    server.join()

is_chief = flags.task_index == 0
with tf.device(
    tf.train.replica_device_setter(
        worker_device=f"/job:worker/task:{flags.task_index}", ps_device="/job:ps", cluster=cluster
    )
):
    global_step = tf.Variable(0, name="global_step", trainable=False)
    images, labels = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int64, [None])
    weight = tf.Variable(tf.zeros([784, 10]), name="weight")
    bias = tf.Variable(tf.zeros([10]), name="bias")
    logits = tf.matmul(images, weight) + bias
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    if flags.sync_replicas:
        count = len(workers)
        optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=count, total_num_replicas=count)
    train_step = optimizer.minimize(loss, global_step=global_step)
    ready_for_local_init_op = local_init_op = None
    if flags.sync_replicas:
        local_init_op = optimizer.chief_init_op if is_chief else optimizer.local_step_init_op
        ready_for_local_init_op = optimizer.ready_for_local_init_op
        queue_runner, tokens_op = optimizer.get_chief_queue_runner(), optimizer.get_init_tokens_op(0)
    supervisor = tf.train.Supervisor(
        is_chief=is_chief,
        init_op=tf.global_variables_initializer(),
        local_init_op=local_init_op,
        ready_for_local_init_op=ready_for_local_init_op,
        recovery_wait_secs=1,
        global_step=global_step,
    )

config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{flags.task_index}"])
session = supervisor.prepare_or_wait_for_session(server.target, config=config)
if flags.sync_replicas and is_chief:
    session.run(tokens_op)
    supervisor.start_queue_runners(session, [queue_runner])
rng, step = np.random.default_rng(flags.task_index), 0
while step < flags.train_steps:
    digits = rng.integers(0, 10, 50)
    batch = {images: np.eye(784, dtype=np.float32)[digits], labels: digits}
    _, step, value = session.run([train_step, global_step, loss], batch)
print(f"worker {flags.task_index} trained to step {step}, loss {value:.3f}", flush=True)
