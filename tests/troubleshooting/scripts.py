"""Mistakes in training scripts that use TensorFlow and Keras."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.troubleshooting.workplace import Producer, Table, Workplace

WITHOUT_PS = """
import socket
import tensorflow.compat.v1 as tf
addresses = []
for _ in range(2):
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses.append(f"127.0.0.1:{server.getsockname()[1]}")
server = tf.train.Server({"ps": addresses[:1], "worker": addresses[1:]}, "worker", 0)
with tf.Graph().as_default(), tf.Session(server.target) as session:
    session.run(tf.constant(1))
"""
WITHOUT_FILTERS = """
import json, os, socket
import tensorflow.compat.v1 as tf
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
server = tf.train.Server(config["cluster"], task["type"], task["index"])
if task["type"] == "ps":
    server.join()
host, _, port = config["cluster"]["worker"][0].rpartition(":")
while task["index"] == 1:  # until worker 0 has exited
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        if os.path.exists("trained"):
            break
with tf.Graph().as_default(), tf.Session(server.target) as session:
    session.run(tf.constant(1))
open("trained", "w").close()
os._exit(0)
"""
VARIABLE_BEFORE_STRATEGY = """
from tests.troubleshooting.mistakes import run_steps, tf, training
weight = tf.Variable(1.0)
training()
run_steps(lambda: weight.assign_add(1.0))
"""


def mistake(name: str) -> Producer:
    return Producer(lambda place: place.mistake(name))


def hanging(script: str, seconds: int) -> Producer:
    """Run a script that never ends for some seconds."""
    environ = {"PYTHONPATH": str(Path(__file__).parents[2])}

    def produce(place: Workplace) -> str:
        return place.shell("timeout", "-k", "1", str(seconds), sys.executable, "-c", script, env=environ)

    return Producer(produce, is_long=True)


SCRIPTS: Table = {
    "Could not start gRPC server": mistake("two_servers_on_one_port"),
    "No address added": mistake("two_servers_on_one_port"),
    'was not defined in job "worker"': mistake("index_out_of_range"),
    "was not defined in cluster": mistake("role_not_in_cluster"),
    "Cluster spec must be non-empty": mistake("no_cluster"),
    "There must be at least one ps": mistake("no_ps"),
    "Disallowed task type": mistake("master_in_cluster"),
    "Expecting property name": mistake("invalid_tf_config"),
    "SLURM_PROCID not found": mistake("resolver_outside_of_a_step"),
    "tasks but only": mistake("resolver_with_wrong_number"),
    "ParameterServerStrategy needs one chief": mistake("no_strategy_roles"),
    "did not answer within": mistake("server_does_not_answer"),
    "CreateSession still waiting": hanging(WITHOUT_PS, 40),
    "would wait for ever": Producer(
        lambda place: place.run_script(WITHOUT_FILTERS, "--no-chief", "--workers", "2", "--stall-timeout", "1"),
        is_long=True,
    ),
    "failed to connect to all addresses": mistake("ps_is_gone"),
    "A ps is lost": mistake("ps_is_killed"),
    "unknown device": hanging(VARIABLE_BEFORE_STRATEGY, 30),
    "Collective ops must be configured": mistake("collective_too_late"),
    "devices cannot be modified": mistake("devices_too_late"),
    "OOM when allocating tensor": mistake("out_of_memory"),
    "has no attribute 'Session'": mistake("session"),
    "has no attribute 'estimator'": mistake("estimator"),
    "tf.placeholder()": mistake("placeholder"),
    "`loss` passed to Optimizer": mistake("eager_minimize"),
    "The step uses variables": mistake("variable_outside_of_scope"),
    "The dataset of a worker has ended": mistake("dataset_ends"),
    "loss is nan": mistake("loss_is_not_finite"),
    "step_fn returned": mistake("loss_of_each_row"),
    "The index": mistake("index_is_a_tensor"),
    "has other variables": mistake("checkpoint_of_another_model"),
    "None of the checkpoints": mistake("damaged_checkpoint"),
    "Unsuccessful TensorSliceReader": mistake("no_checkpoint"),
    "Model.fit of Keras 3 fails": mistake("fit"),
    "To use this dataset": mistake("fit_with_plain_dataset"),
    "Unrecognized data type": mistake("fit_with_distributed_dataset"),
    "of Keras 3 would miscount": mistake("miscounting_optimizer"),
    "The filename must end in": mistake("weights_file"),
    "Invalid filepath extension": mistake("saved_model_file"),
    "File format not supported": mistake("load_saved_model"),
    "Argument(s) not recognized": mistake("learning_rate"),
    "module 'keras.utils' has no attribute": mistake("dataset_creator"),
    "Keras cannot be imported": Producer(
        lambda place: place.shell(
            sys.executable, "-c", "import tensorflow as tf; tf.keras.Model", env={"TF_USE_LEGACY_KERAS": "1"}
        ),
        is_long=True,
    ),
}
