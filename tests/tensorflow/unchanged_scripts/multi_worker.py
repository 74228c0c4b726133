# mypy: ignore-errors
"""MultiWorkerMirroredStrategy after TensorFlow's tutorials: a custom loop, or Keras' fit. Reads TF_CONFIG only."""

import argparse
import json
import os

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["fit", "loop"])
parser.add_argument("directory")
arguments = parser.parse_args()
EPOCHS, STEPS = 4, 10

index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
directory = arguments.directory if index == 0 else f"{arguments.directory}-worker-{index}"
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def make_dataset(context=None):
    labels = tf.data.Dataset.random(seed=1).map(lambda number: number % 10)
    return labels.map(lambda label: (tf.one_hot(label, 784), label)).batch(32)


def make_model():
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((784,)), layers.Dense(10)])


loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
with strategy.scope():
    model = make_model()
    optimizer = tf.keras.optimizers.SGD(0.5)
if arguments.how == "fit":
    with strategy.scope():
        model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    losses = model.fit(make_dataset(), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0).history["loss"]
else:
    with strategy.scope():
        epoch = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, epoch=epoch)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=1)
    checkpoint.restore(manager.latest_checkpoint)
    batches = iter(strategy.experimental_distribute_dataset(make_dataset()))

    @tf.function
    def train_step():
        def replica_step(images, labels):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(loss_of(labels, model(images, training=True)), global_batch_size=32)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=next(batches)), axis=None)

    losses = []
    while epoch.numpy() < EPOCHS:
        losses += [float(train_step()) for _ in range(STEPS)]
        epoch.assign_add(1)
        manager.save()
print("trained, the loss", "falls" if losses[-1] < losses[0] else "does not fall", flush=True)
