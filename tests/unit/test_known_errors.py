"""Explanations of real error messages of TensorFlow and Keras."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_child_log import KERAS, PER_REPLICA, kept
from tf4slurm.jobs.known_errors import explain


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            f"{KERAS}\nValueError: To use this dataset, you need to pass this dataset to "
            "ClusterCoordinator.create_per_worker_dataset.",
            "Keras 3's fit does not work under ParameterServerStrategy",
        ),
        (PER_REPLICA, "Keras 3's fit does not work under MultiWorkerMirroredStrategy"),
        ("AttributeError: module 'keras.utils' has no attribute 'experimental'", "written for Keras 2"),
        ("ValueError: Argument(s) not recognized: {'lr': 1}", "written for Keras 2"),
        (
            "ValueError: The filename must end in `.weights.h5`. Received: filepath=x",
            "written for Keras 2",
        ),
        ("ImportError: Keras cannot be imported. Check that it is installed.", "needs the package tf-keras"),
        ("AttributeError: module 'tensorflow' has no attribute 'placeholder'", "written for TensorFlow 1"),
        ("AttributeError: module 'tensorflow._api.v2.train' has no attribute 'AdamOptimizer'", "for TensorFlow 1"),
        ("AttributeError: module 'tensorflow' has no attribute 'contrib'", "does not have any more"),
        ("tensorflow.python.framework.errors_impl.UnknownError: Could not start gRPC server", "could not listen"),
        ("ModuleNotFoundError: No module named 'x'", "lacks a package"),
    ],
)
def test_known_failure_has_one_line_with_cause_and_advice(text: str, meaning: str) -> None:
    (explanation,) = explain(kept(text))
    assert meaning in explanation
    assert "\n" not in explanation
    assert re.search(r"Take|pip install|Import|Start|Run", explanation) or "start the job from" in explanation


def test_dataset_of_a_custom_loop_is_not_explained_as_keras_fit() -> None:
    assert explain(["ValueError: … pass this dataset to ClusterCoordinator.create_per_worker_dataset."]) == []


@pytest.mark.parametrize(
    ("line", "is_memory"),
    [("OOM when allocating tensor", True), ("CUDA out of Memory", True), ("BloomEmbedding in room.py: ZOOM", False)],
)
def test_memory_is_named_only_if_it_ran_out(line: str, is_memory: bool) -> None:
    assert any(text.startswith("Memory ran out") for text in explain([line])) is is_memory
