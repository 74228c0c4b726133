"""The table of roles. Other modules test the properties of a role instead of comparing names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """The properties of one role.

    Attributes:
        is_waited_for: The job is done only when every task of this role has exited with 0.
        is_restarted: A failed child is restarted in place, at the same address; else a failure ends the attempt.
        is_server: The task only serves other tasks, and may exit when they no longer need it.
        is_in_cluster: The task has an entry in TensorFlow's cluster spec.
        is_wait_bounded: After the other tasks are done, the job waits at most `finish_timeout_seconds` for this role.
        sees_gpus: The task's GPUs are visible to the child; else they are hidden.
        program: The program of tf4slurm that the child runs; empty for the user's command.
        is_spare: The task runs nothing until it takes the place of a lost task.
        is_guest: The task has joined the running job, and may leave at any time without harm.
    """

    is_waited_for: bool
    is_restarted: bool
    is_server: bool = False
    is_in_cluster: bool = True
    is_wait_bounded: bool = False
    sees_gpus: bool = False
    program: str = ""
    is_spare: bool = False
    is_guest: bool = False


_DATA_SERVER = Role(
    is_waited_for=False,
    is_restarted=True,
    is_server=True,
    is_in_cluster=False,
    program="tensorflow/data_service.py",
)
_ROLES = {
    "chief": Role(is_waited_for=True, is_restarted=False),
    "ps": Role(is_waited_for=False, is_restarted=False, is_server=True),
    "worker": Role(is_waited_for=False, is_restarted=True, sees_gpus=True),
    "evaluator": Role(is_waited_for=True, is_restarted=True, is_in_cluster=False, is_wait_bounded=True),
    "data-dispatcher": _DATA_SERVER,
    "data-worker": _DATA_SERVER,
    "spare": Role(is_waited_for=False, is_restarted=False, is_in_cluster=False, is_spare=True),
}
# Without a chief every worker trains by itself, and cannot be replaced while the others run.
_LEADING_WORKER = Role(is_waited_for=True, is_restarted=False, sees_gpus=True)
GUEST_WORKER = dataclasses.replace(_ROLES["worker"], is_guest=True)

TASK_TYPES = tuple(_ROLES)
"""All roles, in the order of `place_tasks`."""

SCRIPT_TASK_TYPES = tuple(name for name, role in _ROLES.items() if not (role.program or role.is_spare))
"""The roles whose tasks run the user's command."""


def can_grow(counts: Mapping[str, int]) -> bool:
    """Whether workers can join a running job with these roles: a chief gives them work, and variables are on ps."""
    return bool(counts.get("chief") and counts.get("ps"))


def role_of(task_type: str, *, has_chief: bool) -> Role:
    """Return the properties of a role; those of a worker depend on whether the job has a chief."""
    if task_type == "worker" and not has_chief:
        return _LEADING_WORKER
    return _ROLES[task_type]
