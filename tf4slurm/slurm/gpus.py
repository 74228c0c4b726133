"""Which GPUs each task of a node uses. Slurm's own list is divided, never replaced by 0, 1, ...: these may be others'.

To call `gpu_environ` an agent must know its own step, and of each task on its node, in local-rank order, whether its
role sees GPUs: it has both once the map of the job is known to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tf4slurm.errors import PlacementError
from tf4slurm.slurm.step import SlurmStep

_HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def hidden_gpus() -> dict[str, str]:
    """Return the variables that hide all GPUs from a process."""
    return dict(_HIDDEN)


def divide_gpus(
    visible: Sequence[str], sees_gpus: Sequence[bool], per_task: int | None = None
) -> tuple[tuple[str, ...], ...]:
    """Divide the devices that all tasks of a node see among those that are to use them, in local-rank order.

    Args:
        visible: The devices, as Slurm names them: ("2", "3").
        sees_gpus: For each task of the node, by local rank, whether it is to use GPUs.
        per_task: How many each of these gets; None for all devices, divided as evenly as can be: with more devices
            than tasks the first tasks get one more, with fewer neighbours share one.

    Returns:
        The devices of each task of the node; () for a task that is to use none.

    Raises:
        PlacementError: There are fewer devices than `per_task` for each.
    """
    num_users = sum(sees_gpus)
    if per_task is not None and per_task * num_users > len(visible):
        raise PlacementError(
            f"{per_task} GPUs for each of {num_users} tasks are {per_task * num_users}, but this node gives the step "
            f"{len(visible)}: {', '.join(visible) or 'none'}. Ask Slurm for more per node, or for fewer per task.",
            requested=per_task * num_users,
            available=len(visible),
        )
    shares = iter(_share(visible, index, num_users, per_task) for index in range(num_users))
    return tuple(next(shares) if sees else () for sees in sees_gpus)


def gpu_environ(step: SlurmStep, sees_gpus: Sequence[bool], per_task: int | None = None) -> dict[str, str]:
    """Return the variables that show the child of this task its GPUs, to be added to the task's environment.

    Args:
        sees_gpus: For each task of the node, by local rank, whether its role uses GPUs.
        per_task: How many GPUs each of these is to use; None for all that there are.

    Raises:
        PlacementError: There are fewer than `per_task`.
    """
    return share_environ(step.visible_devices, step.gpus_on_node, step.local_rank, sees_gpus, per_task)


def share_environ(
    visible_devices: Mapping[str, Sequence[str]],
    on_node: int | None,
    local_rank: int,
    sees_gpus: Sequence[bool],
    per_task: int | None = None,
) -> dict[str, str]:
    """Do what `gpu_environ` does, for a task whose local rank is not only Slurm's to say.

    A list shorter than the step's GPUs on this node was made by Slurm for this task alone (--gpus-per-task, --gpu-bind)
    and is kept; else all tasks of the node see the same list, and it is divided. Every variable that Slurm set is
    divided in the same way, whether or not it counts from 0.
    """
    if not sees_gpus[local_rank]:
        return {**dict.fromkeys(visible_devices, "-1"), **_HIDDEN}
    devices: dict[str, str] = {}
    for variable, visible in visible_devices.items():
        if is_own_list(visible, on_node):
            (own,) = divide_gpus(visible, [True], per_task)
        else:
            own = divide_gpus(visible, sees_gpus, per_task)[local_rank]
        devices[variable] = ",".join(own) or "-1"
    return devices


def is_own_list(visible: Sequence[str], on_node: int | None) -> bool:
    """Whether Slurm made a list of devices for one task, and not for all tasks of the node."""
    return on_node is not None and len(visible) < on_node


def _share(visible: Sequence[str], index: int, num_users: int, per_task: int | None) -> tuple[str, ...]:
    if per_task is not None:
        return tuple(visible[index * per_task : (index + 1) * per_task])
    if len(visible) < num_users:
        return tuple(visible[index * len(visible) // num_users :][:1])
    size, more = divmod(len(visible), num_users)
    start = index * size + min(index, more)
    return tuple(visible[start : start + size + (index < more)])
