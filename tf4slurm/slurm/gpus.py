"""Divide Slurm's list of GPUs among the tasks of a node. GPUs that are not in this list may belong to other jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from tf4slurm.errors import PlacementError

HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
"""Environment variables and the values that hide all GPUs from a process."""

_OFTEN_SET_BY_USERS = "HIP_VISIBLE_DEVICES"
"""A variable that users set in their shell profiles. It is ignored unless another variable has the same list.

If the lists are the same, Slurm has set both variables.
"""

_AMD_DEVICES = "ROCR_VISIBLE_DEVICES"
_AMD_NUMBERS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables that HIP and OpenCL read after ROCR_VISIBLE_DEVICES.

Their numbers are positions among the devices in ROCR_VISIBLE_DEVICES (https://github.com/pytorch/pytorch/pull/142292).
"""


def has_amd_gpus(devices: Path) -> bool:
    """Return whether the directory of device files has AMD's compute driver (kfd), and no NVIDIA GPU."""
    return (devices / "kfd").exists() and not any(devices.glob("nvidia[0-9]*"))


def gpu_environ(
    visible_devices: Mapping[str, Sequence[str]],
    gpus_on_node: int | None,
    local_rank: int,
    sees_gpus: Sequence[bool],
    per_task: int | None = None,
    is_spare: Sequence[bool] = (),
    devices: Path = Path("/dev"),
) -> dict[str, str]:
    """Return the environment variables that assign GPUs to the child process of a task.

    The result hides all GPUs from a task that uses none. Otherwise it has a list for each variable that Slurm set. If
    Slurm made the list for this task alone, all its devices are this task's. A list for all tasks of the node is
    divided among the tasks that use GPUs. On AMD GPUs, ROCR_VISIBLE_DEVICES has the devices, and the other variables
    have positions in this list.

    Devices are reserved for a spare from the start, because it may become a worker while the other tasks run. The lost
    worker whose role the spare takes keeps its devices, too, so that no task's devices change within an attempt. If
    there are too few devices for the spares, the workers divide all devices. A spare that becomes a worker then shares
    a device with a worker.

    Args:
        visible_devices: Slurm's names of the devices by variable, such as {"CUDA_VISIBLE_DEVICES": ("2", "3")}.
        gpus_on_node: Number of GPUs of the step on this node; None if unknown.
        local_rank: The task's 0-based rank on its node.
        sees_gpus: For each task of the node, by local rank: whether it uses GPUs in its present role.
        per_task: Number of devices per task. If Slurm made the list for this task alone, the task gets the first ones.
            None divides all devices evenly. The devices that remain go to the first tasks, one to each. If there are
            fewer devices than tasks, neighbouring tasks share a device.
        is_spare: For each task of the node, by local rank: whether it is a spare, or is lost and has exchanged its role
            with a spare. Empty without spares.
        devices: Directory of the device files, which show whether the GPUs are AMD's.

    Raises:
        PlacementError: There are too few devices for `per_task` per task.
    """
    if not sees_gpus[local_rank]:
        return {**dict.fromkeys(visible_devices, "-1"), **HIDDEN_GPUS}
    if per_task is not None and not visible_devices:
        _share((), 0, sum(sees_gpus), per_task)  # raises PlacementError: there are no devices
    environ = {}
    for variable, visible in visible_devices.items():
        if variable == _OFTEN_SET_BY_USERS and list(visible_devices.values()).count(visible) == 1:
            continue
        if is_list_of_one_task(visible, gpus_on_node):
            share = _share(visible, 0, 1, per_task)
        else:
            users = [sees or spare for sees, spare in zip_longest(sees_gpus, is_spare, fillvalue=False)]
            if sum(users) * (1 if per_task is None else per_task) > len(visible):
                users = list(sees_gpus)
            share = _share(visible, sum(users[:local_rank]), sum(users), per_task)
        environ[variable] = ",".join(share) or "-1"
    if environ.get(_AMD_DEVICES, "-1") != "-1" and has_amd_gpus(devices):
        positions = ",".join(map(str, range(environ[_AMD_DEVICES].count(",") + 1)))
        environ.update((name, positions) for name in _AMD_NUMBERS if name in environ)
    return environ


def is_list_of_one_task(visible: Sequence[str], gpus_on_node: int | None) -> bool:
    """Return whether Slurm made a list of GPUs for one task (--gpus-per-task, --gpu-bind).

    This is assumed of a list with fewer GPUs than the step has on the node. If that number is unknown, the result is
    False.
    """
    return gpus_on_node is not None and len(visible) < gpus_on_node


def _share(visible: Sequence[str], index: int, num_users: int, per_task: int | None) -> Sequence[str]:
    """Return the devices of the task at position `index` among the `num_users` tasks that share the list `visible`.

    `per_task` is the number of devices per task. None divides them evenly, as `gpu_environ` describes.

    Raises:
        PlacementError: There are too few devices for `per_task` per task.
    """
    if per_task is not None:
        if per_task * num_users > len(visible):
            raise PlacementError(
                f"{per_task} GPUs for each of {num_users} tasks are {per_task * num_users}, but this node gives the "
                f"step {len(visible)}: {', '.join(visible) or 'none'}. Request more GPUs per node, or fewer per task."
            )
        return visible[index * per_task : (index + 1) * per_task]
    if len(visible) < num_users:
        return visible[index * len(visible) // num_users :][:1]
    size, more = divmod(len(visible), num_users)
    start = index * size + min(index, more)
    return visible[start : start + size + (index < more)]
