"""Train on handwritten digits on a parameter-server cluster: an ordinary TensorFlow script, started once per task.

    tf4slurm run --ps 1 --workers 2 -- python TUTORIALS/train_digits.py

What this script shows:

* Every task runs this file. TF_CONFIG holds the addresses of all tasks, and the role and index of this one.
* A ps or a worker only starts a server and waits: it runs no line of the training code below `serve`. The chief
  builds model and data, and sends them to the others as graphs, so only the chief loads scikit-learn.
* Variables created in `strategy.scope()` are on the ps. A `tf.function` given to `coordinator.schedule` runs on any
  free worker. When a worker is lost during a function, the function runs again on another. So some steps may be
  applied twice, never fewer than requested.
* `--seed` fixes initial weights and shuffling. The order of updates differs from run to run, so asynchronous
  training is not deterministic. The held-out test images are the same whatever the seed.
* The learning rate falls almost to zero. A delayed worker applies gradients of old variables, which can reduce the
  accuracy for some dozens of steps: so the last steps should be small. (Measured in trainings of 480 steps on a busy
  machine: with a constant rate the accuracy fell from 0.98 to 0.94 for a while after step 384 in one of 13, with a
  falling one in none of 12.)
* With `--checkpoint-dir`, the same command started again resumes after the last finished epoch. The ps write their own
  variables, so chief and ps must see that directory at the same path.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import numpy as np
import tensorflow as tf

# Steps in one scheduled function. Scheduling is a round trip from the chief to a worker (measured with one worker: 57
# steps/s one by one, 124 in groups of six). With too many, workers idle at the end of an epoch.
STEPS_PER_CLOSURE = 6


class Digits(NamedTuple):
    """Grey images of shape (count, 8, 8, 1) with values 0 to 1, and labels 0 to 9."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray


class Trainable(NamedTuple):
    """The variables on the ps, which a checkpoint saves."""

    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer
    step: tf.Variable


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits on a parameter-server cluster.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="of Adam at first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and shuffling (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, help="save here after every epoch, and resume from here")
    parser.add_argument("--report-json", type=Path, help="write steps, seconds and test accuracy to this file")
    arguments = parser.parse_args()
    if not os.environ.get("TF_CONFIG"):
        parser.error(
            "TF_CONFIG is not set, so this process does not know its cluster. "
            "Start it with: tf4slurm run --ps 1 --workers 2 -- python TUTORIALS/train_digits.py"
        )
    return arguments


def serve(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Run the server of a ps or a worker. Never returns; the launcher ends this process."""
    # TensorFlow's guide sets this on ps and workers, so that the failure of one of them is reported to the chief.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()


def load_data() -> Digits:
    """Load the 1,797 images that come with scikit-learn; a fifth is held out, the same images in every run.

    If the split depended on `--seed`, a resume with another seed would test on training images.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    parts = train_test_split(images, labels.astype(np.int64), test_size=0.2, stratify=labels, random_state=0)
    return Digits(*parts)


def build_trainable(learning_rate: float, steps: int) -> Trainable:
    """Create the variables. Call it in the strategy's scope, which places them on the ps.

    The learning rate falls to zero in `steps` steps of the optimizer's own counter, which loses some (see below).
    """
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.CosineDecay(learning_rate, steps))
    optimizer.build(model.trainable_variables)  # now: a scheduled function cannot create variables
    # Our own counter: Keras 3 reads optimizer.iterations, adds 1 and writes it back, and loses a step when two workers
    # do so at once (measured: 733 after 1,000 steps). assign_add adds on the ps, atomically.
    step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
    return Trainable(model, optimizer, step)


def count_steps_per_epoch(data: Digits, batch_size: int) -> int:
    """Return the number of whole batches of images; at least one."""
    return max(1, len(data.train_labels) // batch_size)


def make_train_steps(strategy: tf.distribute.ParameterServerStrategy, trainable: Trainable) -> Callable[..., tf.Tensor]:
    """Return the function that a worker runs: several steps; it returns the sum of their losses."""
    model, optimizer, step = trainable

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        step.assign_add(1)
        return loss

    @tf.function
    def train_steps(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        total_loss = 0.0
        for _ in tf.range(steps):
            # apply_gradients needs the replica context that strategy.run gives, with a single replica per worker too.
            total_loss += strategy.run(train_step, args=next(iterator))
        return total_loss

    return train_steps


def make_iterator(coordinator: Any, data: Digits, batch_size: int, seed: int) -> Any:
    """Return an iterator over one endless, separately shuffled dataset on each worker."""

    def make_dataset() -> tf.data.Dataset:
        # All workers get all images, each in its own order: with the same order they would train on the same
        # batches at the same time. The index is known only when a worker runs this function, so it is a tensor here,
        # and shuffle() takes no tensor as its seed when the global seed is 0; hence the permutation beforehand.
        worker_index = tf.distribute.coordinator.experimental_get_current_worker_index()
        count = len(data.train_labels)
        order = tf.random.experimental.stateless_shuffle(tf.range(count), seed=[seed, worker_index])
        images, labels = tf.gather(data.train_images, order), tf.gather(data.train_labels, order)
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(count, seed=seed).repeat()
        return dataset.batch(batch_size, drop_remainder=True).prefetch(2)

    return iter(coordinator.create_per_worker_dataset(tf.function(make_dataset)))


def open_checkpoints(trainable: Trainable, directory: Path | None) -> tf.train.CheckpointManager | None:
    """Restore the latest checkpoint in the directory, if there is one. None without a directory."""
    if directory is None:
        return None
    checkpoint = tf.train.Checkpoint(**trainable._asdict())
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=3, step_counter=trainable.step)
    if manager.restore_or_initialize():
        print(f"resuming from step {trainable.step.numpy()}: {manager.latest_checkpoint}", flush=True)
    return manager


def train(arguments: argparse.Namespace, data: Digits, trainable: Trainable, coordinator: Any) -> dict[str, Any]:
    """Train until the step counter has reached the last epoch, saving after each.

    Returns steps and seconds of all epochs but the first of this run, in which functions are traced and sent.
    """
    manager = open_checkpoints(trainable, arguments.checkpoint_dir)
    train_steps = make_train_steps(coordinator.strategy, trainable)
    iterator = make_iterator(coordinator, data, arguments.batch_size, arguments.seed)
    steps_per_epoch = count_steps_per_epoch(data, arguments.batch_size)
    first_epoch = int(trainable.step.numpy()) // steps_per_epoch
    timed_steps, timed_seconds = 0, 0.0
    for epoch in range(first_epoch, arguments.epochs):
        first_step, started, losses = int(trainable.step.numpy()), time.monotonic(), []
        for done in range(0, steps_per_epoch, STEPS_PER_CLOSURE):
            steps = tf.constant(min(STEPS_PER_CLOSURE, steps_per_epoch - done))  # a Python int would trace anew
            losses.append(coordinator.schedule(train_steps, args=(iterator, steps)))
        coordinator.join()
        seconds, step = time.monotonic() - started, int(trainable.step.numpy())
        loss = sum(float(loss.fetch()) for loss in losses) / steps_per_epoch
        steps_done = step - first_step
        print(f"epoch {epoch + 1} step {step} loss {loss:.4f} steps/s {steps_done / seconds:.1f}", flush=True)
        if epoch > first_epoch:
            timed_steps, timed_seconds = timed_steps + steps_done, timed_seconds + seconds
        if manager:
            manager.save(checkpoint_number=step)
    rate = timed_steps / timed_seconds if timed_steps else None
    return {"steps": timed_steps, "seconds": timed_seconds, "steps_per_second": rate}


def evaluate(model: tf.keras.Model, data: Digits) -> float:
    """Return the accuracy on the held-out images. Runs on the chief, with the variables of the ps."""
    predictions = tf.argmax(model(data.test_images, training=False), axis=1)
    return float(np.mean(predictions.numpy() == data.test_labels))


def lead(arguments: argparse.Namespace, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Run the chief: train, evaluate, report."""
    tf.get_logger().setLevel("ERROR")  # else every checkpoint saved to a ps warns that it traces a function
    data = load_data()
    tf.keras.utils.set_random_seed(arguments.seed)
    # Waits until every server answers, and sets device filters, so that workers do not connect to each other.
    # No variable_partitioner: Keras 3 layers cannot use a variable that is split over several ps.
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    steps = arguments.epochs * count_steps_per_epoch(data, arguments.batch_size)
    with strategy.scope():
        trainable = build_trainable(arguments.learning_rate, steps)
    speed = train(arguments, data, trainable, coordinator)
    accuracy = evaluate(trainable.model, data)
    print(f"test accuracy: {accuracy:.4f}", flush=True)
    if arguments.report_json:
        arguments.report_json.write_text(json.dumps({**speed, "test_accuracy": accuracy}) + "\n")


def main() -> None:
    arguments = parse_arguments()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if not {"chief", "ps", "worker"} <= set(resolver.cluster_spec().jobs):
        raise SystemExit(f"TF_CONFIG names only {resolver.cluster_spec().jobs}; needed: one chief, ps and workers.")
    if resolver.task_type == "chief":
        lead(arguments, resolver)
    else:
        serve(resolver)


if __name__ == "__main__":
    main()
