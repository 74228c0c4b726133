# mypy: ignore-errors
"""ParameterServerStrategy after TensorFlow's tutorial: with Keras' fit, or a custom loop. Reads TF_CONFIG only."""

import argparse
import sys

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["fit", "loop"])
parser.add_argument("directory")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save-weights", action="store_true", help="for an evaluator")
arguments = parser.parse_args()
STEPS = 20

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("ps", "worker"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()


def make_dataset(context=None):
    labels = tf.data.Dataset.random(seed=1).map(lambda number: number % 10)
    batches = labels.map(lambda label: (tf.one_hot(label, 784), label)).batch(32)
    return batches.prefetch(2)


def make_model():
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((784,)), layers.Dense(16, activation="relu"), layers.Dense(10)])


if resolver.task_type == "evaluator":
    model = make_model()
    model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    evaluator = tf.keras.utils.SidecarEvaluator(
        model, make_dataset().take(2), arguments.directory, max_evaluations=arguments.epochs
    )
    evaluator.start()
    print("evaluated", tf.train.latest_checkpoint(arguments.directory), flush=True)
    sys.exit(0)

sizes = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=4096, max_shards=2)
strategy = tf.distribute.ParameterServerStrategy(
    resolver, variable_partitioner=sizes if arguments.how == "loop" else None
)

if arguments.how == "fit":
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = make_model()
        model.compile(tf.keras.optimizers.SGD(0.5), loss_of, metrics=["accuracy"], steps_per_execution=5)

    class PrintEpoch(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            print("epoch", epoch, "iterations", int(self.model.optimizer.iterations), flush=True)

    callbacks = [tf.keras.callbacks.BackupAndRestore(arguments.directory + "/backup"), PrintEpoch()]
    if arguments.save_weights:
        path = arguments.directory + "/ckpt-{epoch}"
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
    model.fit(make_dataset(), epochs=arguments.epochs, steps_per_epoch=STEPS, callbacks=callbacks, verbose=0)
    print("trained, iterations", int(model.optimizer.iterations), flush=True)
else:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(tf.zeros((784, 10)))
        step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(weight=weight, step=step)
    checkpoints = tf.train.CheckpointManager(checkpoint, arguments.directory, max_to_keep=2)
    checkpoint.restore(checkpoints.latest_checkpoint)
    print("begins with step", int(step), flush=True)

    @tf.function
    def train_step(batches):
        def replica_step(images, labels):
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(weight, tf.argmax(images, axis=1))
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, rows))
            (gradient,) = tape.gradient(loss, list(weight.variables)[:1])
            weight.variables[0].scatter_sub(tf.IndexedSlices(0.5 * gradient.values, gradient.indices))
            step.assign_add(1)
            return loss

        return strategy.run(replica_step, args=next(batches))

    batches = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
    while int(step) < STEPS * arguments.epochs:
        for _ in range(STEPS):
            coordinator.schedule(train_step, args=(batches,))
        coordinator.join()
        checkpoints.save()
    print("trained, step", int(step), flush=True)
