"""The data and the model of all tutorials: handwritten digits.

data = digits.load()  # 1,797 images of 8 x 8 pixels, which come with scikit-learn
data = digits.load("mnist")  # 70,000 images of 28 x 28 pixels, which Keras downloads once
model = digits.make_model(data)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

NAMES = ("digits", "mnist")


class Data(NamedTuple):
    """Grey images of shape (count, size, size, 1) with values 0 to 1, and labels 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(name: str = "digits") -> Data:
    """Return training and test images, the same ones in every run.

    Raises:
        ValueError: No data set has that name.
        ConnectionError: MNIST is not on this host yet, and cannot be downloaded.
    """
    if name not in NAMES:
        raise ValueError(f"Data set {name!r} does not exist. Choose one of: {', '.join(NAMES)}.")
    return _load_mnist() if name == "mnist" else _load_digits()


def make_model(data: Data) -> Any:
    """Return a Keras model: two convolutions and a layer of ten outputs, one per digit."""
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input(data.train_images.shape[1:]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def _load_digits() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    parts = train_test_split(images, labels.astype(np.int64), test_size=0.2, stratify=labels, random_state=0)
    return Data(parts[0], parts[2], parts[1], parts[3])


def _load_mnist() -> Data:
    import tensorflow as tf

    try:
        (train_images, train_labels), (test_images, test_labels) = tf.keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a bare Exception
        raise ConnectionError(
            "MNIST cannot be downloaded: compute nodes often have no internet access. Load it once on a host that has "
            "(the login node): python -c 'import digits; digits.load(\"mnist\")'. It stays in ~/.keras."
        ) from error

    def grey(images: np.ndarray) -> np.ndarray:
        return (images / 255.0).astype(np.float32)[..., None]

    return Data(grey(train_images), train_labels.astype(np.int64), grey(test_images), test_labels.astype(np.int64))
