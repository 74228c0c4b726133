"""The table of roles: what each role of a TensorFlow cluster means for a job.

Other modules test these properties instead of comparing the names of roles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """The properties of one role.

    Attributes:
        is_waited_for: The job is done only when every task of this role has exited with 0.
        is_restarted: After a failure, the child is restarted in place, at the same address. A failure of another role
            ends the attempt.
        serves: The task only serves other tasks: it may exit when they no longer need it.
        is_in_cluster: The task has an entry in TensorFlow's cluster spec.
        is_wait_bounded: The job waits for this role only for `finish_timeout_seconds` after the others are done.
        sees_gpus: The child sees the GPUs of its task; otherwise they are hidden from it.
        program: The file of tf4slurm that the child runs, with the script's Python, instead of the user's command.
    """

    is_waited_for: bool
    is_restarted: bool
    serves: bool = False
    is_in_cluster: bool = True
    is_wait_bounded: bool = False
    sees_gpus: bool = False
    program: str = ""


_DATA_SERVER = Role(
    is_waited_for=False,
    is_restarted=True,
    serves=True,
    is_in_cluster=False,
    program="tensorflow/data_service.py",
)
_ROLES = {
    "chief": Role(is_waited_for=True, is_restarted=False),
    "ps": Role(is_waited_for=False, is_restarted=False, serves=True),
    "worker": Role(is_waited_for=False, is_restarted=True, sees_gpus=True),
    "evaluator": Role(is_waited_for=True, is_restarted=True, is_in_cluster=False, is_wait_bounded=True),
    "data-dispatcher": _DATA_SERVER,
    "data-worker": _DATA_SERVER,
}
# Without a chief (between-graph replication) every worker trains, and none can be replaced while the others run.
_LEADING_WORKER = Role(is_waited_for=True, is_restarted=False, sees_gpus=True)

TASK_TYPES = tuple(_ROLES)
"""All roles, in the order in which `place_tasks` assigns ranks."""

SCRIPT_TASK_TYPES = tuple(name for name, role in _ROLES.items() if not role.program)
"""The roles whose tasks run the user's command."""


def role_of(task_type: str, *, has_chief: bool) -> Role:
    """Return the properties of a role; those of a worker depend on whether the job has a chief."""
    if task_type == "worker" and not has_chief:
        return _LEADING_WORKER
    return _ROLES[task_type]
