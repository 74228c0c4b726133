"""Arguments of Keras's fit, evaluate and predict that ours do not have, and class weights."""

from __future__ import annotations

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of this name that has the decorator and returns its arguments."""
    from tf4slurm.tensorflow.keras.arguments import explain_keras_arguments

    def function(model: Any, data: Any, *, epochs: int = 1) -> Any:
        return model, data, epochs

    function.__name__ = name
    return explain_keras_arguments(function)(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fit", {"shuffle": False, "validation_split": 0.0, "batch_size": None, "y": None, "sample_weight": None}),
        ("evaluate", {"return_dict": True, "y": None}),
        ("predict", {"verbose": 0, "callbacks": None}),
        ("predict", {"verbose": "auto"}),
    ],
)
def test_argument_that_changes_nothing_is_accepted(name: str, options: dict[str, Any]) -> None:
    assert call(name, "model", "data", epochs=3, **options) == ("model", "data", 3)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "fit",
            {"batch_size": 32},
            r"fit\(\) has no argument batch_size. Let dataset_fn return batches: dataset.batch",
        ),
        ("fit", {"shuffle": True}, r"fit\(\) has no argument shuffle. Let dataset_fn shuffle the rows"),
        ("fit", {"y": tf.ones(3)}, r"fit\(\) has no argument y. Let dataset_fn return a dataset of pairs"),
        (
            "fit",
            {"sample_weight": [1, 2]},
            r"argument sample_weight. Let dataset_fn return a dataset of \(inputs, targe",
        ),
        ("fit", {"validation_split": 0.2}, "argument validation_split. Give the rows for the validation"),
        ("fit", {"workers": 4}, "argument workers. Leave it out"),
        ("fit", {"epoch": 4}, "unexpected keyword argument 'epoch'"),
        ("evaluate", {"return_dict": False}, r"evaluate\(\) has no argument return_dict. The result is always a dict"),
        ("evaluate", {"sample_weight": [1]}, r"Give the data as \(inputs, targets, weights\)"),
        ("predict", {"verbose": 1}, r"predict\(\) has no argument verbose. Nothing is printed"),
    ],
)
def test_other_argument_is_refused_by_a_sentence(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(name, "model", "data", **options)


def test_targets_without_a_name_are_refused_by_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"fit\(\) takes two arguments without a name. Let dataset_fn return a dataset"):
        call("fit", "model", [1.0], [2.0])


@pytest.mark.parametrize(
    ("targets", "weights"),
    [
        ([0, 1, 2, 3, 9], [0.5, 1, 3, 1, 1]),
        ([0.0, 2.0], [0.5, 3]),
        ([[0], [2]], [0.5, 3]),
        ([[0, 0, 1], [0, 1, 0]], [3, 1]),
    ],
)
def test_each_row_has_the_weight_of_its_class(targets: list[Any], weights: list[float]) -> None:
    from tf4slurm.tensorflow.keras.arguments import weight_classes

    rows = tf.data.Dataset.from_tensor_slices((tf.zeros(len(targets)), targets)).batch(10)
    for dataset in (rows, lambda: rows):
        ((_, given, found),) = weight_classes(dataset, {0: 0.5, 2: 3})()
        assert given.numpy().tolist() == targets
        assert found.numpy().tolist() == weights


@pytest.mark.parametrize(
    ("class_weight", "error", "words"),
    [
        ([1.0, 2.0], TypeError, r"class_weight is \[1.0, 2.0\]: expected a dict of weights by class"),
        ({}, ValueError, "class_weight is {}: expected the numbers of classes"),
        ({"cat": 2.0}, ValueError, "expected the numbers of classes, from 0, as keys"),
        ({-1: 2.0}, ValueError, "expected the numbers of classes, from 0, as keys"),
        ({0: 2.0}, ValueError, "class_weight needs a dataset of pairs"),
    ],
)
def test_invalid_class_weight_is_refused(class_weight: Any, error: type[Exception], words: str) -> None:
    from tf4slurm.tensorflow.keras.arguments import weight_classes

    with pytest.raises(error, match=words):
        weight_classes(tf.data.Dataset.from_tensor_slices([1.0]), class_weight)()
