"""Real last lines of TensorFlow and Keras: what is kept of them, and what they are said to mean."""

from __future__ import annotations

import re

import pytest

from tf4slurm.agent.child_log import LastLines
from tf4slurm.jobs.known_errors import explain

KERAS = '  File "/venv/lib/python3.11/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler'
PER_REPLICA = f"""Traceback (most recent call last):
{KERAS}
    raise e.with_traceback(filtered_tb) from None
ValueError: Attempt to convert a value (PerReplica:{{
  0: <tf.Tensor: shape=(16, 784), dtype=float32, numpy=
array([[0., 0., 0., ..., 0., 0., 0.],
       [0., 0., 0., ..., 0., 0., 0.],
       [0., 0., 0., ..., 0., 0., 0.],
       ...,
       [1., 0., 0., ..., 0., 0., 0.],
       [0., 0., 0., ..., 0., 0., 0.]], shape=(16, 784), dtype=float32)>
}}) with an unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor."""


def kept(text: str) -> list[str]:
    last = LastLines()
    for line in text.splitlines():
        last.append(line)
    return list(last.to_tuple())


def test_of_a_tensor_the_first_numbers_are_kept() -> None:
    lines = PER_REPLICA.splitlines()
    assert kept(PER_REPLICA) == [*lines[:7], "[… 4 lines of numbers]", lines[-1]]


def test_a_tensor_of_a_thousand_lines_does_not_push_the_error_out() -> None:
    numbers = "\n".join(f" [{row} {row + 0.5} -1e-05 nan]" for row in range(1000))
    lines = kept(f"Traceback\n[[0 0.5]\n{numbers}]\nValueError: no")
    assert lines == ["Traceback", "[[0 0.5]", " [0 0.5 -1e-05 nan]", "[… 999 lines of numbers]", "ValueError: no"]


def test_a_tensor_on_one_line_is_shortened_so_that_what_follows_is_kept() -> None:
    (line,) = kept(f"ValueError: [[{'0. ' * 5000}1.]] is not finite, step 7")
    assert line == "ValueError: [[" + "0. " * 8 + "[…] is not finite, step 7"


@pytest.mark.parametrize(
    "text",
    [
        "1\n2",
        "epoch 1 2 3\nepoch 2 3 4\nepoch 4 5 6",
        "2026-11-22 20:31:25.485568: I 0 1 2",
        "a, b, c, 1, 2, 3, 4, 5, 6, 7",
    ],
)
def test_other_lines_stay_as_they_are(text: str) -> None:
    assert kept(text) == text.splitlines()


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
def test_a_known_failure_has_one_line_of_cause_and_what_to_do(text: str, meaning: str) -> None:
    (said,) = explain(kept(text))
    assert meaning in said
    assert "\n" not in said
    assert re.search(r"Take|pip install|Import|Start|Run", said) or "start the job from" in said


def test_a_dataset_of_ones_own_loop_is_not_taken_for_keras_fit() -> None:
    assert explain(["ValueError: … pass this dataset to ClusterCoordinator.create_per_worker_dataset."]) == []


@pytest.mark.parametrize(
    ("line", "is_memory"),
    [("OOM when allocating tensor", True), ("CUDA out of Memory", True), ("BloomEmbedding in room.py: ZOOM", False)],
)
def test_memory_is_named_only_where_it_ran_out(line: str, is_memory: bool) -> None:
    assert any(said.startswith("Memory ran out") for said in explain([line])) is is_memory
