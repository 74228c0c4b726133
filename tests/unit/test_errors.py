"""The error classes as documented: every class, its parents, its facts and its exit code."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from tf4slurm import errors
from tf4slurm.errors import LaunchError, RefusedError, SlurmEnvironmentError, Tf4SlurmError

CLASSES: dict[str, Any] = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


FACTS: dict[str, dict[str, Any]] = {
    "SlurmEnvironmentError": {"variable": "SLURM_JOB_ID"},
    "NodelistError": {"nodelist": "n[", "position": 1},
    "CommandError": {"command": ("train",)},
    "RendezvousClosedError": {"reason": "ended"},
    "ShutdownTimeoutError": {"missing": ("worker/1",)},
    "JobStateError": {"job": "4711", "state": "RUNNING"},
    "WaitTimeoutError": {"jobs": ("4711",)},
    "OptionError": {"option": "ps"},
    "MissingDependencyError": {"package": "matplotlib"},
    "SettingsError": {"source": "config.toml"},
    "LaunchError": {"command": ("srun",)},
    "RefusedError": {"command": ("sbatch",)},
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_the_root_class(name: str) -> None:
    assert issubclass(CLASSES[name], Tf4SlurmError)


@pytest.mark.parametrize(
    ("name", "parent", "exit_code"),
    [
        ("Tf4SlurmError", Exception, 3),
        ("SlurmEnvironmentError", Exception, 3),
        ("NodelistError", ValueError, 2),
        ("PlacementError", ValueError, 2),
        ("PortsInUseError", errors.PlacementError, 3),
        ("CommandError", Exception, 2),
        ("RendezvousError", Exception, 6),
        ("RendezvousTimeoutError", TimeoutError, 6),
        ("RendezvousConnectionError", ConnectionError, 6),
        ("RendezvousClosedError", errors.RendezvousError, 6),
        ("AuthenticationError", errors.RendezvousError, 6),
        ("ShutdownTimeoutError", TimeoutError, 7),
        ("ParameterServerLostError", errors.TrainingError, 7),
        ("UnknownJobError", Exception, 5),
        ("NoLogsError", errors.UnknownTaskError, 1),
        ("JobStateError", Exception, 2),
        ("WaitTimeoutError", TimeoutError, 124),
        ("MessageError", ValueError, 3),
        ("OptionError", ValueError, 2),
        ("MissingDependencyError", ImportError, 3),
        ("SettingsError", Exception, 2),
        ("LaunchError", Exception, 3),
        ("RefusedError", LaunchError, 4),
    ],
)
def test_error_has_its_message_its_parent_and_its_exit_code(name: str, parent: type[Exception], exit_code: int) -> None:
    error = CLASSES[name]("words", **FACTS.get(name, {}))
    assert (str(error), error.exit_code) == ("words", exit_code)
    assert isinstance(error, parent)


def test_facts_are_declared_have_defaults_and_survive_pickling() -> None:
    error: SlurmEnvironmentError = pickle.loads(pickle.dumps(SlurmEnvironmentError("words", variable="V")))
    assert (str(error), error.variable, error.value) == ("words", "V", None)
    with pytest.raises(TypeError, match="variable"):
        SlurmEnvironmentError("words")  # type: ignore[call-arg]
    refused = RefusedError("words", command=("sbatch",), returncode=1)
    assert (refused.command, refused.returncode, refused.stderr) == (("sbatch",), 1, "")
