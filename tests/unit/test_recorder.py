"""The recorder: the phases that it writes, and its writes on a slow file system."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes import wait_until
from tf4slurm import __version__
from tf4slurm.cluster import Task
from tf4slurm.control.clock import JobClock
from tf4slurm.control.messages import ObservedState, Registration, ScriptState
from tf4slurm.control.receiver import Receiver
from tf4slurm.control.records import IMPORT_SECONDS, Outcome
from tf4slurm.control.state import JobState
from tf4slurm.jobs.recorder import Progress, Recorder, describe_task
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import StatusFile
from tf4slurm.spec.job_spec import JobSpec


def test_last_status_is_written_after_a_slow_earlier_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory.create(tmp_path, "run")
    state = JobState([Task("worker", 0)], JobSpec(), time.monotonic(), lambda *_, **__: None)
    files = ThreadPoolExecutor(1)
    recorder = Recorder(run, state, JobClock(1.0), files)
    write = RunDirectory.write
    phases: list[str] = []
    goes_on = threading.Event()

    def write_slowly(run: RunDirectory, content: StatusFile) -> None:
        phases.append(str(content.phase))
        if len(phases) == 1:
            assert goes_on.wait(60)
        write(run, content)

    async def end_while_it_writes() -> None:
        recording = asyncio.create_task(recorder.run())
        await asyncio.to_thread(wait_until, lambda: bool(phases), 60)
        recording.cancel()
        state.on_spawner_exit(Outcome(7, "srun ended."), time.monotonic())
        recorder.write()
        assert phases == ["rendezvous"]
        goes_on.set()
        await asyncio.wrap_future(files.submit(lambda: None))

    monkeypatch.setattr(RunDirectory, "write", write_slowly)
    asyncio.run(end_while_it_writes())
    assert phases == ["rendezvous", "ended"]
    status = run.read(StatusFile)
    assert status is not None
    assert status.phase == "ended"
    assert "is not recorded" not in caplog.text


SERVING = ObservedState("running", 1, has_server=True)
NEW = ObservedState("running", 1)
STEPPED = ObservedState("running", 1, script=ScriptState(step=0))
REPORTED = ObservedState("running", 1, script=ScriptState(metrics=(("loss", 1.0),)))


@pytest.mark.parametrize(
    ("chief", "worker", "seconds", "phase", "states"),
    [
        (NEW, NEW, 1.0, "importing", ["importing", "importing"]),
        (NEW, SERVING, 1.0, "importing", ["importing", "running"]),
        (SERVING, REPORTED, 1.0, "running", ["running", "running"]),
        (STEPPED, NEW, 1.0, "training", ["running", "importing"]),
        (NEW, NEW, IMPORT_SECONDS, "running", ["running", "running"]),
        (NEW, ObservedState("exited", 1, returncode=0), 1.0, "importing", ["importing", "exited"]),
    ],
)
def test_task_is_importing_until_it_serves_or_reports(
    chief: ObservedState, worker: ObservedState, seconds: float, phase: str, states: list[str]
) -> None:
    state = JobState([Task("chief", 0), Task("worker", 0)], JobSpec(max_attempts=2), 100.0, lambda *_, **__: None)
    receiver = Receiver(state)
    assert state.tasks.describe_phase(state.phase, 100.0) == "rendezvous"
    for rank in range(2):
        receiver.on_registration(Registration(rank, "n1", "10.0.0.1", 4000 + rank, f"i{rank}", __version__), 100.0)
    for rank in range(2):
        receiver.on_observed_state(rank, ObservedState("ready"), 100.0)
    for rank, observed in [*enumerate((NEW, NEW)), *enumerate((chief, worker))]:
        receiver.on_observed_state(rank, observed, 100.0)
    now = 100.0 + seconds
    assert state.tasks.describe_phase(state.phase, now) == phase
    assert [describe_task(state.tasks, record, 100.0, now).state for record in state.tasks] == states


@pytest.mark.parametrize(
    ("steps", "now", "steps_per_second", "seconds_since_step"),
    [
        ([], 5, 260.0, None),
        ([(5, 10)], 5, 260.0, 0.0),
        ([(0, 10), (2, 20), (4, 40)], 24, 260.0, 20.0),
        ([(0, 10), (2, 20), (4, 40)], 25, 0.0, 21.0),  # no new step for more than 20 s
        ([(0, 10), (2, 20), (4, 20)], 10, 260.0, 8.0),  # the step is reported again
        ([(0, 1), (60, 2)], 170, 260.0, 110.0),  # a step takes a minute
        ([(0, 1), (60, 2)], 181, 0.0, 121.0),
        ([(0, 50), (10, 100), (12, 20)], 14, 260.0, 2.0),  # a restarted script repeats steps
        ([(0, 50), (10, 100), (12, None)], 14, 260.0, None),  # a restarted script has not reported a step yet
    ],
)
def test_steps_per_second_are_those_of_the_script_until_a_step_is_overdue(
    steps: list[tuple[float, int | None]], now: float, steps_per_second: float, seconds_since_step: float | None
) -> None:
    progress = Progress()
    for at, step in steps:
        progress.note(step, at)
    state = JobState([Task("worker", 0)], JobSpec(), 0.0, lambda *_, **__: None)
    (record,) = state.tasks
    record.observed = ObservedState("running", 1, script=ScriptState(step=1, steps_per_second=260.0))
    task = describe_task(state.tasks, record, 0.0, now, progress)
    assert (task.steps_per_second, task.seconds_since_step) == (steps_per_second, seconds_since_step)
    assert describe_task(state.tasks, record, 0.0, now).steps_per_second is None
