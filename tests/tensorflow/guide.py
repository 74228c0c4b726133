# mypy: ignore-errors
"""What TensorFlow's guide "Parameter server training" does, written for Keras 2: each part as there, and cured.

    tf4slurm run --ps 2 --workers 2 -- python guide.py NAME [cured]     # one part, in a job
    python guide.py                                                     # all parts, then all cures, in one process

The second prints "=== NAME" or "=== NAME cured", and the traceback of what fails.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback

import tensorflow as tf

SERVERS = """
import json, sys
import tensorflow as tf
cluster = json.loads(sys.argv[1])
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8)  # on few cores, closures would block each other
roles = [(role, index) for role in ("ps", "worker") for index in range(2)]
servers = [tf.distribute.Server(cluster, role, index, config=config) for role, index in roles]
servers[0].join()
"""
COLOURS = ["red", "green", "blue", "white", "black", "brown", "pink"]
DIRECTORY = tempfile.mkdtemp()
PARTS = {}
IS_CURED = False
keras = tf.keras


def part(function):
    PARTS[function.__name__] = function
    return function


@functools.cache
def guide_strategy(num_shards):
    """The strategy and the coordinator, with TensorFlow's older names, as in the guide."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, max_shards=num_shards)
    strategy = tf.distribute.experimental.ParameterServerStrategy(
        resolver, variable_partitioner=partitioner if num_shards > 1 else None
    )
    return strategy, tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)


@functools.cache
def job_strategy():
    from tf4slurm.tensorflow import job_strategy

    return job_strategy()


def strategy_and_coordinator(num_shards=1):
    return job_strategy() if IS_CURED else guide_strategy(num_shards)


def numbers(input_context=None):
    inputs, labels = tf.random.uniform((20, 10)), tf.random.uniform((20,))
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(20).repeat().batch(4)


def numbers_with_columns():
    return numbers().map(lambda inputs, labels: (inputs, labels[:, None]))


def dense_model():
    with strategy_and_coordinator()[0].scope():
        model = keras.models.Sequential([keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(), loss="mse", steps_per_execution=5)
    return model


def fit_with_tf4slurm(dataset_fn=numbers_with_columns, callbacks=()):
    from tf4slurm.tensorflow import fit

    coordinator = strategy_and_coordinator()[1]
    fit(dense_model(), dataset_fn, coordinator=coordinator, steps_per_epoch=10, callbacks=callbacks, verbose=0)


def embedding_model(embedding=None, name="features", mean=None):
    with strategy_and_coordinator()[0].scope():
        ids = keras.layers.Input((3,), dtype="int64", name=name)
        vectors = (embedding or keras.layers.Embedding(8, 16))(ids)
        mean = mean or keras.layers.GlobalAveragePooling1D()
        return keras.Model({"features": ids}, keras.layers.Dense(1, activation="sigmoid")(mean(vectors)))


def rows_of_ids():
    ids = tf.random.uniform((64, 3), maxval=8, dtype=tf.int64)
    return tf.data.Dataset.from_tensor_slices(({"features": ids}, tf.cast(ids[:, :1] > 3, tf.int64))).batch(8).repeat()


def train(model, *, optimizer=None, num_shards=1):
    """The guide's training step on the workers."""
    strategy, coordinator = strategy_and_coordinator(num_shards)
    with strategy.scope():
        accuracy = keras.metrics.Accuracy()
        optimizer = optimizer or keras.optimizers.RMSprop(0.1)
        if IS_CURED:
            optimizer.build(model.trainable_variables)

    @tf.function
    def step(rows):
        def replica_step(features, labels):
            with tf.GradientTape() as tape:
                output = model(features, training=True)
                losses = keras.losses.BinaryCrossentropy(reduction="none")(labels, output)
                loss = tf.nn.compute_average_loss(losses)
                gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, tf.cast(output > 0.5, tf.int64))
            return loss

        losses = strategy.run(replica_step, args=next(rows))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def dataset_of_worker():
        return strategy.distribute_datasets_from_function(lambda _: rows_of_ids())

    rows = iter(coordinator.create_per_worker_dataset(dataset_of_worker))
    for _ in range(4):
        coordinator.schedule(step, args=(rows,))
    coordinator.join()
    assert 0 <= float(accuracy.result().numpy()) <= 1
    assert coordinator.schedule(step, args=(rows,)).fetch() >= 0  # 0 if all rows of the batch are far on the right side


def first_of(dataset_fn):
    """What the workers' first batches are."""
    coordinator = strategy_and_coordinator()[1]
    rows = iter(coordinator.create_per_worker_dataset(dataset_fn))

    @tf.function
    def step(iterator):
        return next(iterator)

    values = [coordinator.schedule(step, args=(rows,)) for _ in range(8)]
    coordinator.join()
    return [value.fetch() for value in values]


# The cluster


@part
def in_process_cluster():
    if IS_CURED:
        train(embedding_model())
    else:
        import portpicker

        portpicker.pick_unused_port()


# Model.fit


@part
def dataset_creator():
    if IS_CURED:
        fit_with_tf4slurm()
    else:
        keras.utils.experimental.DatasetCreator(numbers)


@part
def imported_dataset_creator():
    if IS_CURED:
        fit_with_tf4slurm()
    else:
        from tensorflow.keras.utils.experimental import DatasetCreator

        DatasetCreator(numbers)


@part
def fit_of_a_function():
    fit_with_tf4slurm() if IS_CURED else dense_model().fit(numbers, steps_per_epoch=10)


@part
def fit_of_a_dataset():
    fit_with_tf4slurm() if IS_CURED else dense_model().fit(numbers(), steps_per_epoch=10)


@part
def fit_of_a_coordinators_dataset():
    if IS_CURED:
        fit_with_tf4slurm()
    else:
        dataset = strategy_and_coordinator()[1].create_per_worker_dataset(numbers)
        dense_model().fit(dataset, steps_per_epoch=10)


@part
def fit_of_a_distributed_dataset():
    if IS_CURED:
        fit_with_tf4slurm()
    else:
        dataset = strategy_and_coordinator()[0].distribute_datasets_from_function(numbers)
        dense_model().fit(dataset, steps_per_epoch=10)


@part
def evaluation():
    if IS_CURED:
        from tf4slurm.tensorflow import evaluate

        coordinator = strategy_and_coordinator()[1]
        evaluate(dense_model(), numbers_with_columns, coordinator=coordinator, steps=2, verbose=0)
    else:
        dense_model().evaluate(numbers(), steps=2)


@part
def checkpoint_path():
    name = "model.keras" if IS_CURED else "ckpt"
    callback = keras.callbacks.ModelCheckpoint(filepath=os.path.join(DIRECTORY, name))
    fit_with_tf4slurm(callbacks=[callback])
    assert os.listdir(DIRECTORY)


# The data


@part
def old_layers():
    layers = keras.layers if IS_CURED else keras.layers.experimental.preprocessing
    layers.StringLookup(vocabulary=COLOURS)


def lookup_model(name):
    with strategy_and_coordinator()[0].scope():
        layer = keras.layers.StringLookup(vocabulary=COLOURS, mask_token=None)
        words = keras.layers.Input((3,), dtype=tf.string, name=name)
        return layer, keras.Model({"features": words}, layer(words))


def rows_of_words():
    return tf.data.Dataset.from_tensor_slices({"features": [COLOURS[:3], COLOURS[3:6]] * 4})


@part
def model_of_a_row():
    layer, model = lookup_model("features")
    if IS_CURED:
        first_of(lambda: rows_of_words().batch(4).map(lambda row: model({"features": row["features"]})).repeat())
        first_of(lambda: rows_of_words().map(lambda row: layer(row["features"])).batch(4).repeat())
    else:
        first_of(lambda: rows_of_words().map(lambda row: model(row["features"])).batch(4).repeat())


@part
def keys_of_a_dictionary():
    _, model = lookup_model("features" if IS_CURED else "feature")
    model({"features" if IS_CURED else "feature": tf.constant([COLOURS[:3]])})


# The model and its step


@part
def function_of_a_symbolic_tensor():
    module = keras.ops.mean if IS_CURED else tf.reduce_mean
    model = embedding_model(mean=lambda vectors: module(vectors, axis=1))
    train(model)


@part
def reduction():
    keras.losses.BinaryCrossentropy(reduction="sum_over_batch_size" if IS_CURED else keras.losses.Reduction.AUTO)


@part
def reset_of_a_metric():
    accuracy = keras.metrics.Accuracy()
    accuracy.reset_state() if IS_CURED else accuracy.reset_states()


@part
def old_optimizer():
    (keras.optimizers if IS_CURED else keras.optimizers.legacy).SGD(0.1)


def sharded_model():
    if IS_CURED:
        from tf4slurm.tensorflow import ShardedEmbedding

        with strategy_and_coordinator()[0].scope():
            return embedding_model(ShardedEmbedding(8, 16384))
    with strategy_and_coordinator(2)[0].scope():
        ids = keras.layers.Input((3,), dtype="int64", name="features")
        mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(8, 16384)(ids))
        return keras.Model({"features": ids}, keras.layers.Dense(1)(mean))


@part
def partitioner():
    train(sharded_model(), num_shards=2)


@part
def partitioner_and_checkpoint():
    tf.train.Checkpoint(model=sharded_model()).save(os.path.join(DIRECTORY, "checkpoint"))


@part
def partitioner_and_save():
    sharded_model().save(os.path.join(DIRECTORY, "sharded.keras"))


@part
def partitioner_and_weights():
    emb_layer = sharded_model().layers[1]
    assert len(emb_layer.weights) == 2


@part
def device_of_a_weight():
    with strategy_and_coordinator()[0].scope():
        emb_layer = keras.layers.Embedding(8, 16)
        emb_layer.build()
    weight = emb_layer.weights[0]
    assert "/job:ps/" in (weight.value.device if IS_CURED else weight.device)


@part
def optimizer_outside_of_the_scope():
    outside = None if IS_CURED else keras.optimizers.RMSprop(0.1)
    train(embedding_model(), optimizer=outside)


@part
def model_outside_of_the_scope():
    if IS_CURED:
        train(embedding_model())
    else:
        layer = keras.layers.Dense(1)
        layer.build((None, 3))
        with strategy_and_coordinator()[0].scope():
            keras.optimizers.SGD(0.1, momentum=0.9).build(layer.trainable_variables)


# Evaluation, and datasets of workers


@part
def sidecar_evaluator():
    if IS_CURED:
        path = tf.train.Checkpoint(model=embedding_model()).save(os.path.join(DIRECTORY, "evaluated"))
        (found,) = tf.train.checkpoints_iterator(os.path.dirname(path), timeout=0)
        assert found == path
    else:
        keras.utils.SidecarEvaluator(None, None, DIRECTORY)


@part
def dataset_that_ends():
    rows = tf.data.Dataset.range
    first_of((lambda: rows(3).repeat()) if IS_CURED else (lambda: rows(3)))


# tf4slurm's fit, which changes classes of Keras: after the parts that use Keras alone


@part
def dataset_function_with_context():
    if IS_CURED:
        fit_with_tf4slurm(lambda: numbers(tf.distribute.InputContext()).map(lambda x, y: (x, y[:, None])))
    else:

        def dataset_fn(input_context):
            return numbers(input_context)

        fit_with_tf4slurm(dataset_fn)


@part
def labels_without_columns():
    fit_with_tf4slurm() if IS_CURED else fit_with_tf4slurm(numbers)


# This one leaves the coordinator unusable


@part
def dataset_of_the_chief():
    if IS_CURED:
        first_of(numbers)
    else:
        dataset = numbers()
        first_of(lambda: dataset)


def start_server():
    """In a ps or worker: start the server, and wait until the job ends it."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("ps", "worker"):
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol=resolver.rpc_layer or "grpc",
        )
        server.join()


def run_all():
    global IS_CURED
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    chief, *others = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    cluster = {"chief": [chief], "ps": others[:2], "worker": others[2:]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    servers = subprocess.Popen([sys.executable, "-c", SERVERS, json.dumps(cluster)], stderr=subprocess.DEVNULL)
    for IS_CURED in (False, True):
        for name, function in PARTS.items():
            print(f"\n=== {name}{' cured' * IS_CURED}", flush=True)
            try:
                function()
            except Exception:
                traceback.print_exc()
            sys.stderr.flush()
    servers.kill()
    sys.stdout.flush()
    os._exit(0)  # the coordinators' threads wait for servers


if __name__ == "__main__":
    if not sys.argv[1:]:
        run_all()
    name, *rest = sys.argv[1:]
    IS_CURED = rest == ["cured"]
    job_strategy() if IS_CURED else start_server()
    PARTS[name]()
    print("done", flush=True)
