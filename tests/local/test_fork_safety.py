"""Many local jobs: the forks of the launcher and of its agents are safe beside gRPC's threads.

Earlier versions forked agents, and on Python 3.10 the children of agents, from processes with gRPC's threads; some of
them ended with SIGSEGV or SIGABRT. `make test-pythons` runs these tests on Python 3.10.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM

_PRINT_THREADS = """
import multiprocessing, os
fork = multiprocessing.context.ForkProcess.start
def counting_fork(process):
    print("threads before a fork:", len(os.listdir("/proc/self/task")), flush=True)
    fork(process)
multiprocessing.context.ForkProcess.start = counting_fork
from tf4slurm.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def default_fork_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs under test turn off gRPC's fork handlers themselves."""
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT")


def run_job(directory: Path, number: int) -> subprocess.CompletedProcess[str]:
    """Run a job whose chief exits with the code `number % 3`."""
    command = ("sh", "-c", f"exit {number % 3}")
    options = ("--runs-directory", str(directory / str(number)), "--ps", "1", "--workers", "1")
    return subprocess.run(
        [TF4SLURM, "run", *options, "--", *command], capture_output=True, text=True, timeout=60, check=False
    )


def test_launcher_forks_its_agents_before_grpc_starts_threads(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _PRINT_THREADS,
            "run",
            "--runs-directory",
            str(tmp_path),
            "--workers",
            "1",
            "--",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[:3] == ["threads before a fork: 1"] * 3


@pytest.mark.parametrize("jobs", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_local_jobs_end_with_the_exit_code_of_their_chief(jobs: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda number: run_job(tmp_path, number), range(jobs)))
    assert [(number, job.stderr) for number, job in enumerate(ended) if job.returncode != number % 3] == []
