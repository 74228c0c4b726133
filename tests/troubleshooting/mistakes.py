"""Mistakes in training scripts: python -m tests.troubleshooting.mistakes DIRECTORY makes all of them in one process.

It prints "=== NAME" and the error of each. Chief, ps and worker are in this process, as far as a strategy is needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

PS = "import json, sys, tensorflow as tf; tf.distribute.Server(json.loads(sys.argv[1]), 'ps', 0).join()"
SERVERS: dict[str, Any] = {}
MISTAKES: dict[str, Callable[[], Any]] = {}


def mistake(function: Callable[[], Any]) -> Callable[[], Any]:
    MISTAKES[function.__name__] = function
    return function


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def strategy_for(cluster: dict[str, list[str]], task_type: str = "chief") -> Any:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=task_type, task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver)


@functools.cache
def training() -> tuple[Any, Any]:
    """A strategy and its coordinator; the ps is a separate process."""
    cluster = {"chief": [free_address()], "ps": [free_address()], "worker": [free_address()]}
    SERVERS["ps"] = subprocess.Popen([sys.executable, "-c", PS, json.dumps(cluster)])
    SERVERS["worker"] = tf.distribute.Server(cluster, "worker", 0)
    strategy = strategy_for(cluster)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


@contextlib.contextmanager
def environ(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_steps(step_fn: Callable[..., Any], steps: int = 2, **options: Any) -> Any:
    from tf4slurm.tensorflow import run_steps as run

    return run(training()[1], step_fn, steps, **options)


def tf_config(**task: Any) -> str:
    return json.dumps({"cluster": {"worker": [free_address(), free_address()]}, "task": task})


# Before anything else has used the devices


@mistake
def collective_too_late() -> None:
    tf.constant(1) + 1
    with environ(TF_CONFIG=tf_config(type="worker", index=0)):
        tf.distribute.MultiWorkerMirroredStrategy()


@mistake
def devices_too_late() -> None:
    devices = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 2)


# The cluster


@mistake
def two_servers_on_one_port() -> None:
    cluster = {"worker": [free_address()]}
    servers = [tf.distribute.Server(cluster, "worker", 0) for _ in range(2)]
    assert not servers


@mistake
def index_out_of_range() -> None:
    tf.distribute.Server({"worker": [free_address()]}, "worker", 3)


@mistake
def role_not_in_cluster() -> None:
    tf.distribute.Server({"worker": [free_address()]}, "chief", 0)


@mistake
def no_cluster() -> None:
    tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())


@mistake
def no_ps() -> None:
    strategy_for({"chief": [free_address()], "worker": [free_address()]})


@mistake
def master_in_cluster() -> None:
    strategy_for({role: [free_address()] for role in ("master", "ps", "worker")}, "master")


@mistake
def invalid_tf_config() -> None:
    with environ(TF_CONFIG="{'cluster': {}}"):
        tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()


@mistake
def resolver_outside_of_a_step() -> None:
    tf.distribute.cluster_resolver.SlurmClusterResolver()


@mistake
def resolver_with_wrong_number() -> None:
    step = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with environ(**step):
        tf.distribute.cluster_resolver.SlurmClusterResolver({"ps": 1, "worker": 2}, gpus_per_node=0, gpus_per_task=0)


# TensorFlow 1


@mistake
def session() -> None:
    tf.Session()


@mistake
def estimator() -> None:
    tf.estimator.Estimator()


@mistake
def placeholder() -> None:
    tf.compat.v1.placeholder(tf.float32)


@mistake
def eager_minimize() -> None:
    tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.Variable(1.0))


# Keras 3, at first without the limits that tf4slurm.tensorflow adds


def model() -> Any:
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@mistake
def fit_with_distributed_dataset() -> None:
    dataset = training()[1].create_per_worker_dataset(lambda: tf.data.Dataset.from_tensors((tf.ones([4, 1]),) * 2))
    with training()[0].scope():
        model().fit(dataset, steps_per_epoch=1, verbose=0)


@mistake
def fit_with_plain_dataset() -> None:
    with training()[0].scope():
        model().fit(tf.data.Dataset.from_tensors((tf.ones([4, 1]),) * 2), steps_per_epoch=1, verbose=0)


@mistake
def weights_file() -> None:
    model().save_weights("weights.ckpt")


@mistake
def saved_model_file() -> None:
    model().save("model")


@mistake
def load_saved_model() -> None:
    tf.keras.models.load_model(os.getcwd())


@mistake
def learning_rate() -> None:
    tf.keras.optimizers.Adam(lr=0.1)


@mistake
def dataset_creator() -> None:
    tf.keras.utils.experimental.DatasetCreator(lambda context: None)


# Training, with tf4slurm.tensorflow


@mistake
def no_strategy_roles() -> None:
    from tf4slurm.tensorflow import parameter_server_strategy

    config = {"cluster": {"worker": [free_address()]}, "task": {"type": "worker", "index": 0}}
    with environ(TF_CONFIG=json.dumps(config)):
        parameter_server_strategy()


@mistake
def server_does_not_answer() -> None:
    from tf4slurm.tensorflow import parameter_server_strategy

    cluster = {"chief": [free_address()], "ps": [free_address()], "worker": [free_address()]}
    with environ(TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})):
        parameter_server_strategy(timeout_seconds=1)


@mistake
def out_of_memory() -> None:
    tf.zeros([10**6, 10**6])


@mistake
def variable_outside_of_scope() -> None:
    training()
    weight = tf.Variable(1.0)
    run_steps(lambda: weight.assign_add(1.0))


@mistake
def dataset_ends() -> None:
    def make_dataset() -> Any:
        return tf.data.Dataset.range(3)

    coordinator = training()[1]
    run_steps(lambda row: row, 100, dataset=iter(coordinator.create_per_worker_dataset(make_dataset)))


@mistake
def loss_is_not_finite() -> None:
    run_steps(lambda: tf.constant(float("nan")))


@mistake
def loss_of_each_row() -> None:
    run_steps(lambda: tf.zeros([8]))


@mistake
def index_is_a_tensor() -> None:
    import tf4slurm

    tf.function(lambda index: tf4slurm.share_of(["a", "b"], index, 2))(tf.constant(0))


@mistake
def checkpoint_of_another_model() -> None:
    from tf4slurm.tensorflow import Checkpoints

    strategy, _ = training()
    for name in ("weight", "kernel"):
        with strategy.scope():
            variables = {name: tf.Variable(0.0), "step": tf.Variable(0, dtype=tf.int64)}
        Checkpoints("checkpoints", every_steps=1, **variables).save()


@mistake
def damaged_checkpoint() -> None:
    from tf4slurm.tensorflow import Checkpoints

    for path in Path("checkpoints").glob("*.index"):
        path.write_bytes(b"")
    with training()[0].scope():
        Checkpoints("checkpoints", every_steps=1, step=tf.Variable(0, dtype=tf.int64))


@mistake
def no_checkpoint() -> None:
    tf.train.Checkpoint(weight=tf.Variable(1.0)).read("no/checkpoint")


@mistake
def fit() -> None:
    from tf4slurm.tensorflow.keras.limits import install_keras_limits

    install_keras_limits()
    fit_with_plain_dataset()


@mistake
def miscounting_optimizer() -> None:
    with training()[0].scope():
        tf.keras.optimizers.Nadam().build([tf.Variable(1.0)])


@mistake
def ps_is_killed() -> None:
    with training()[0].scope():
        weight, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64)
    run_steps(lambda: weight.assign_add(1.0), step=step)
    SERVERS["ps"].kill()
    run_steps(lambda: weight.assign_add(1.0), 100, step=step)


@mistake
def ps_is_gone() -> None:
    with training()[0].scope():
        with contextlib.suppress(tf.errors.UnavailableError):
            tf.Variable(1.0)  # may still find the old connection broken; the next request connects anew
        tf.Variable(1.0)


def main(directory: str, *names: str) -> None:
    os.chdir(directory)
    for name, function in MISTAKES.items():
        if names and name not in names:
            continue
        print(f"\n=== {name}", flush=True)
        try:
            function()
        except Exception as error:
            sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.stderr.flush()
    if "ps" in SERVERS:
        SERVERS["ps"].kill()
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's servers never end


if __name__ == "__main__":
    main(*sys.argv[1:])
