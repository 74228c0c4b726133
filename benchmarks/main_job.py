"""Start and end of a job in seconds, and the memory of its agents."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Figure
from tests.jobs import TF4SLURM, Job
from tests.slurm.lab import SlurmLab

SERVE_AND_LEAVE = Path(__file__).with_name("serve_and_leave.py")
SIGNAL_AND_LEAVE = Path(__file__).with_name("signal_and_leave.py")
ROLES = ("--ps", "1", "--workers", "2")


def measure_end_on_slurm(directory: Path, runs: int) -> list[Figure]:
    """Measure from the chief's exit to the return of `tf4slurm run`, on four hosts."""
    exit_times, return_times = directory / "exit_times", directory / "return_times"
    command = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *ROLES, "--"]
    line = shlex.join([*command, sys.executable, str(SERVE_AND_LEAVE), str(exit_times)])
    with SlurmLab() as lab:
        for _ in range(runs):
            timed = f"{line}; date +%s.%N >> {shlex.quote(str(return_times))}"
            lab.run("salloc", "-Q", "-N4", "-n4", "bash", "-c", timed, timeout_seconds=120)
    ends = zip(exit_times.read_text().split(), return_times.read_text().split(), strict=True)
    values = tuple(float(returned) - float(exited) for exited, returned in ends)
    return [Figure("chief's exit to the return of tf4slurm run, 4 hosts of a real Slurm", "s", values, "< 0.5")]


def measure_shutdown(directory: Path, runs: int) -> list[Figure]:
    """Measure from the last worker's signal to the end of the ps process, under plain srun on four hosts."""
    figures = []
    with SlurmLab() as lab:
        for method, bound in (("barrier", "< 0.3"), ("queue", "< 2")):
            gone, returned = [], []
            for number in range(runs):
                place = directory / f"{method}-{number}"
                place.mkdir()
                step = lab.popen(
                    *("srun", "-Q", "-N4", "-n4", sys.executable, str(SIGNAL_AND_LEAVE), str(place), method),
                    cwd=place,
                    stderr=subprocess.DEVNULL,
                )
                while not (place / "done").exists() and step.poll() is None:
                    time.sleep(0.05)
                with (place / "ps-0").open() as held:
                    fcntl.flock(held, fcntl.LOCK_EX)
                    ended = time.time()
                assert step.wait(60) == 0
                done = float((place / "done").read_text())
                gone.append(ended - done)
                returned.append(float((place / "returned").read_text()) - done)
            figures += [
                Figure(f"last worker's signal to the ps process gone, {method}, 4 hosts", "s", tuple(gone), bound),
                Figure(f"the same until serve_until_done returns, {method}", "s", tuple(returned), ""),
            ]
    return figures


def measure_start(directory: Path, runs: int) -> list[Figure]:
    """Measure from the start of `tf4slurm run` to the first child's start, with four local tasks."""
    values = []
    for number in range(runs):
        mark = directory / f"start-{number}"
        command = ("sh", "-c", f"date +%s.%N >> {mark}")
        started = time.time()
        subprocess.run(
            [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *ROLES, "--", *command],
            check=True,
            capture_output=True,
            timeout=60,
        )
        values.append(min(map(float, mark.read_text().split())) - started)
    return [Figure("start of tf4slurm run to the first child's start, 4 local tasks", "s", tuple(values), "< 0.8")]


def measure_imports(runs: int) -> list[Figure]:
    figures = []
    for module, bound in (("tf4slurm", "< 30"), ("tf4slurm.agent.agent", "< 150")):
        code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        values = tuple(
            1000 * float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
            for _ in range(runs)
        )
        figures.append(Figure(f"import {module}", "ms", values, bound))
    return figures


def measure_memory(directory: Path) -> list[Figure]:
    """Measure the resident memory of the launcher and of agents with a running child, local and started by srun."""
    figures = []
    with SlurmLab() as lab:
        for where in ("local", "Slurm"):
            place = directory / where
            place.mkdir()
            if where == "local":
                job = Job(place)
                job.start(*ROLES)
            else:
                job = Job(place, functools.partial(_popen, lab))
                job.start(*ROLES, prefix=("salloc", "-Q", "-N4", "-n4"))
            try:
                for name in ("chief-0", "ps-0", "worker-0", "worker-1"):
                    job.wait_for_child(name)
                processes = Path("/proc").glob("[0-9]*")
                values = tuple(memory for memory in (_agent_memory(path, job) for path in processes) if memory)
                launcher = _launcher_memory(job)
            finally:
                job.end_child("chief-0")
                job.wait()
            figures.append(Figure(f"resident memory of an agent ({where})", "MB", values, "< 50"))
            figures.append(Figure(f"resident memory of the launcher of 4 tasks ({where})", "MB", (launcher,), "< 75"))
    return figures


def _launcher_memory(job: Job) -> float:
    """Return the memory in MB of the process `tf4slurm run`; its parent may be salloc, its children are its forks."""
    assert job.process is not None
    outermost = psutil.Process(job.process.pid)
    family = (outermost, *outermost.children(recursive=True))
    launcher = next(process for process in family if process.cmdline()[1:3] == [TF4SLURM, "run"])
    return float(launcher.memory_info().rss / 1e6)


def _popen(lab: SlurmLab, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    return lab.popen(*command, stdout=options["stdout"], stderr=options["stderr"])


def _agent_memory(process: Path, job: Job) -> float | None:
    """Return the memory in MB of this process's parent if this is a child of the job; else None."""
    with contextlib.suppress(OSError):
        is_child = b"TF4SLURM_TASK=" in (process / "environ").read_bytes()
        if is_child and str(job.children).encode() in (process / "cmdline").read_bytes():
            (parent,) = re.findall(r"^PPid:\s*(\d+)", (process / "status").read_text(), re.MULTILINE)
            status = Path("/proc", parent, "status").read_text()
            (kilobytes,) = re.findall(r"^VmRSS:\s*(\d+)", status, re.MULTILINE)
            return int(kilobytes) / 1000
    return None
