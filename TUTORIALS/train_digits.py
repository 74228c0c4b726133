"""Train a Keras model on handwritten digits: on parameter servers, on workers in step, or in one process.

    tf4slurm run --ps 1 --workers 2 -- python TUTORIALS/train_digits.py
    tf4slurm run --ps 0 --no-chief --workers 2 -- python TUTORIALS/train_digits.py
    python TUTORIALS/train_digits.py

Every task runs this file. A ps, and a worker of a job with ps, stays in `job_strategy` and serves; the chief goes on.
It sends the training step and the dataset to the workers as graphs, so only the chief loads scikit-learn.

With `--checkpoint-dir`, the same command started again resumes after the last finished epoch. The ps write their own
variables, so chief and ps must see that directory at the same path.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it at import

import digits
import tensorflow as tf

from tf4slurm.tensorflow import evaluate, fit, job_strategy


class Speed(tf.keras.callbacks.Callback):
    """Prints a line per epoch. Measures the steps of all epochs but the first, in which TensorFlow traces graphs.

    The seconds exclude validation and saving.
    """

    steps, seconds, is_first_epoch = 0, 0.0, True

    def step(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def on_train_begin(self, logs: Any = None) -> None:
        if self.step():
            print(f"resuming from step {self.step()}", flush=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.first_step, self.started = self.step(), time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps, seconds = self.step() - self.first_step, self.ended - self.started
        if not self.is_first_epoch:
            self.steps, self.seconds = self.steps + steps, self.seconds + seconds
        self.is_first_epoch = False
        print(
            f"epoch {epoch + 1} step {self.step()} loss {logs['loss']:.4f} accuracy {logs['val_accuracy']:.4f} "
            f"steps/s {steps / seconds:.1f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, alone or in a job of tf4slurm.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="of Adam at first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, help="save here after every epoch, and resume from here")
    parser.add_argument("--report-json", type=Path, help="write steps, seconds and test accuracy to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    strategy, coordinator = job_strategy()
    tf.get_logger().setLevel("ERROR")  # else every checkpoint saved to a ps warns that it traces a function
    tf.keras.utils.set_random_seed(arguments.seed)
    data = digits.load()
    test = (data.test_images, data.test_labels)
    # a step of workers in step takes a batch on each of them
    steps_per_epoch = max(1, len(data.train_labels) // arguments.batch_size // strategy.num_replicas_in_sync)
    with strategy.scope():
        # A delayed worker applies gradients of old variables, so the last steps should be small.
        rate = tf.keras.optimizers.schedules.CosineDecay(arguments.learning_rate, arguments.epochs * steps_per_epoch)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = digits.make_model(data)
        # Six steps in each function that a worker runs. By default fit finds a number, which takes some seconds.
        model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"], steps_per_execution=6)

    def dataset_fn() -> tf.data.Dataset:
        images = tf.data.Dataset.from_tensor_slices((data.train_images, data.train_labels))
        return images.shuffle(len(data.train_labels)).batch(arguments.batch_size, drop_remainder=True).prefetch(2)

    speed = Speed()
    options = {"epochs": arguments.epochs, "steps_per_epoch": steps_per_epoch, "checkpoints": arguments.checkpoint_dir}
    fit(model, dataset_fn, coordinator=coordinator, **options, validation_data=test, callbacks=[speed], verbose=0)
    accuracy = evaluate(model, test, coordinator=coordinator, verbose=0)["accuracy"]
    print(f"test accuracy: {accuracy:.4f}", flush=True)
    resolver = strategy.cluster_resolver
    if arguments.report_json and (resolver is None or not resolver.task_id):  # of workers in step, the first
        found = {"steps": speed.steps, "seconds": speed.seconds, "test_accuracy": accuracy}
        found["steps_per_second"] = speed.steps / speed.seconds if speed.steps else None
        arguments.report_json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
