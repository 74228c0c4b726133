"""Test the data of the tutorials. MNIST is not downloaded: a fake replaces the loader of Keras."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TUTORIALS = Path(__file__).parents[2] / "TUTORIALS"
tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")
pytestmark = pytest.mark.keras


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TUTORIALS))
    yield pytest.importorskip("digits")
    sys.modules.pop("digits", None)


def test_digits_are_split_in_two_disjoint_sets(digits: Any) -> None:
    data = digits.load()
    assert (data.train_images.shape, data.test_images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert (len(data.train_labels), len(data.test_labels)) == (1437, 360)
    assert (data.train_images.min(), data.train_images.max()) == (0.0, 1.0)
    assert set(data.train_labels) == set(data.test_labels) == set(range(10))
    assert not {image.tobytes() for image in data.train_images} & {image.tobytes() for image in data.test_images}


def test_mnist_has_the_format_of_the_digits(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = np.full((3, 28, 28), 255, np.uint8), np.array([1, 2, 3], np.uint8)
    monkeypatch.setattr(tf.keras.datasets.mnist, "load_data", lambda: ((images, labels), (images[:1], labels[:1])))
    data = digits.load("mnist")
    assert data.train_images.shape == (3, 28, 28, 1)
    assert data.train_images.dtype == np.float32
    assert data.train_images.max() == 1.0
    assert data.test_labels.tolist() == [1]
    assert digits.make_model(data).output_shape == (None, 10)


def test_failed_download_and_unknown_data_are_errors(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Exception("URL fetch failure")

    monkeypatch.setattr(tf.keras.datasets.mnist, "load_data", refuse)
    with pytest.raises(ConnectionError, match="Load it once on a host that has"):
        digits.load("mnist")
    with pytest.raises(ValueError, match="'cifar' does not exist"):
        digits.load("cifar")
