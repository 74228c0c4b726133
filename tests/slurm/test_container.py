"""Jobs in containers of a real Apptainer on four hosts: each command runs inside, its agent outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import CHILD, NAMES, ROLES, TF4SLURM, Job
from tests.processes import marked_processes, read_process, wait_until_gone
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import SALLOC, make_job

ROOT = Path(__file__).parents[2]
ALLOCATE = (*SALLOC, "--mem=4000")
ASK = """
import os, tf4slurm
tf4slurm.report(step=1, loss=0.5)
files = os.listdir(os.environ["TF4SLURM_RUN_DIRECTORY"])
print(open("/etc/marker").read(), os.environ["TF4SLURM_TASK"], "job.json" in files)
"""

pytestmark = pytest.mark.skipif(
    shutil.which("apptainer") is None, reason="Apptainer is not installed; Debian sid has it: make slurm-versions"
)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the image, with /etc/marker, which this host lacks, and this host's programs bound in.

    The lab's root user lacks privileges that Apptainer uses for root, so it makes a user namespace, as for other users.
    """
    image = tmp_path / "image"
    for name in ("etc", "proc", "sys", "dev", "tmp", "usr", "var/tmp", "root"):
        (image / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    (image / "etc" / "marker").write_text("inside")
    monkeypatch.setenv("APPTAINER_BIND", f"/usr,{ROOT},{sys.base_prefix}")
    monkeypatch.setenv("APPTAINER_USERNS", "1")
    return image


@pytest.fixture
def job(tmp_path: Path, lab: SlurmLab) -> Iterator[Job]:
    with make_job(tmp_path, lab) as job:
        yield job


def test_command_runs_inside_with_its_environment_and_the_run_directory(job: Job, image: Path) -> None:
    command = (sys.executable, "-c", ASK)
    roles = ("--ps", "0", "--no-chief", "--workers", "4")
    job.start(*roles, "--container", str(image), prefix=ALLOCATE, command=command)
    assert job.wait(60) == 0, job.stderr
    logs = [path.read_text() for path in (job.run_directory / "logs").glob("*.log")]
    assert [re.findall(r"^inside worker/\d True$", log, re.MULTILINE) != [] for log in logs] == [True] * 4
    assert "first_step" in {event["kind"] for event in job.events}  # the report came through the agent's socket


def test_cluster_forms_and_exit_code_of_the_chief_is_the_jobs(job: Job, image: Path) -> None:
    job.start(*ROLES, "--container", str(image), prefix=ALLOCATE)
    children = [job.wait_for_child(name, timeout_seconds=60) for name in NAMES]
    assert len({child["host"] for child in children}) == 4
    assert len({json.dumps(child["config"]["cluster"]) for child in children}) == 1
    job.end_child("chief-0", 3)
    assert job.wait(60) == 3


@pytest.mark.parametrize("ending", ["killed ps", "stopped job"])
def test_no_process_survives_in_a_container(job: Job, image: Path, process_mark: str, ending: str) -> None:
    job.start(*ROLES, "--container", str(image), "--grace-period", "0", prefix=ALLOCATE)
    for name in NAMES:
        job.wait_for_child(name, timeout_seconds=60)
    if ending == "killed ps":
        os.kill(process_of(process_mark, sys.executable, "ps/0"), signal.SIGKILL)
        assert job.wait(60) == 137
    else:
        (launcher,) = [p for p in marked_processes(process_mark) if p.command.split()[1:3] == [TF4SLURM, "run"]]
        os.kill(launcher.pid, signal.SIGTERM)
        assert job.wait(60) == 143
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def process_of(mark: str, program: str, task: str) -> int:
    """Return the id of the process of a task that runs this program."""
    entry = f"TF4SLURM_TASK={task}".encode()
    (found,) = [
        process.pid
        for process in marked_processes(mark)
        if process.command.startswith(f"{program} {CHILD}")
        and entry in read_process(process.pid, "environ").split(b"\0")
    ]
    return found


@pytest.mark.keras
@pytest.mark.timeout(300)
def test_training_in_containers(lab: SlurmLab, image: Path, tmp_path: Path) -> None:
    train = (sys.executable, str(ROOT / "TUTORIALS" / "train_digits.py"), "--epochs", "1")
    options = ("--runs-directory", str(tmp_path / "runs"), "--container", str(image))
    command = (TF4SLURM, "run", *options, *ROLES, "--", *train)
    done = lab.run(*ALLOCATE, *command, cwd=tmp_path, timeout_seconds=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"accuracy: 0\.\d+", done.stdout), done.stdout
