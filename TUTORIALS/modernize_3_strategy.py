"""Tutorial 10, step 3: the same training with TensorFlow 2: ParameterServerStrategy, a Keras model, run_steps.

tf4slurm run --ps 1 --workers 2 -- python modernize_3_strategy.py
"""

import argparse

import digits
import tensorflow as tf

from tf4slurm.tensorflow import parameter_server_strategy, run_steps

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1500, help="steps of all workers together")
FLAGS = parser.parse_args()

strategy, coordinator = parameter_server_strategy()  # on a ps or a worker: serves, and never returns
data = digits.load()
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.003)
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64, trainable=False)


def make_dataset():
    images = tf.data.Dataset.from_tensor_slices((data.train_images, data.train_labels))
    return images.shuffle(len(data.train_labels)).repeat().batch(64).prefetch(2)


def train_step(batch):
    images, labels = batch
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def test_accuracy():
    right = tf.argmax(model(data.test_images), axis=1) == data.test_labels
    return float(tf.reduce_mean(tf.cast(right, tf.float32)))


batches = iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))
done = run_steps(coordinator, train_step, FLAGS.steps, dataset=batches, step=step)
print(f"step {done.step}, test accuracy: {test_accuracy():.4f}")
for index, steps in enumerate(done.steps_by_worker):
    print(f"worker {index} made {steps} steps, {steps / done.seconds:.0f} a second")
