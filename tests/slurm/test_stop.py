"""Save and stop on a real Slurm: scancel, the time limit and preemption, and back into the queue."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM
from tests.processes import marked_processes, wait_until
from tests.slurm.lab import SlurmLab

SCRIPT = """
import json, os, pathlib, sys, threading, time
import tf4slurm
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
directory = pathlib.Path(sys.argv[1])
run = os.environ.get("SLURM_RESTART_COUNT", "0")
if role != "chief":
    (directory / f"{role}-{index}-ready-{run}").touch()
    threading.Event().wait()
tf4slurm.should_stop()
(directory / f"chief-0-ready-{run}").touch()
while not (directory / "finish").exists():
    if tf4slurm.should_stop():
        (directory / f"saving-{run}").touch()
        time.sleep(float(os.environ.get("SAVE_SECONDS", "1")))
        (directory / f"saved-{run}").touch()
        sys.exit(0)
    time.sleep(0.02)
"""
NAMES = ("chief-0", "ps-0", "worker-0", "worker-1")


def submit(
    lab: SlurmLab, directory: Path, *options: str, run_options: tuple[str, ...] = (), has_epilogue: bool = False
) -> str:
    """Submit the job; return its id. An epilogue that runs to its end writes the file epilogue-RUN."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    arguments = ("--runs-directory", str(directory / "runs"), "--ps", "1", *run_options)
    command = ("--", sys.executable, str(script), str(directory))
    batch = directory / "job.sh"
    if has_epilogue:
        epilogue = f"sleep 1 && touch {directory}/epilogue-${{SLURM_RESTART_COUNT:-0}}"
        script_options = ("--workers", "2", "--time", "5", "--epilogue", epilogue)
        batch.write_text(lab.run(TF4SLURM, "script", *arguments, *script_options, *command, cwd=directory).stdout)
    else:
        batch.write_text(f"#!/bin/bash\nexec {shlex.join([TF4SLURM, 'run', *arguments, *command])}\n")
    output = ("-o", str(directory / "slurm.out"), "--open-mode=append")
    return lab.run("sbatch", "--parsable", "-N4", "-n4", *output, *options, batch).stdout.strip()


def wait_for(directory: Path, *names: str, timeout_seconds: float = 60) -> None:
    for name in names:
        assert wait_until((directory / name).exists, timeout_seconds), f"no {name}: {output(directory)}"


def wait_until_ready(directory: Path, run: int = 0) -> None:
    wait_for(directory, *(f"{name}-ready-{run}" for name in NAMES))


def output(directory: Path) -> str:
    path = directory / "slurm.out"
    return path.read_text() if path.exists() else "no output"


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((directory / "runs").glob("*/result.json"))]


def check_end(lab: SlurmLab, directory: Path, job: str, state: str, exit_code: int) -> None:
    """Check the word for the end of a job in its output, result and report, and in what the verbs print."""
    result = results(directory)[-1]
    assert (result["state"], result["exit_code"]) == (state, exit_code)
    words = rf"^{state} (in|with exit code {exit_code} after) "
    assert wait_until(lambda: re.search(words, output(directory), re.MULTILINE) is not None, 60), output(directory)
    *_, report = sorted((directory / "runs").glob("*/report.html"))
    assert output(directory).splitlines()[-1] == f"report: {report}"
    assert f"{report.parent.name}: {state}</title>" in report.read_text()

    def shown(*arguments: str) -> str:
        done = lab.run(TF4SLURM, *arguments, cwd=directory, check=False)
        return done.stdout + done.stderr

    assert re.search(rf"^{job} +train-{job} +{state} +{exit_code} ", shown("list"), re.MULTILINE)
    assert re.search(rf"^{job}  \S+  {state}  .*exit code {exit_code}$", shown("status", job), re.MULTILINE)
    assert f"train-{job} {state}, exit code {exit_code}. " in shown("wait", job)


def test_scancel_lets_the_chief_save(lab: SlurmLab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path)
    wait_until_ready(tmp_path)
    lab.run("scancel", job)
    wait_for(tmp_path, "saved-0", timeout_seconds=60)
    assert lab.wait_for_job(job)[0] == "CANCELLED"
    assert wait_until(lambda: bool(results(tmp_path)), 60)
    (result,) = results(tmp_path)
    check_end(lab, tmp_path, job, "STOPPED", 143)
    states = {task["task"]: task["state"] for task in result["tasks"]}
    assert states["ps/0"] == "terminated", output(tmp_path)


def test_cancel_leaves_grace_period_and_epilogue(lab: SlurmLab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path, has_epilogue=True)
    wait_until_ready(tmp_path)
    cancelled = lab.run(TF4SLURM, "cancel", job)
    assert "has ended: STOPPED, exit code 130" in cancelled.stderr
    assert lab.wait_for_job(job) == ("FAILED", f"{128 + signal.SIGINT}:0")
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "epilogue-0").exists()
    check_end(lab, tmp_path, job, "STOPPED", 130)


def submit_task_job(lab: SlurmLab, directory: Path) -> str:
    """Submit a batch script that starts the job with `srun tf4slurm task`; return its id."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    command = (TF4SLURM, "task", "--runs-directory", str(directory / "runs"), "--ps", "1", "--name", "train", "--")
    batch = directory / "job.sh"
    batch.write_text(f"#!/bin/bash\nsrun {shlex.join([*command, sys.executable, str(script), str(directory)])}\n")
    output = ("-o", str(directory / "slurm.out"))
    return lab.run("sbatch", "--parsable", "-N4", "-n4", *output, batch).stdout.strip()


def cancel_in_background(lab: SlurmLab, job: str) -> subprocess.Popen[str]:
    return lab.popen(TF4SLURM, "cancel", job, stderr=subprocess.PIPE)


SUBMIT: dict[str, Callable[[SlurmLab, Path], str]] = {
    "exec": submit,
    "epilogue": functools.partial(submit, has_epilogue=True),
    "srun task": submit_task_job,
}
"""How the batch script starts the job."""


@pytest.mark.parametrize("second", ["cancel", "scancel INT", "two at once"])
@pytest.mark.parametrize("how", SUBMIT)
def test_second_cancel_leaves_the_save_its_time(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, second: str
) -> None:
    if how != "exec" and second == "scancel INT":
        pytest.skip("it signals the batch script, which only with exec is the launcher")
    monkeypatch.setenv("SAVE_SECONDS", "3")
    job = SUBMIT[how](lab, tmp_path)
    wait_until_ready(tmp_path)
    with cancel_in_background(lab, job) as first:
        if second == "two at once":
            other = lab.run(TF4SLURM, "cancel", job)
        wait_for(tmp_path, "saving-0")
        if second == "cancel":
            other = lab.run(TF4SLURM, "cancel", job)
            assert re.search(r"saves already, or ends: at most \d+ s are left\. To skip them: ", other.stderr)
        elif second == "scancel INT":
            for _ in range(3):
                lab.run("scancel", "--signal=INT", "--batch", job)
        assert first.wait(60) == 0
        assert first.stderr is not None
        told = first.stderr.read()
    exit_code = 143 if how == "srun task" else 130
    assert (tmp_path / "saved-0").exists(), output(tmp_path) + told
    assert f"has ended: STOPPED, exit code {exit_code}" in told
    (result,) = results(tmp_path)
    assert (result["state"], result["exit_code"]) == ("STOPPED", exit_code)


@pytest.mark.parametrize("how", SUBMIT)
def test_cancel_now_ends_a_job_that_saves(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("SAVE_SECONDS", "1000")
    job = SUBMIT[how](lab, tmp_path)
    wait_until_ready(tmp_path)
    with cancel_in_background(lab, job) as first:
        wait_for(tmp_path, "saving-0")
        done = lab.run(TF4SLURM, "cancel", "--now", job)
        first.wait(60)
    state, _ = lab.wait_for_job(job)
    assert not (tmp_path / "saved-0").exists()
    assert f"train-{job} has ended: STOPPED, exit code 130" in done.stderr or how == "srun task", done.stderr
    assert state == "FAILED" or (state, how) == ("CANCELLED", "srun task")  # the batch script may end before scancel
    if how != "srun task":
        assert re.search(r"received SIGQUIT while the scripts save: the last \d+ s", output(tmp_path))
        (result,) = results(tmp_path)
        assert (result["state"], result["exit_code"]) == ("STOPPED", 130)


def test_cancel_while_slurm_ends_the_job_leaves_the_save_its_time(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the time limit, Slurm sends SIGTERM, and kills 5 s later (KillWait of the lab)."""
    monkeypatch.setenv("SAVE_SECONDS", "3")
    job = submit(lab, tmp_path)
    wait_until_ready(tmp_path)
    lab.run("scancel", job)
    wait_for(tmp_path, "saving-0")
    done = lab.run(TF4SLURM, "cancel", job)
    wait_for(tmp_path, "saved-0")
    assert lab.wait_for_job(job)[0] == "CANCELLED"
    assert "saves already, or ends: at most" in done.stderr
    assert lab.run(TF4SLURM, "cancel", job).stderr.strip().endswith("has ended already: STOPPED.")
    (result,) = results(tmp_path)
    assert (result["state"], result["exit_code"]) == ("STOPPED", 143)


def test_cancel_of_a_job_of_salloc_lets_it_save(lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher runs on the login host, where `tf4slurm cancel` signals it."""
    monkeypatch.setenv("SAVE_SECONDS", "3")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("--runs-directory", str(tmp_path / "runs"), "--ps", "1")
    command = (TF4SLURM, "run", *options, "--", sys.executable, str(script), str(tmp_path))
    with (tmp_path / "slurm.out").open("w") as out:
        salloc = lab.popen("salloc", "-Q", "-N4", "-n4", *command, stdout=out, stderr=out)
    with salloc:
        wait_until_ready(tmp_path)
        (run,) = (tmp_path / "runs").iterdir()
        job = run.name.removeprefix("train-")
        with cancel_in_background(lab, job) as first:
            wait_for(tmp_path, "saving-0")
            lab.run(TF4SLURM, "cancel", job)
            assert first.wait(60) == 0
        assert salloc.wait(60) == 143, output(tmp_path)
    assert (tmp_path / "saved-0").exists()


@pytest.mark.long
@pytest.mark.parametrize("reason", ["scancel", "time limit"])
def test_epilogue_runs_when_slurm_ends_the_job(lab: SlurmLab, tmp_path: Path, reason: str) -> None:
    job = submit(lab, tmp_path, "-t1", has_epilogue=True)
    wait_until_ready(tmp_path)
    if reason == "scancel":
        lab.run("scancel", job)
    assert lab.wait_for_job(job, timeout_seconds=120)[0] == ("CANCELLED" if reason == "scancel" else "TIMEOUT")
    wait_for(tmp_path, "saved-0", "epilogue-0", timeout_seconds=60)
    check_end(lab, tmp_path, job, "STOPPED", 143)


@pytest.mark.long
def test_epilogue_runs_to_its_end_before_a_requeue(lab: SlurmLab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path, "--requeue", run_options=("--requeue", "1"), has_epilogue=True)
    wait_until_ready(tmp_path)
    lab.run("scancel", "--signal=USR1", "--batch", job)  # the signal that Slurm sends before the time limit
    wait_for(tmp_path, "saved-0", "epilogue-0")
    wait_until_ready(tmp_path, run=1)
    (tmp_path / "finish").touch()
    assert lab.wait_for_job(job) == ("COMPLETED", "0:0")
    assert (tmp_path / "epilogue-1").exists()
    assert [(result["state"], result["exit_code"]) for result in results(tmp_path)] == [
        ("REQUEUED", 75),
        ("COMPLETED", 0),
    ]


@pytest.mark.parametrize(
    ("victim", "number"),
    [("launcher", signal.SIGUSR1), ("launcher", signal.SIGALRM), ("step", signal.SIGUSR1), ("step", signal.SIGHUP)],
)
def test_signal_to_batch_script_or_step_stops_job(
    lab: SlurmLab, tmp_path: Path, victim: str, number: signal.Signals
) -> None:
    job = submit(lab, tmp_path)
    wait_until_ready(tmp_path)
    name = number.name.removeprefix("SIG")
    lab.run("scancel", f"--signal={name}", *(["--batch", job] if victim == "launcher" else [job]))
    assert lab.wait_for_job(job) == ("FAILED", f"{128 + number}:0")
    wait_for(tmp_path, "saved-0")
    assert f"received {number.name}" in output(tmp_path)
    check_end(lab, tmp_path, job, "STOPPED", 128 + number)


@pytest.mark.long
@pytest.mark.parametrize(
    ("numbers", "state", "exit_code", "reason"),
    [
        # srun ignores the first two and passes the third on.
        ((signal.SIGINT, signal.SIGALRM, signal.SIGUSR1), "STOPPED", 138, "received SIGUSR1"),
        # srun itself kills all tasks. No process of tf4slurm can prevent that, nor sends srun a signal meanwhile.
        ((signal.SIGTERM,), "FAILED", 7, "srun ended before the job did"),
        ((signal.SIGHUP,), "FAILED", 7, "srun ended before the job did"),
        ((signal.SIGQUIT,), "FAILED", 7, "srun ended before the job did"),
    ],
    ids=lambda value: value[-1].name if isinstance(value, tuple) else "",
)
def test_signal_to_srun(
    lab: SlurmLab,
    tmp_path: Path,
    process_mark: str,
    numbers: tuple[signal.Signals, ...],
    state: str,
    exit_code: int,
    reason: str,
) -> None:
    job = submit(lab, tmp_path)
    wait_until_ready(tmp_path)
    srun = next(each for each in marked_processes(process_mark) if each.command.startswith("srun "))
    for number in numbers:
        os.kill(srun.pid, number)
    assert lab.wait_for_job(job)[0] == "FAILED"
    (result,) = results(tmp_path)
    assert (result["state"], result["exit_code"]) == (state, exit_code)
    assert reason in result["reason"]


def test_signal_that_only_the_script_handles_ends_nothing(lab: SlurmLab, tmp_path: Path) -> None:
    """The guards and agents of the step survive it, srun too."""
    script = (
        "import pathlib, signal, sys, time\n"
        "directory = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGALRM, lambda *_: (directory / 'saved-0').touch())\n"
        "(directory / 'ready').touch()\n"
        "while not (directory / 'finish').exists(): time.sleep(0.02)\n"
    )
    command = shlex.join(
        [TF4SLURM, "run", "--ps", "0", "--workers", "0", "--", sys.executable, "-c", script, str(tmp_path)]
    )
    batch = tmp_path / "job.sh"
    batch.write_text(f"#!/bin/bash\ncd {tmp_path}\nexec {command}\n")
    job = lab.run("sbatch", "--parsable", "-N1", "-n1", "-o", str(tmp_path / "slurm.out"), batch).stdout.strip()
    wait_for(tmp_path, "ready")
    lab.run("scancel", "--signal=ALRM", job)
    wait_for(tmp_path, "saved-0")
    (tmp_path / "finish").touch()
    assert lab.wait_for_job(job) == ("COMPLETED", "0:0"), output(tmp_path)


def test_job_that_is_requeued_waits_in_the_queue_and_resumes(lab: SlurmLab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path, "--requeue", run_options=("--requeue", "1"))
    wait_until_ready(tmp_path)
    lab.run("scancel", "--signal=USR1", "--batch", job)  # the signal that Slurm sends before the time limit

    def status() -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(lab.run(TF4SLURM, "status", "--json", job).stdout)
        return found[0]

    assert wait_until(lambda: bool(results(tmp_path)), 60)
    assert results(tmp_path)[0]["state"] == "REQUEUED"
    assert wait_until(lambda: status()["state"] == "PENDING", 60, poll_seconds=0.3), status()
    assert ". The last attempt was REQUEUED: The job was stopped: " in status()["reason"]
    assert (status()["exit_code"], status()["phase"], status()["tasks"]) == (None, None, [])
    lab.release(job)
    wait_until_ready(tmp_path, run=1)
    assert status()["state"] == "RUNNING"
    (tmp_path / "finish").touch()
    assert lab.wait_for_job(job) == ("COMPLETED", "0:0")
    check_end(lab, tmp_path, job, "COMPLETED", 0)


def test_result_of_a_job_that_slurm_has_requeued(lab: SlurmLab, tmp_path: Path) -> None:
    """So is a job that is preempted before its step exists, and that Slurm requeues at the end of its grace time."""
    job = submit(lab, tmp_path, "--requeue", run_options=("--requeue", "1", "--grace-period", "2"))
    wait_until_ready(tmp_path)
    lab.run("scontrol", "requeue", job)
    assert wait_until(lambda: bool(results(tmp_path)), 60), output(tmp_path)
    assert (results(tmp_path)[0]["state"], results(tmp_path)[0]["requeued"]) == ("REQUEUED", "Slurm")
    lab.release(job)
    wait_until_ready(tmp_path, run=1)
    (tmp_path / "finish").touch()
    assert lab.wait_for_job(job) == ("COMPLETED", "0:0"), output(tmp_path)


@pytest.mark.long
def test_time_limit_requeues_once_and_job_resumes(lab: SlurmLab, tmp_path: Path) -> None:
    # Slurm checks every 30 s and may warn 60 s early: 20 to 50 s after the start, when the job handles the signal.
    options = ("-t1", "--requeue", "--signal=B:USR1@10")
    job = submit(lab, tmp_path, *options, run_options=("--requeue", "1"))
    wait_for(tmp_path, "saved-0", timeout_seconds=90)
    wait_until_ready(tmp_path, run=1)
    (tmp_path / "finish").touch()
    assert lab.wait_for_job(job, timeout_seconds=60) == ("COMPLETED", "0:0")
    first, second = results(tmp_path)
    assert (first["exit_code"], first["requeued"]) == (75, "time limit")
    assert (second["exit_code"], second["requeued"]) == (0, None)
    assert "Slurm has requeued this job 1 time" in output(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("partition", "doubt"), [("low", ""), ("lowc", "Preemption does not requeue here")])
@pytest.mark.parametrize("has_epilogue", [False, True])
def test_preemption_saves_and_requeues(
    lab: SlurmLab, tmp_path: Path, partition: str, doubt: str, has_epilogue: bool
) -> None:
    options = ("-p", partition, "--requeue", "--exclusive")
    job = submit(lab, tmp_path, *options, run_options=("--requeue", "0"), has_epilogue=has_epilogue)
    wait_until_ready(tmp_path)
    urgent = lab.run("sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 1", cwd=tmp_path)
    wait_for(tmp_path, "saved-0")
    lab.wait_for_job(urgent.stdout.strip(), timeout_seconds=60)
    wait_until_ready(tmp_path, run=1)
    (tmp_path / "finish").touch()
    # Slurm 24.11 calls a job preempted that has requeued itself at a preemption, and completes afterwards.
    assert wait_until(lambda: lab.job_state(job) in (("COMPLETED", "0:0"), ("PREEMPTED", "0:0")), 60), lab.job_state(
        job
    )
    assert len(list(tmp_path.glob("epilogue-*"))) == (2 if has_epilogue else 0)
    assert [result["requeued"] for result in results(tmp_path)] == ["preemption", None]
    assert wait_until(lambda: not lab.queue(), 60), "it is not requeued once more"
    assert doubt in output(tmp_path)


def test_job_that_cannot_be_requeued_warns_at_its_start(lab: SlurmLab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path, "--no-requeue", run_options=("--requeue", "1"))
    wait_until_ready(tmp_path)
    assert "Slurm has Requeue=0 for it" in output(tmp_path)
    (tmp_path / "finish").touch()
    assert lab.wait_for_job(job) == ("COMPLETED", "0:0")


def test_requeue_needs_slurm(tmp_path: Path) -> None:
    done = subprocess.run(
        [TF4SLURM, "run", "--requeue", "1", "--", "true"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "--requeue is for jobs of Slurm" in done.stderr
