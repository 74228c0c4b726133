"""Checks of Keras and Python. The facts about tf_keras, which is not installed here, are recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tf4slurm.doctor.software import check_keras, check_python, find_facts

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
NO_TF_KERAS = "ImportError: Keras cannot be imported. Check that it is installed.\nmore"


@pytest.mark.parametrize(
    ("facts", "environ", "level", "words", "advice"),
    [
        ({"keras": "3.15.1"}, {}, "warn", "Keras 3.15.1: Model.fit fails", "tf4slurm.tensorflow.fit"),
        ({"keras": "2.21.0"}, LEGACY, "ok", "Model.fit works", ""),
        ({"keras_error": NO_TF_KERAS}, LEGACY, "fail", "Check that it is installed.", "tf_keras~=2.21.0"),
        ({"keras_error": NO_TF_KERAS}, {}, "fail", "does not load", "pip install keras"),
    ],
)
def test_keras(facts: dict[str, Any], environ: dict[str, str], level: str, words: str, advice: str) -> None:
    found = check_keras({"version": "2.21.0", **facts}, environ)
    assert found.level == level
    assert words in found.text
    assert advice in found.advice


FACTS = '{"version": "2.21.0", "seconds": 3.14, "keras": "3.15.1", "grpcio": "1.80.0", "protobuf": "6.33.0"}'


@pytest.mark.parametrize(
    ("output", "version"),
    [
        (f"loading\n\n{FACTS}\n", "2.21.0"),
        (f"{FACTS}\nbye\n{{1}}\n{{}}\n", "2.21.0"),
        ("", None),
        ("{no json}\n[]\n7\n", None),
    ],
)
def test_facts_are_found_among_other_output(output: str, version: str | None) -> None:
    facts = find_facts(output)
    assert (facts["version"] if facts is not None else None) == version


def test_no_python_on_path_is_ok() -> None:
    assert check_python({"PATH": "/nowhere"}).level == "ok"
