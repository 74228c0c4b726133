"""Which TensorFlow each public name of tf4slurm.tensorflow needs, and the functions for Keras 2."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from pathlib import Path

import pytest

import tf4slurm.tensorflow
from tf4slurm.tensorflow.versions import CAPABILITIES, ELASTIC_WORKERS, import_part

PACKAGE = Path(inspect.getfile(tf4slurm.tensorflow)).parent
NAMES = [name for name, module in tf4slurm.tensorflow._MODULE_OF.items() if module.startswith("tf4slurm.tensorflow")]


def test_each_public_name_that_needs_tensorflow_has_its_versions() -> None:
    assert sorted(NAMES) == sorted(CAPABILITIES)


@pytest.mark.parametrize("name", sorted(CAPABILITIES))
def test_older_tensorflow_is_refused_with_both_versions_and_what_works(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(__version__="2.4.4"))
    with pytest.raises(ImportError) as caught:
        getattr(tf4slurm.tensorflow, name)
    capability = CAPABILITIES[name]
    assert str(caught.value) == (
        f"tf4slurm.tensorflow.{name} needs TensorFlow {capability.first} or newer, but this is TensorFlow 2.4.4, with "
        f"which you can use {capability.instead}."
    )


def test_local_cluster_needs_no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert tf4slurm.tensorflow.LocalCluster is not None


@pytest.mark.parametrize(
    ("version", "is_included"),
    [("2.8.4", False), ("2.15.1", False), ("2.16.0rc1", True), ("2.21.0", True), ("2.22.0-dev20261101", False)],
)
def test_versions_are_compared_by_their_first_two_numbers(version: str, is_included: bool) -> None:
    assert ELASTIC_WORKERS.includes(version) is is_included


@pytest.mark.parametrize(("version", "module"), [("2.15.1", "keras2"), ("2.16.2", "keras3")])
def test_keras_of_the_version_decides_the_module(monkeypatch: pytest.MonkeyPatch, version: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(__version__=version))
    for each in ("keras2", "keras3"):
        monkeypatch.setitem(sys.modules, f"tf4slurm.tensorflow.{each}", types.SimpleNamespace(fit=each))
    assert import_part("fit", "tf4slurm.tensorflow.keras3") == module


@pytest.mark.parametrize(
    ("name", "path"), [("fit", "keras/fit.py"), ("evaluate", "keras/evaluation.py"), ("predict", "keras/evaluation.py")]
)
def test_functions_for_keras_2_have_the_arguments_of_those_for_keras_3(name: str, path: str) -> None:
    names, defaults = zip(*(_read_arguments(PACKAGE / each, name) for each in ("keras2.py", path)), strict=True)
    assert names[0] == names[1]
    assert defaults[0] == defaults[1]


def _read_arguments(path: Path, function: str) -> tuple[list[str], list[str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    names = [each.arg for each in (*found.args.args, *found.args.kwonlyargs)]
    return names, [ast.unparse(each) for each in found.args.kw_defaults if each is not None]
