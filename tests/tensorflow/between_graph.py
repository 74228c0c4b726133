# ruff: noqa: UP031
# mypy: ignore-errors
"""Between-graph replication with the hooks of tf4slurm: worker 0 is the chief if there is none.

--sync         synchronous
--resume DIR   the first attempt does not end by itself; the next makes 100 steps from the checkpoint in DIR
"""

import os
import sys
import time

import tensorflow.compat.v1 as tf

import tf4slurm
from tf4slurm.tensorflow.legacy.hooks import DoneHook, StartBarrierHook

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)
is_synchronous = "--sync" in sys.argv
pause_seconds = 0.01 if is_synchronous else 0.04  # after each step, so that a worker delayed by seconds still runs some
directory = sys.argv[-1] if "--resume" in sys.argv else None
stop = {"last_step": 200}
if directory is not None:
    stop = {"last_step": 10**9} if os.environ["TF4SLURM_ATTEMPT"] == "1" else {"num_steps": 100}
counts = {"ps": 1, "worker": 2} if "--no-chief" in sys.argv else {"chief": 1, "ps": 1, "worker": 1}
cluster, role, index = tf4slurm.get_server_dictionary(counts)
server = tf.train.Server(cluster, job_name=role, task_index=index)
if role == "ps":
    ending = tf4slurm.shutdown.serve_until_done(server)
    print("done:", *ending.done, "failed:", *ending.failed, flush=True)
    sys.exit(1 if ending.failed else 0)

is_chief = role == "chief" or ("chief" not in cluster and index == 0)
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:{role}/task:{index}", cluster=cluster)):
    x = tf.random_uniform([32, 1])
    weight = tf.get_variable("weight", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 3.0 * x))
    global_step = tf.train.get_or_create_global_step()
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    if is_synchronous:
        optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2, total_num_replicas=2)
    train_op = optimizer.minimize(loss, global_step=global_step)

hooks = [DoneHook(), StartBarrierHook(), tf.train.StopAtStepHook(**stop)]
if is_synchronous:
    hooks.insert(0, optimizer.make_session_run_hook(is_chief, num_tokens=0))
steps = 0
with tf.train.MonitoredTrainingSession(
    server.target, is_chief, directory, hooks=hooks, save_checkpoint_steps=50 if directory else None
) as session:
    print(
        "begins at step %d" % session.run_step_fn(lambda step_context: step_context.session.run(global_step)),
        flush=True,
    )
    while not session.should_stop():
        value, last, _ = session.run([loss, global_step, train_op])
        steps += 1
        time.sleep(pause_seconds)
        stopped = time.monotonic()
print("loss %.4f after %d steps; closed in %.1f s" % (value, steps, time.monotonic() - stopped), flush=True)
