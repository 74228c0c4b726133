"""Division of a node's GPUs. Recorded steps with GPUs are in test_slurm_captures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tf4slurm.errors import PlacementError
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.slurm.gpus import gpu_environ


@pytest.mark.parametrize(
    ("visible", "sees_gpus", "per_task", "expected"),
    [
        ("23", [True, True], None, ["2", "3"]),
        ("2357", [True, False, True], None, ["23", "", "57"]),
        ("235", [True, True], None, ["23", "5"]),
        ("2357", [True, True, True], None, ["23", "5", "7"]),
        ("23", [True, True, True, True], None, ["2", "2", "3", "3"]),
        ("23", [True, True, True], None, ["2", "2", "3"]),
        ("", [True, True], None, ["", ""]),
        ("23", [False, False], None, ["", ""]),
        ("2357", [True, True], 1, ["2", "3"]),
        ("2357", [False, True], 3, ["", "235"]),
        ("", [True], 0, [""]),
    ],
)
def test_devices_are_divided(visible: str, sees_gpus: list[bool], per_task: int | None, expected: list[str]) -> None:
    lists = {"CUDA_VISIBLE_DEVICES": tuple(visible)}
    environs = [gpu_environ(lists, None, rank, sees_gpus, per_task) for rank in range(len(sees_gpus))]
    found = [environ["CUDA_VISIBLE_DEVICES"] for environ in environs]
    assert found == [",".join(devices) or "-1" for devices in expected]


@pytest.mark.parametrize(
    ("visible", "roles", "per_task", "expected"),
    [
        ("23", "ws", None, ["2", "3"]),
        ("2357", "ws", None, ["23", "57"]),
        ("235", "wws", None, ["2", "3", "5"]),
        ("235", "psw", None, ["", "23", "5"]),
        ("23", "cs", None, ["", "23"]),  # a spare beside a chief, which uses no GPU
        ("2357", "wwss", None, ["2", "3", "5", "7"]),
        ("2357", "ws", 1, ["2", "3"]),
        ("2357", "wsw", 1, ["2", "3", "5"]),
    ],
)
def test_share_of_a_spare_is_its_own_from_the_start(
    visible: str, roles: str, per_task: int | None, expected: list[str]
) -> None:
    """Table: w worker, s spare, p ps, c chief; whichever workers are lost and whichever spares replace them."""
    lists = {"CUDA_VISIBLE_DEVICES": tuple(visible)}

    def share_of(rank: int, now: str) -> str:
        sees_gpus, is_spare = [role == "w" for role in now], [role == "s" for role in now]
        return gpu_environ(lists, len(visible), rank, sees_gpus, per_task, is_spare)["CUDA_VISIBLE_DEVICES"]

    for now in {"".join(each) for each in itertools.product(*("ws" if role in "ws" else role for role in roles))}:
        found = [share_of(rank, now) for rank in range(len(roles))]
        shown = [",".join(devices) if role == "w" else "-1" for role, devices in zip(now, expected, strict=True)]
        assert found == shown, now


@pytest.mark.parametrize(
    ("visible", "roles", "per_task", "expected"),
    [
        ("2", "ws", None, ["2", ""]),
        ("23", "wws", None, ["2", "3", ""]),
        ("23", "ws", 2, ["23", ""]),
        ("23", "sw", 2, ["", "23"]),  # the spare has replaced a worker that had both devices
    ],
)
def test_spares_without_devices_take_none_from_workers(
    visible: str, roles: str, per_task: int | None, expected: list[str]
) -> None:
    lists = {"CUDA_VISIBLE_DEVICES": tuple(visible)}
    sees_gpus, is_spare = [role == "w" for role in roles], [role == "s" for role in roles]
    environs = [gpu_environ(lists, None, rank, sees_gpus, per_task, is_spare) for rank in range(len(roles))]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environs] == [",".join(each) or "-1" for each in expected]


def test_too_many_gpus_per_task_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"2 GPUs for each of 2 tasks are 4, .* the step 3: 4, 5, 7\."):
        gpu_environ({"CUDA_VISIBLE_DEVICES": ("4", "5", "7")}, None, 0, [True, False, True], 2)


def test_gpus_per_task_without_any_gpu_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"2 GPUs for each of 1 tasks are 2, .* the step 0: none\."):
        gpu_environ({}, None, 1, [False, True], 2)


def step(local_rank: int = 0, **variables: str) -> SlurmStep:
    return SlurmStep.from_environ(
        {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(local_rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURMD_NODENAME": "n1",
            **variables,
        }
    )


def environ_of(step: SlurmStep, sees_gpus: Sequence[bool], per_task: int | None = None) -> dict[str, str]:
    return gpu_environ(step.visible_devices, step.gpus_on_node, step.local_rank, sees_gpus, per_task)


def test_each_variable_is_divided() -> None:
    """With device cgroups CUDA counts from 0, ROCm may not; devices may also have names."""
    variables = {
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-d3a1",
        "ROCR_VISIBLE_DEVICES": "6,7",
        "SLURM_GPUS_ON_NODE": "2",
    }
    second = step(1, **variables)
    assert second.gpus == ("GPU-8932f937", "GPU-d3a1")
    assert environ_of(second, [True, True]) == {"CUDA_VISIBLE_DEVICES": "GPU-d3a1", "ROCR_VISIBLE_DEVICES": "7"}
    assert environ_of(second, [False, True], 2) == {
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-d3a1",
        "ROCR_VISIBLE_DEVICES": "6,7",
    }


@pytest.mark.parametrize(
    ("files", "cuda"),
    [(("kfd",), "0,1"), (("nvidiactl", "nvidia0"), "6,7"), (("kfd", "nvidia0"), "6,7"), (("null",), "6,7")],
)
@pytest.mark.parametrize("gpus_on_node", ["4", "6"])
def test_variables_that_select_among_amd_devices_count_from_0(
    tmp_path: Path, files: tuple[str, ...], cuda: str, gpus_on_node: str
) -> None:
    """Slurm and sites set several variables to one list; AMD's runtime applies one to what another one leaves."""
    for name in files:
        (tmp_path / name).touch()
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    own = gpus_on_node == "6"  # the list is of this task alone
    devices = "6,7" if own else "4,5,6,7"
    second = step(1, SLURM_GPUS_ON_NODE=gpus_on_node, **dict.fromkeys(names, devices))
    given = (second.visible_devices, second.gpus_on_node, 1)
    found = gpu_environ(*given, [True, True], devices=tmp_path)
    assert found == {**dict.fromkeys(names, cuda), "ROCR_VISIBLE_DEVICES": "6,7"}
    hidden = gpu_environ(*given, [True, False], devices=tmp_path)
    assert hidden == dict.fromkeys(names, "-1")


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_variable_that_a_user_has_set_for_hip_is_not_divided(tmp_path: Path, name: str) -> None:
    first = step(0, **{name: "0,1,2,3", "HIP_VISIBLE_DEVICES": "0"})
    found = gpu_environ(first.visible_devices, 4, 0, [True, True], 2, devices=tmp_path)
    assert found == {name: "0,1"}


def test_single_variable_of_an_amd_host_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    lists = {"CUDA_VISIBLE_DEVICES": ("2", "3")}
    assert gpu_environ(lists, None, 1, [True, True], devices=tmp_path) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_list_of_one_task_is_kept() -> None:
    own = step(1, CUDA_VISIBLE_DEVICES="2,3", SLURM_GPUS_ON_NODE="4")
    assert environ_of(own, [True, True]) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert environ_of(own, [True, True], 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    with pytest.raises(PlacementError):
        environ_of(own, [True, True], 3)


def test_gpus_are_hidden_from_a_task_that_uses_none() -> None:
    hidden = environ_of(step(ROCR_VISIBLE_DEVICES="0,1"), [False, True])
    assert hidden == {"ROCR_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize("given", [step(), step(CUDA_VISIBLE_DEVICES="")])
def test_without_gpus_no_variable_is_set(given: SlurmStep) -> None:
    assert given.gpus == ()
    assert environ_of(given, [True, True]) == {}


def test_no_device_files_are_no_devices() -> None:
    assert step(CUDA_VISIBLE_DEVICES="NoDevFiles").gpus == ()
    assert environ_of(step(CUDA_VISIBLE_DEVICES="NoDevFiles"), [True]) == {"CUDA_VISIBLE_DEVICES": "-1"}
