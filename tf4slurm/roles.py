"""What each role of a TensorFlow cluster means for the life of a job, as data.

Nothing else in tf4slurm asks for a role by name: it asks for one of these properties.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """The policy of one role.

    Attributes:
        is_waited_for: The job is done only when every task of this role has exited with 0.
        is_wait_bounded: Waited for a limited time only, after the other waited tasks are done.
        is_restarted: A crash restarts the child in place, at the same address; any other crash costs an attempt.
        serves: It only serves the others: it may go when they need it no more.
        is_in_cluster: It has an entry in TensorFlow's cluster spec.
        sees_gpus: Its child sees the GPUs of its task; else they are hidden from it.
        program: A file of tf4slurm that its child runs, with the script's Python, in place of the user's command.
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
# Between-graph replication: worker 0 leads, every worker trains, and none can be replaced while the others run.
_LEADING_WORKER = Role(is_waited_for=True, is_restarted=False, sees_gpus=True)

TASK_TYPES = tuple(_ROLES)
"""The roles, in the order in which `place_tasks` gives them ranks."""

SCRIPT_TASK_TYPES = tuple(name for name, role in _ROLES.items() if not role.program)
"""Those whose tasks run the user's command."""


def role_of(task_type: str, *, has_chief: bool) -> Role:
    """Return the policy of a role; a worker means something else where the job has no chief."""
    if task_type == "worker" and not has_chief:
        return _LEADING_WORKER
    return _ROLES[task_type]
