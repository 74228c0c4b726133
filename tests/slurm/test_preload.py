"""The tasks of a host fork from one preloader, on two hosts of a real Slurm. TensorFlow is a stand-in here.

tests/tensorflow/test_preload.py uses the real one.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import make_job

ROLES = ("--ps", "2", "--workers", "3", "--max-attempts", "2", "--preload", "always")
SALLOC = ("salloc", "-Q", "-N2", "-n6", "--ntasks-per-node=3", "--oversubscribe")
STAND_IN = """
import os, socket
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{socket.gethostname()} {os.getpid()}\\n")
"""
# Worker 1 fails in its first start, and the chief fails in attempt 1, after worker 1 has started again.
SCRIPT = """
import tensorflow
import os, sys, time
from pathlib import Path
task, attempt = os.environ["TF4SLURM_TASK"], os.environ["TF4SLURM_ATTEMPT"]
directory = Path(__file__).parent
print("parent", open(f"/proc/{os.getppid()}/cmdline").read().replace("\\0", " "))
if task == "worker/1":
    if not (directory / "first").exists():
        (directory / "first").touch()
        sys.exit(1)
    (directory / "second").touch()
while task != "chief/0" or not (directory / "second").exists():
    time.sleep(0.05)
sys.exit(3 if attempt == "1" else 0)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "lib" / "site-packages" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("IMPORTS", str(tmp_path / "imports"))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def imports(script: Path) -> list[list[str]]:
    """Return the host and the process id of each import of the stand-in."""
    path = script.with_name("imports")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_each_host_imports_once_in_two_attempts_with_a_restarted_worker(
    tmp_path: Path, lab: SlurmLab, script: Path
) -> None:
    with make_job(tmp_path, lab) as job:
        job.start(*ROLES, prefix=SALLOC, command=(sys.executable, str(script)))
        assert job.wait(120) == 0, job.stdout + job.stderr
        assert sorted(Counter(host for host, _ in imports(script)).values()) == [1, 1]
        parents = [line for line in job.stdout.splitlines() if "| parent" in line]
        assert len(parents) > 7  # those of attempt 1 with a restart, and some of attempt 2, which may end at once
        assert all("preload/program.py" in line for line in parents)
        assert "not preloaded" not in job.stdout + job.stderr


def test_loss_of_the_preloader_changes_nothing_but_the_way_of_later_starts(
    tmp_path: Path, lab: SlurmLab, script: Path
) -> None:
    (tmp_path / "first").touch()
    with make_job(tmp_path, lab) as job:
        job.start(*ROLES, prefix=SALLOC, command=(sys.executable, str(script)))
        assert wait_until(lambda: len(imports(script)) == 2, 60)
        for host, process_id in imports(script):
            lab.on(host, "kill", f"-{signal.SIGKILL.name[3:]}", process_id)
        assert job.wait(120) == 0, job.stdout + job.stderr
        assert len(imports(script)) > 2
        assert "because the preloader has ended" in job.stdout + job.stderr
        reasons = [task["not_forked"] for task in job.result["tasks"] if not task["is_forked"]]
        assert reasons
        assert all(reason.startswith("the preloader has ended") for reason in reasons)


def test_tasks_whose_variables_differ_do_not_share_a_preloader(tmp_path: Path, lab: SlurmLab, script: Path) -> None:
    prolog = tmp_path / "prolog.sh"
    prolog.write_text("#!/bin/bash\n[ $SLURM_LOCALID = 0 ] && echo export USED_BY_AN_IMPORT=1\nexit 0\n")
    prolog.chmod(0o755)
    with make_job(tmp_path, lab) as job:
        job.start(*ROLES, "--srun", f"task-prolog={prolog}", prefix=SALLOC, command=(sys.executable, str(script)))
        assert job.wait(120) == 0, job.stdout + job.stderr
        assert sorted(Counter(host for host, _ in imports(script)).values()) == [2, 2]
        assert "not preloaded" not in job.stdout + job.stderr
