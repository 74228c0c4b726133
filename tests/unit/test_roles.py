"""The table of roles."""

from __future__ import annotations

from pathlib import Path

import pytest

import tf4slurm
from tf4slurm.roles import SCRIPT_TASK_TYPES, TASK_TYPES, role_of


def test_ranks_are_assigned_in_the_order_of_the_table() -> None:
    assert TASK_TYPES == ("chief", "ps", "worker", "evaluator", "data-dispatcher", "data-worker", "spare")
    assert SCRIPT_TASK_TYPES == ("chief", "ps", "worker", "evaluator")


PROPERTIES = "runs_script trains is_waited_for is_wait_bounded is_server is_in_cluster sees_gpus is_spare has_joined"


@pytest.mark.parametrize(
    ("task_type", "has_chief", "name", "true"),
    [
        ("chief", True, "chief", "runs_script trains is_waited_for is_in_cluster"),
        ("ps", True, "ps", "runs_script is_server is_in_cluster"),
        ("ps", False, "ps", "runs_script is_server is_in_cluster"),
        ("worker", True, "worker", "runs_script trains is_in_cluster sees_gpus"),
        ("worker", False, "leading worker", "runs_script trains is_waited_for is_in_cluster sees_gpus"),
        ("evaluator", True, "evaluator", "runs_script is_waited_for is_wait_bounded"),
        ("evaluator", False, "evaluator", "runs_script is_waited_for is_wait_bounded"),
        ("data-dispatcher", True, "data server", "is_server"),
        ("data-worker", False, "data server", "is_server"),
        ("spare", True, "spare", "is_spare"),
    ],
)
def test_properties_of_each_role(task_type: str, has_chief: bool, name: str, true: str) -> None:
    role = role_of(task_type, has_chief=has_chief)
    assert role.name == name
    assert [each for each in PROPERTIES.split() if getattr(role, each)] == true.split()
    assert role.program == ("tensorflow/data_service.py" if name == "data server" else "")


def test_module_that_replaces_the_users_command_exists() -> None:
    package = Path(tf4slurm.__file__).parent
    for task_type in set(TASK_TYPES) - {*SCRIPT_TASK_TYPES, "spare"}:
        assert (package / role_of(task_type, has_chief=True).program).is_file()


def test_unknown_role_is_refused() -> None:
    with pytest.raises(KeyError):
        role_of("master", has_chief=True)
