"""The table of roles."""

from __future__ import annotations

from pathlib import Path

import pytest

import tf4slurm
from tf4slurm.roles import SCRIPT_TASK_TYPES, TASK_TYPES, Role, role_of


def test_ranks_are_assigned_in_the_order_of_the_table() -> None:
    assert TASK_TYPES == ("chief", "ps", "worker", "evaluator", "data-dispatcher", "data-worker", "spare")
    assert SCRIPT_TASK_TYPES == ("chief", "ps", "worker", "evaluator")


@pytest.mark.parametrize(
    ("task_type", "has_chief", "waited", "bounded", "restarted", "in_cluster", "gpus"),
    [
        ("chief", True, True, False, False, True, False),
        ("ps", True, False, False, False, True, False),
        ("ps", False, False, False, False, True, False),
        ("worker", True, False, False, True, True, True),
        ("worker", False, True, False, False, True, True),
        ("evaluator", True, True, True, True, False, False),
        ("evaluator", False, True, True, True, False, False),
        ("data-dispatcher", True, False, False, True, False, False),
        ("data-worker", False, False, False, True, False, False),
    ],
)
def test_properties_of_each_role(
    task_type: str, has_chief: bool, waited: bool, bounded: bool, restarted: bool, in_cluster: bool, gpus: bool
) -> None:
    assert role_of(task_type, has_chief=has_chief) == Role(
        is_waited_for=waited,
        is_wait_bounded=bounded,
        is_restarted=restarted,
        is_in_cluster=in_cluster,
        is_server=task_type == "ps" or task_type.startswith("data-"),
        sees_gpus=gpus,
        program="tensorflow/data_service.py" if task_type.startswith("data-") else "",
    )


def test_module_that_replaces_the_users_command_exists() -> None:
    package = Path(tf4slurm.__file__).parent
    for task_type in set(TASK_TYPES) - {*SCRIPT_TASK_TYPES, "spare"}:
        assert (package / role_of(task_type, has_chief=True).program).is_file()


def test_unknown_role_is_refused() -> None:
    with pytest.raises(KeyError):
        role_of("master", has_chief=True)
