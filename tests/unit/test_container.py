"""The command of a task in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tf4slurm.agent.container import container_command
from tf4slurm.errors import CommandError, OptionError
from tf4slurm.launch.checks import check_command
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec

COMMAND = ("python", "train.py")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A PATH with a program `singularity`, which is not called."""
    program = tmp_path / "bin" / "singularity"
    program.parent.mkdir()
    program.touch(0o755)
    return {"PATH": str(program.parent)}


def test_command_sees_the_paths_and_the_working_directory(tmp_path: Path, environ: dict[str, str]) -> None:
    words = container_command("tf.sif", COMMAND, [Path("/runs/a")], environ, sees_gpus=False)
    here = os.getcwd()
    program = str(tmp_path / "bin" / "singularity")
    assert words == (program, "exec", "--bind", "/runs/a", "--bind", here, "--pwd", here, "tf.sif", *COMMAND)


@pytest.mark.parametrize(("device", "option"), [("/dev/nvidiactl", "--nv"), ("/dev/kfd", "--rocm")])
def test_driver_of_the_gpus_is_brought_in_for_tasks_that_use_them(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, device: str, option: str
) -> None:
    exists = os.path.exists
    monkeypatch.setattr("os.path.exists", lambda path: path == device or exists(path))
    assert container_command("i", COMMAND, (), environ, sees_gpus=True)[2] == option
    assert option not in container_command("i", COMMAND, (), environ, sees_gpus=False)


def test_missing_program_is_named_with_the_host() -> None:
    with pytest.raises(CommandError, match=f"needs Apptainer or Singularity on PATH of {os.uname().nodename}"):
        container_command("tf.sif", COMMAND, (), {"PATH": "/nowhere"}, sees_gpus=False)


@pytest.mark.parametrize("path", ["/runs/a,b", "/runs/a:b"])
def test_path_that_bind_would_split_is_refused(environ: dict[str, str], path: str) -> None:
    with pytest.raises(CommandError, match=f"cannot have the directory '{path}'"):
        container_command("tf.sif", COMMAND, [Path(path)], environ, sees_gpus=False)


def test_missing_image_is_refused_but_not_an_address(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"image .*tf\.sif' of --container does not exist"):
        check_command(JobSpec(("only-in-the-image",), container=str(tmp_path / "tf.sif")))
    check_command(JobSpec(("only-in-the-image",), container="docker://tensorflow/tensorflow:2.21.0"))


def test_single_task_has_no_agent_to_start_the_container() -> None:
    with pytest.raises(OptionError, match="container"):
        BatchSpec(COMMAND, single=True, container="tf.sif")
