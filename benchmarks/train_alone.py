"""The tutorial's digits in one process, with the same number and size of steps.

python train_alone.py SEED REPORT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "TUTORIALS"))

import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types
import train_digits  # type: ignore[import-not-found]  # a script, not a package

_EPOCHS, _BATCH, _LEARNING_RATE = 30, 64, 0.003


def main(seed: int, report: Path) -> None:
    data = train_digits.load_data()
    tf.keras.utils.set_random_seed(seed)
    steps = _EPOCHS * train_digits.count_steps_per_epoch(data, _BATCH)
    trainable = train_digits.build_trainable(_LEARNING_RATE, steps)
    train_steps = train_digits.make_train_steps(tf.distribute.get_strategy(), trainable)
    images = tf.data.Dataset.from_tensor_slices((data.train_images, data.train_labels))
    batches = images.shuffle(len(data.train_labels), seed=seed).repeat().batch(_BATCH, drop_remainder=True)
    train_steps(iter(batches), tf.constant(steps))
    accuracy = train_digits.evaluate(trainable.model, data)
    report.write_text(json.dumps({"steps": int(trainable.step.numpy()), "test_accuracy": accuracy}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
