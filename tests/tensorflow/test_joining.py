"""Workers join a training job on this host, leave it and are killed, in random order, with real TensorFlow."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.jobs import TF4SLURM, Job, end_processes
from tests.processes import wait_until

pytestmark = pytest.mark.keras
SCRIPT = Path(__file__).with_name("joining_script.py")
STEPS_PER_CALL = 5  # as in the script
_MOST_JOINED = 3
_SECONDS = 120


class Line(NamedTuple):
    """One call of run_steps."""

    time: float
    requested: int
    step: int
    by_worker: tuple[int, ...]


class Training:
    """A training job with one ps and two workers, and the processes that have joined it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.joined: list[subprocess.Popen[str]] = []
        self.asked_to_leave: set[int] = set()
        self.num_killed = 0
        options = ("--ps", "1", "--workers", "2", "--max-worker-restarts", "100")
        job.start(*options, command=[sys.executable, str(SCRIPT), str(job.children)])
        assert wait_until(lambda: bool(self.lines()), _SECONDS), job.stderr

    def lines(self) -> list[Line]:
        path = self.job.children / "steps"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        found = []
        for line in whole:
            at, _, requested, step, *by_worker = line.split()
            found.append(Line(float(at), int(requested), int(step), tuple(map(int, by_worker))))
        return found

    def running(self) -> list[subprocess.Popen[str]]:
        return [worker for worker in self.joined if worker.poll() is None and worker.pid not in self.asked_to_leave]

    def join(self) -> None:
        command = [TF4SLURM, "join", str(self.job.run_directory)]
        self.joined.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))

    def leave(self, worker: subprocess.Popen[str]) -> None:
        worker.send_signal(signal.SIGTERM)
        self.asked_to_leave.add(worker.pid)

    def kill_one_of(self, process_ids: list[int], choose: random.Random) -> None:
        if process_ids:
            self.num_killed += 1
            os.kill(choose.choice(process_ids), signal.SIGKILL)

    def scripts_of(self, parent: psutil.Process, *roles: str) -> list[int]:
        """Return the processes of the script below a process, only of these roles if any is given."""
        found = []
        for process in parent.children(recursive=True):
            try:
                if str(SCRIPT) in process.cmdline() and "join" not in process.cmdline():
                    task = process.environ().get("TF4SLURM_TASK", "")
                    if TF4SLURM not in process.cmdline() and (not roles or task.split("/")[0] in roles):
                        found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def wait_for_step_after(self, at: float) -> None:
        assert wait_until(lambda: self.lines()[-1].time > at + 0.5, _SECONDS), (self.job.stderr, self.job.events[-9:])

    def finish(self) -> None:
        (self.job.children / "finish").touch()
        assert self.job.wait(_SECONDS) == 0, self.job.stderr
        for worker in self.joined:
            worker.communicate(timeout=60)


@pytest.fixture
def training(job: Job) -> Iterator[Training]:
    found = Training(job)
    yield found
    end_processes(found.joined)


@pytest.mark.timeout(300)
def test_worker_joins_trains_and_leaves(training: Training) -> None:
    training.join()
    assert wait_until(lambda: training.lines()[-1].by_worker[2:] > (0,), _SECONDS), training.job.events
    training.job.wait_for_event("joined", "worker/2")
    training.leave(training.joined[0])
    training.joined[0].communicate(timeout=60)
    assert training.joined[0].returncode == 0
    training.wait_for_step_after(time.time())
    assert not any(training.lines()[-1].by_worker[2:])
    training.finish()
    lines = training.lines()
    assert all(line.step == line.requested for line in lines), "no step was repeated"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "events"), [(0, 6), *(pytest.param(seed, 20, marks=pytest.mark.long) for seed in range(1, 11))]
)
def test_random_joins_leaves_and_kills(training: Training, seed: int, events: int) -> None:
    choose = random.Random(seed)
    assert training.job.process is not None
    launcher = psutil.Process(training.job.process.pid)
    for _ in range(events):
        joined = training.running()
        what = choose.choice(["leave", "kill script", "kill agent", "kill worker"] if joined else ["join"])
        if what == "join" or (len(joined) < _MOST_JOINED and choose.random() < 0.5):
            training.join()
        elif what == "leave":
            training.leave(choose.choice(joined))
        elif what == "kill script":
            training.kill_one_of(training.scripts_of(psutil.Process(choose.choice(joined).pid)), choose)
        elif what == "kill agent":
            agents = psutil.Process(choose.choice(joined).pid).children()
            training.kill_one_of([agent.pid for agent in agents], choose)
        else:
            training.kill_one_of(training.scripts_of(launcher, "worker"), choose)
        time.sleep(choose.uniform(0.2, 4.0))
    training.wait_for_step_after(time.time())
    training.finish()
    lines = training.lines()
    assert all(line.step >= line.requested for line in lines)
    repeated = sum(line.step - line.requested for line in lines)
    assert repeated <= training.num_killed * 2 * STEPS_PER_CALL, (repeated, training.num_killed)
    codes = {worker.pid: worker.returncode for worker in training.joined}
    left = {pid: codes[pid] for pid in training.asked_to_leave}  # SIGTERM ends a process that is just starting
    assert set(left.values()) <= {0, -signal.SIGTERM}, (
        left,
        [event for event in training.job.events if event["task"]][-20:],
    )
    assert training.job.result["attempts"] == 1
