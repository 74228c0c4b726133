"""The error classes as documented: every class, its parents, its attributes and its exit code."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from tf4slurm import errors
from tf4slurm.errors import (
    AuthenticationError,
    CommandError,
    InterfaceError,
    LaunchError,
    MessageError,
    OptionError,
    PlacementError,
    RefusedError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RunDirectoryError,
    SettingsError,
    SlurmEnvironmentError,
    Tf4SlurmError,
)

CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_every_error_is_raised_with_the_facts_of_its_class() -> None:
    for path in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                kind, given = CLASSES[node.func.id], {keyword.arg for keyword in node.keywords}
                facts = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
                required = {name for name in facts if not hasattr(kind, name)}
                assert required <= given <= facts, f"{path}:{node.lineno}"


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_the_root_class(name: str) -> None:
    assert issubclass(CLASSES[name], Tf4SlurmError)


@pytest.mark.parametrize(
    ("error", "builtin", "facts", "exit_code"),
    [
        (Tf4SlurmError("words"), Exception, {}, 3),
        (SlurmEnvironmentError("words", variable="V", value="x"), Exception, {"variable": "V", "value": "x"}, 3),
        (SlurmEnvironmentError("words", variable="V"), Exception, {"variable": "V", "value": None}, 3),
        (InterfaceError("words", interface="ib0", available=("lo",)), Exception, {"available": ("lo",)}, 3),
        (PlacementError("words"), ValueError, {}, 3),
        (CommandError("words", command=("a", "b")), Exception, {"command": ("a", "b")}, 3),
        (RunDirectoryError("words", path="/x"), Exception, {"path": "/x"}, 3),
        (RendezvousError("words"), Exception, {}, 6),
        (RendezvousConnectionError("words", address="h:1"), ConnectionError, {"address": "h:1"}, 6),
        (RendezvousClosedError("words", reason="why"), RendezvousError, {"reason": "why"}, 6),
        (AuthenticationError("words"), RendezvousError, {}, 6),
        (MessageError("words"), ValueError, {}, 3),
        (OptionError("words", option="mem"), ValueError, {"option": "mem"}, 2),
        (SettingsError("words", source="/x"), Exception, {"source": "/x"}, 3),
        (RefusedError("words", command=("sbatch",), returncode=1, stderr="no"), LaunchError, {"stderr": "no"}, 4),
        (LaunchError("words", command=("srun",)), Exception, {"returncode": 0, "stderr": ""}, 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_error_has_its_message_its_attributes_and_its_exit_code(
    error: Tf4SlurmError, builtin: type[Exception], facts: dict[str, object], exit_code: int
) -> None:
    assert str(error) == "words"
    assert isinstance(error, builtin)
    assert {name: getattr(error, name) for name in facts} == facts
    assert error.exit_code == exit_code
