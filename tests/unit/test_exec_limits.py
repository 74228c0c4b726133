"""Programs whose arguments or environment are too long for Linux, which does not start them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tf4slurm.errors import LaunchError
from tf4slurm.launch.spawners import SrunSpawner
from tf4slurm.slurm.commands import run_program
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_limits import explain_too_long

LONG = "x" * 131_071  # 128 KB with the byte that ends it


@pytest.mark.parametrize(
    ("command", "environ", "words"),
    [
        (("true", LONG), {"A": LONG[2:]}, ""),
        (("true", LONG + "x"), {"A": "x"}, "the argument 'xxx"),
        (("true", "x"), {"HOSTS": LONG}, "the variable HOSTS has 131,078 bytes, and Linux allows 131,072 for each"),
        (("true", *[LONG] * 90), {"A": "x"}, "bytes, more than Linux allows with this stack limit"),
    ],
)
def test_longest_text_of_a_program_that_cannot_start_is_named(
    command: tuple[str, ...], environ: dict[str, str], words: str
) -> None:
    found = ""
    try:
        subprocess.run(command, env={**environ, "PATH": os.environ["PATH"]}, check=True)
    except OSError as error:
        found = explain_too_long(error, command, environ)
    assert words in found
    assert bool(words) is bool(found)


def test_other_error_is_not_explained() -> None:
    assert explain_too_long(FileNotFoundError(2, "No such file"), ("srun",), {}) == ""


def test_program_of_slurm_with_too_long_arguments_is_not_missing() -> None:
    with pytest.raises(LaunchError, match="cannot be started: the argument 'xxx") as caught:
        run_program(("true", LONG + "x"))
    assert "PATH" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_srun_with_too_long_environment_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "srun").symlink_to("/bin/true")
    environ = {"HOSTS": LONG, "PATH": str(tmp_path)}
    spawner = SrunSpawner(JobSpec(("true",), workers=1), SlurmAllocation(JobId(1), 3, None), environ)
    with pytest.raises(LaunchError, match=r"^srun cannot be started: the variable HOSTS has 131,078 bytes"):
        asyncio.run(spawner.start({}, None))  # type: ignore[arg-type]  # it starts nothing
