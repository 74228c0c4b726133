"""The terminal output of a job and its summary, compared as whole texts."""

from __future__ import annotations

import dataclasses
import io
import signal
from pathlib import Path

import pytest

from tf4slurm import __version__
from tf4slurm.cli.terminal_output import LiveOutput, PlainOutput, summary
from tf4slurm.cluster import Task
from tf4slurm.control.messages import ObservedState, Registration, ScriptState
from tf4slurm.control.receiver import Receiver
from tf4slurm.control.records import Outcome
from tf4slurm.control.state import JobState
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event
from tf4slurm.launch.requeue import mark_requeued
from tf4slurm.launch.result_files import Result, make_result_file
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.output import LineWriter

TASKS = (Task("chief", 0), Task("ps", 0), Task("worker", 0), Task("worker", 1))
START = 500.0
DIRECTORY = RunDirectory(Path("/runs/digits-42"))


def trained() -> JobState:
    """A job whose children run: registered at 0 s, started at 1 s."""
    state = JobState(TASKS, JobSpec(), START, lambda *_, **__: None)
    for rank in range(4):
        registration = Registration(rank, f"n{rank // 2}", f"10.0.0.{rank // 2}", 40000 + rank, f"i{rank}", __version__)
        Receiver(state).on_registration(registration, START)
    for rank in range(4):
        Receiver(state).on_observed_state(rank, ObservedState("ready"), START + 0.5)
    for rank in range(4):
        Receiver(state).on_observed_state(rank, ObservedState("running", 1, 100 + rank, has_server=True), START + 1)
    return state


def result_of(state: JobState, seconds: float) -> Result:
    return Result(make_result_file(state, DIRECTORY, START, START + seconds), DIRECTORY, DIRECTORY.path / "report.html")


def succeeded() -> Result:
    state = trained()
    Receiver(state).on_observed_state(3, ObservedState("exited", 1, 103, -9), START + 2)
    Receiver(state).on_observed_state(3, ObservedState("running", 2, 203), START + 2.5)
    Receiver(state).on_observed_state(0, ObservedState("exited", 1, 100, 0), START + 3)
    Receiver(state).on_observed_state(0, ObservedState("terminated", 1, 100, 0), START + 3.1)
    Receiver(state).on_observed_state(1, ObservedState("terminated", 1, 101), START + 3.2)
    Receiver(state).on_observed_state(2, ObservedState("terminated", 1, 102), START + 3.25)
    Receiver(state).on_observed_state(3, ObservedState("terminated", 2, 203), START + 3.3)
    return result_of(state, 3.456)


def failed() -> Result:
    state = trained()
    Receiver(state).on_observed_state(
        1, ObservedState("exited", 1, 101, -9, tail=("Loading", "Killed: out of memory")), START + 2
    )
    Receiver(state).on_observed_state(0, ObservedState("exited", 1, 100, 1, tail=("UnavailableError",)), START + 2.1)
    Receiver(state).on_observed_state(1, ObservedState("terminated", 1, 101, -9), START + 2.2)
    Receiver(state).on_observed_state(0, ObservedState("terminated", 1, 100, 1), START + 2.2)
    Receiver(state).on_observed_state(2, ObservedState("terminated", 1, 102), START + 2.3)
    state.on_spawner_exit(Outcome(7, "srun ended."), START + 3)
    return result_of(state, 3.0)


SUCCESS = """
task      node  address         started  ended   end
chief/0   n0    10.0.0.0:40000  1.00 s   3.00 s  exited with code 0
ps/0      n0    10.0.0.0:40001  1.00 s   3.20 s  terminated
worker/0  n1    10.0.0.1:40002  1.00 s   3.25 s  terminated
worker/1  n1    10.0.0.1:40003  2.50 s   3.30 s  terminated (restarted 1 time)

COMPLETED in 3.5 s. Training is done: every task that the job waits for exited with code 0.

logs: /runs/digits-42/logs
report: /runs/digits-42/report.html"""

FAILURE = """
task      node  address         started  ended   end
chief/0   n0    10.0.0.0:40000  1.00 s   2.10 s  exited with code 1
ps/0      n0    10.0.0.0:40001  1.00 s   2.00 s  was killed by signal 9 (SIGKILL)
worker/0  n1    10.0.0.1:40002  1.00 s   2.30 s  terminated
worker/1  n1    10.0.0.1:40003  1.00 s   3.00 s  lost

FAILED with exit code 137 after 3.0 s.
Root cause: ps/0 on n0 was killed by signal 9 (SIGKILL).
Explanation: Memory ran out: ask for more, or take smaller batches.
The last lines of /runs/digits-42/logs/ps-0.1.log:
    Loading
    Killed: out of memory
Failure that followed: chief/0 on n0 exited with code 1.

logs: /runs/digits-42/logs
report: /runs/digits-42/report.html"""

MISSING = """
task      node  address         started  ended  end
chief/0   n0    10.0.0.0:40000  -        -      lost
ps/0      -     -               -        -      never registered
worker/0  -     -               -        -      never registered
worker/1  -     -               -        -      never registered

FAILED with exit code 6 after 300.1 s.
Root cause: The cluster did not form within 300 s: ps/0 (rank 1), worker/0 (rank 2) and worker/1 (rank 3) did not \
register. Look at their logs, or raise --start-timeout.

logs: /runs/digits-42/logs
report: /runs/digits-42/report.html"""

STOPPED = """
task      node  address         started  ended   end
chief/0   n0    10.0.0.0:40000  -        2.00 s  never started
ps/0      -     -               -        -       never registered
worker/0  -     -               -        -       never registered
worker/1  -     -               -        -       never registered

STOPPED with exit code 130 after 2.0 s. The job was stopped: the launcher received SIGINT.

logs: /runs/digits-42/logs
report: /runs/digits-42/report.html"""


def missing() -> Result:
    state = JobState(TASKS, JobSpec(), START, lambda *_, **__: None)
    Receiver(state).on_registration(Registration(0, "n0", "10.0.0.0", 40000, "i0", __version__), START)
    for tick in range(1, 302):
        Receiver(state).on_observed_state(0, ObservedState("registered"), START + tick)
        state.on_tick(START + tick)
    return result_of(state, 300.1)


def stopped() -> Result:
    state = JobState(TASKS, JobSpec(), START, lambda *_, **__: None)
    Receiver(state).on_registration(Registration(0, "n0", "10.0.0.0", 40000, "i0", __version__), START)
    state.on_stop(signal.SIGINT, "the launcher received SIGINT", START + 2)
    Receiver(state).on_observed_state(0, ObservedState("terminated"), START + 2)
    return result_of(state, 2.0)


@pytest.mark.parametrize(
    ("result", "text"),
    [(succeeded(), SUCCESS), (failed(), FAILURE), (missing(), MISSING), (stopped(), STOPPED)],
    ids=["success", "failure", "missing", "stopped"],
)
def test_summary(result: Result, text: str) -> None:
    assert "\n".join(summary(result)) == text


def test_last_lines_of_a_requeued_job() -> None:
    result = stopped()
    requeued = dataclasses.replace(mark_requeued(result.file, "time limit"), warnings=("No server answered.",))
    assert summary(result._replace(file=requeued))[-5:] == [
        "REQUEUED with exit code 75 after 2.0 s. The job was stopped: the launcher received SIGINT. It is requeued "
        "(time limit).",
        "WARNING: No server answered.",
        "",
        "logs: /runs/digits-42/logs",
        "report: /runs/digits-42/report.html",
    ]


def test_failed_job_has_one_root_cause() -> None:
    lines = summary(failed())
    assert sum(line.startswith("Root cause: ") for line in lines) == 1
    assert sum(line.startswith("The last lines of ") for line in lines) == 1


def test_task_output_and_events_have_separate_streams_and_frequent_events_are_left_out() -> None:
    output, notes = io.StringIO(), io.StringIO()
    terminal = PlainOutput(4, LineWriter(output), LineWriter(notes))
    state = trained()
    terminal.on_run_directory(DIRECTORY)
    terminal.on_event(Event(0.0, 0.01, "registered", "ps/0", "ps/0 on n0 joined"), state)
    terminal.on_event(
        Event(0.0, 1.234, "training", None, "every address is reachable; starting the child processes"), state
    )
    terminal.on_output("worker/0 | epoch 1")
    terminal.on_event(Event(0.0, 123.4, "restarting", "worker/1", "worker/1 on n1 restart 1 in place"), state)
    terminal.on_result(succeeded())
    terminal.close()
    assert output.getvalue() == "worker/0 | epoch 1\n"
    assert notes.getvalue() == (
        "tf4slurm | forming a cluster of 4 tasks; run directory /runs/digits-42\n"
        "tf4slurm |   1.23 s  every address is reachable; starting the child processes\n"
        "tf4slurm | 123.40 s  worker/1 on n1 restart 1 in place\n"
        f"{SUCCESS}\n"
    )


@pytest.mark.parametrize(
    ("chief", "worker", "text"),
    [
        (ScriptState(), ScriptState(), "running 4/4"),
        (ScriptState(step=0), ScriptState(), "training 4/4  step 0"),
        (
            ScriptState(step=1200, metrics=(("accuracy", 0.5), ("val_loss", 3.0), ("loss", 0.25))),
            ScriptState(step=1300, metrics=(("loss", 9.0),)),
            "training 4/4  step 1,300  loss 0.25",
        ),
        (ScriptState(step=7, metrics=(("accuracy", 0.5),)), ScriptState(), "training 4/4  step 7"),
        (ScriptState(step=7), ScriptState(metrics=(("mae", 0.5),)), "training 4/4  step 7  mae 0.5"),
        (ScriptState(step=7, metrics=(("loss", float("nan")),)), ScriptState(), "training 4/4  step 7  loss nan"),
    ],
)
def test_line_with_the_phase_has_the_furthest_step_and_the_last_loss(
    chief: ScriptState, worker: ScriptState, text: str
) -> None:
    state = trained()
    for rank, script in ((0, chief), (2, worker)):
        observed = ObservedState("running", 1, 100 + rank, has_server=True, script=script)
        Receiver(state).on_observed_state(rank, observed, START + 2)
    live = LiveOutput(4)
    try:
        assert live._describe(None) == "rendezvous 0/4"
        assert live._describe(state) == text
    finally:
        live.close()
