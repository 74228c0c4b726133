"""The table of roles. Where that is possible, code tests the properties of a role instead of its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """The properties of all tasks of one role. `control/rules.py` has the consequences of an exit or loss, by role.

    Most task types have one role each. A task of the type "worker" has one of three roles. The two task types of the
    tf.data service have the same role.

    Attributes:
        name: The role in the tables of rules: the task type, or "leading worker" (a worker of a job without a chief),
            "joined worker" or "data server" (of the tf.data service).
        runs_script: The child runs the user's command.
        trains: The ps must run until the task has finished training. Not set for a joined worker, which may leave.
        is_waited_for: The job is done only when every task of this role has finished or is not restarted any more.
        is_wait_bounded: After the other tasks are done, the job waits at most `JobSpec.finish_timeout_seconds` for this
            role.
        is_server: The task only serves other tasks, and may exit when they no longer need it.
        is_in_cluster: The task has an entry in TensorFlow's cluster spec.
        sees_gpus: The task's GPUs are visible to the child. Otherwise they are hidden.
        program: The program of tf4slurm that the child runs in place of the user's command, a path in the package.
        is_spare: The task runs nothing until it takes the place of a lost task.
        has_joined: The task has joined the running job, and may leave at any time without harm.
    """

    name: str
    runs_script: bool = False
    trains: bool = False
    is_waited_for: bool = False
    is_wait_bounded: bool = False
    is_server: bool = False
    is_in_cluster: bool = False
    sees_gpus: bool = False
    program: str = ""
    is_spare: bool = False
    has_joined: bool = False

    @property
    def is_leader(self) -> bool:
        """Whether training ends with these tasks: the chief or, in a job without a chief, the workers."""
        return self.trains and self.is_waited_for


_WORKER = Role("worker", runs_script=True, trains=True, is_in_cluster=True, sees_gpus=True)
_DATA_SERVER = Role("data server", is_server=True, program="tensorflow/data_service.py")
_ROLES = {
    "chief": Role("chief", runs_script=True, trains=True, is_waited_for=True, is_in_cluster=True),
    "ps": Role("ps", runs_script=True, is_server=True, is_in_cluster=True),
    "worker": _WORKER,
    "evaluator": Role("evaluator", runs_script=True, is_waited_for=True, is_wait_bounded=True),
    "data-dispatcher": _DATA_SERVER,
    "data-worker": _DATA_SERVER,
    "spare": Role("spare", is_spare=True),
}
# Without a chief every worker trains by itself, and cannot be replaced while the others run.
LEADING_WORKER = dataclasses.replace(_WORKER, name="leading worker", is_waited_for=True)
JOINED_WORKER = dataclasses.replace(_WORKER, name="joined worker", trains=False, has_joined=True)

ROLES = (*dict.fromkeys(_ROLES.values()), LEADING_WORKER, JOINED_WORKER)
"""All roles, each once."""

TASK_TYPES = tuple(_ROLES)
"""All task types, in the order in which placement "pack" assigns them to the ranks."""

SCRIPT_TASK_TYPES = tuple(task_type for task_type, role in _ROLES.items() if role.runs_script)
"""The task types whose tasks run the user's command."""


def can_grow(counts: Mapping[str, int]) -> bool:
    """Return whether workers can join a job while it runs: it needs a chief and a ps. `counts` is by task type."""
    return bool(counts.get("chief") and counts.get("ps"))


def role_of(task_type: str, *, has_chief: bool) -> Role:
    """Return the role of the tasks of this type that belong to the job from its start.

    A worker is a leading worker if the job has no chief.
    """
    if task_type == "worker" and not has_chief:
        return LEADING_WORKER
    return _ROLES[task_type]
