"""Sweeps as local jobs, from the command line and from Python."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tf4slurm
from tests.jobs import TF4SLURM
from tests.processes import press_later, wait_until
from tf4slurm.errors import JobStateError, MissingDependencyError, OptionError, UnknownJobError
from tf4slurm.sweep import LocalSweep

SCRIPT = """
import argparse, os, sys, time, tf4slurm
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--lr", type=float)
parser.add_argument("--kind", default="train")
options = parser.parse_args()
for step in range(1, 4):
    tf4slurm.report(step=step, loss=options.lr / step, accuracy=1 - options.lr / step)
if options.kind == "fail":
    sys.exit(7)
while options.kind in ("wait", "saves"):
    time.sleep(0.05)
    if tf4slurm.should_stop():
        if options.kind == "saves":
            (options.directory / f"saving-{options.lr}").touch()
            time.sleep(3)
        (options.directory / f"saved-{options.lr}").touch()
        break
"""
COMMAND = ("--ps", "0", "--workers", "0")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the script, change to its directory, and give this test a registry of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def sweep_command(place: Path, *options: str) -> list[str | Path]:
    return [TF4SLURM, "run", *COMMAND, *options, "--", sys.executable, str(place / "train.py"), str(place)]


def status(job: str = "") -> dict[str, Any]:
    done = subprocess.run([TF4SLURM, "status", "--json", *([job] if job else [])], capture_output=True, text=True)
    return json.loads(done.stdout)[0] if done.returncode == 0 else {"elements": []}


def states() -> list[str]:
    return [each["state"] for each in status()["elements"]]


def have_reported() -> list[bool]:
    return [any(task["metrics"] for task in each["tasks"]) for each in status()["elements"]]


def test_grid_runs_one_after_another_and_ends_with_the_worst_exit_code(place: Path) -> None:
    done = subprocess.run(
        sweep_command(place, "--grid", "kind=train,fail", "--grid", "lr=0.5,0.25"), capture_output=True, text=True
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "0 | kind=train lr=0.5\n" in done.stdout
    found = status()
    assert [each["labels"] for each in found["elements"]] == [
        {"kind": kind, "lr": lr} for kind in ("train", "fail") for lr in ("0.5", "0.25")
    ]
    assert [(each["state"], each["exit_code"]) for each in found["elements"]] == [("COMPLETED", 0)] * 2 + [
        ("FAILED", 7)
    ] * 2
    assert status(f"{found['name']}_1")["labels"] == {"kind": "train", "lr": "0.25"}
    begins = [
        json.loads((place / "runs" / f"{found['name']}_{index}" / "job.json").read_text())["started"]
        for index in range(4)
    ]
    assert begins == sorted(begins)
    listed = subprocess.run([TF4SLURM, "list"], capture_output=True, text=True).stdout
    assert "4 of 4 done, 2 failed" in listed
    assert listed.count("train-") == 1
    shown = subprocess.run([TF4SLURM, "status"], capture_output=True, text=True).stdout
    assert "exit code 7" in shown
    assert "Training is done" not in shown
    report = subprocess.run([TF4SLURM, "report"], capture_output=True, text=True)
    assert report.stdout == f"{place / 'runs' / found['name']}.html\n", report.stderr


@pytest.mark.parametrize("how", ["signal", "cancel"])
def test_stopped_sweep_lets_running_elements_save_and_starts_no_more(place: Path, how: str) -> None:
    command = sweep_command(place, "--at-most", "2", "--grid", "kind=wait", "--grid", "lr=1,2,3,4")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: have_reported() == [True, True, False, False], 60), status()
            assert states() == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
            if how == "signal":
                process.send_signal(signal.SIGTERM)
            else:
                done = subprocess.run([TF4SLURM, "cancel", status()["name"]], capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert states() == ["STOPPED"] * 4
    assert "4 of 4 done, 4 stopped" in subprocess.run([TF4SLURM, "list"], capture_output=True, text=True).stdout
    assert sorted(path.name for path in place.glob("saved-*")) == ["saved-1.0", "saved-2.0"]
    assert len(list((place / "runs").glob("train-*_*"))) == 2


@pytest.mark.parametrize("second", ["cancel", "cancel --now", "Ctrl-C", "two Ctrl-C"])
def test_second_cancel_of_a_sweep_leaves_the_saves_their_time(place: Path, second: str) -> None:
    command = sweep_command(
        place, "--at-most", "2", "--grid", "kind=saves", "--grid", "lr=1,2,3", "--grace-period", "60"
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: have_reported() == [True, True, False], 60), status()
            name = status()["name"]
            with subprocess.Popen([TF4SLURM, "cancel", name], stderr=subprocess.DEVNULL) as first:
                assert wait_until(lambda: len(list(place.glob("saving-*"))) == 2, 60), status()
                if second.endswith("Ctrl-C"):
                    for count in range(1, 3 if second == "two Ctrl-C" else 2):
                        process.send_signal(signal.SIGINT)
                        kind = "stop_repeated" if count == 1 else "grace_period_over"
                        assert wait_until(functools.partial(has_events, kind, 2), 60)
                        press_later()
                else:
                    done = subprocess.run([TF4SLURM, *second.split(), name], capture_output=True, text=True)
                    assert done.returncode == 0, done.stderr
                    assert ("saves already, or ends: at most " in done.stderr) == (second == "cancel")
                assert first.wait(60) == 0
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert states() == ["STOPPED"] * 3
    is_cut = second in ("cancel --now", "two Ctrl-C")
    assert len(list(place.glob("saved-*"))) == (0 if is_cut else 2)


def has_events(kind: str, count: int) -> bool:
    """Return whether all runs together have this number of events of a kind."""
    lines = [line for path in Path("runs").glob("*/events.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line)["kind"] for line in lines].count(kind) == count


def test_sweep_in_a_thread_is_cancelled(place: Path) -> None:
    """A signal would end the whole program, for example a notebook."""
    code = (
        "import sys, threading, tf4slurm\n"
        "sweep = tf4slurm.Sweep(sys.argv[1:], grid={'kind': ['wait'], 'lr': [1, 2]}, ps=0, workers=0)\n"
        "def run():\n"
        "    try: sweep.run(quiet=True)\n"
        "    except KeyboardInterrupt: print('stopped', flush=True)\n"
        "thread = threading.Thread(target=run)\n"
        "thread.start(); thread.join(); print('goes on')\n"
    )
    command = [sys.executable, "-c", code, sys.executable, str(place / "train.py"), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert wait_until(lambda: have_reported() == [True, False], 60), status()
            subprocess.run([TF4SLURM, "cancel", status()["name"]], check=True)
            assert process.communicate(timeout=60)[0] == "stopped\ngoes on\n"
        finally:
            process.kill()
    assert (process.returncode, states()) == (0, ["STOPPED", "STOPPED"])
    assert [path.name for path in place.glob("saved-*")] == ["saved-1.0"]


def test_sweep_in_python_returns_results_and_the_best(place: Path) -> None:
    command = [sys.executable, str(place / "train.py"), str(place), "--lr", "{lr}"]
    sweep = tf4slurm.Sweep(command, grid={"lr": [0.5, 0.25, 1.0]}, ps=0, workers=0)
    with pytest.raises(UnknownJobError):
        sweep.results()
    assert sweep.run(at_most=2, quiet=True) == 0
    results = sweep.results()
    assert [run.labels for run in results] == [{"lr": "0.5"}, {"lr": "0.25"}, {"lr": "1.0"}]
    assert [(run.state, run.exit_code, run.steps) for run in results] == [("COMPLETED", 0, 3)] * 3
    assert [run.best["loss"] for run in results] == pytest.approx([0.5 / 3, 0.25 / 3, 1 / 3])
    assert sweep.best("loss").labels == sweep.best("accuracy").labels == {"lr": "0.25"}
    with pytest.raises(OptionError, match=r"no metric|has reported a metric 'lost'. Reported: accuracy, loss"):
        sweep.best("lost")
    assert sweep.status().state == "COMPLETED"
    assert sweep.report() == place / "runs" / f"{sweep.status().name}.html"
    assert "tf4slurm" not in sweep.logs()
    assert re.search(r"^train-.*_2 +lr=1.0 +COMPLETED +0 +3$", sweep._repr_html_().partition("</pre>")[0], re.MULTILINE)
    found = tf4slurm.Sweep.find(sweep.status().name)
    assert found.results() == results
    assert found.points == sweep.points
    assert repr(found).startswith("Sweep(")
    with pytest.raises(UnknownJobError, match=r"_1 is no sweep and no job array"):
        tf4slurm.Sweep.find(f"{sweep.status().name}_1")


def test_of_an_ended_local_sweep_one_element_is_resumed(place: Path) -> None:
    command = [sys.executable, str(place / "train.py"), str(place)]
    sweep = tf4slurm.Sweep(command, grid={"kind": ["fail", "train"], "lr": [1]}, ps=0, workers=0)
    assert sweep.run(quiet=True) == 7
    name = sweep.status().name
    with pytest.raises(JobStateError, match=f'1 did not complete. Resume one with "tf4slurm resume {name}_0"'):
        tf4slurm.resume(name)
    assert tf4slurm.resume(f"{name}_0").exit_code == 7


def test_report_of_two_sweeps_is_beside_their_run_directories(place: Path) -> None:
    sweeps = [tf4slurm.Sweep("true", points=[{"lr": 1}], ps=0, workers=0, name=name) for name in ("one", "two")]
    assert [sweep.run(quiet=True) for sweep in sweeps] == [0, 0]
    first, second = (sweep.status().name for sweep in sweeps)
    path = tf4slurm.make_report([first, second])
    assert path == place / "runs" / f"{first}-comparison.html"
    assert f"{second}_0" in path.read_text()


def test_sweep_whose_launchers_fail_at_once_fails(place: Path) -> None:
    command = [TF4SLURM, "run", *COMMAND, "--grid", "lr=1,2", "--", sys.executable, "missing.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout
    assert "0 | tf4slurm: " in done.stdout
    assert states() == ["STOPPED", "STOPPED"]


def test_waiting_element_is_not_cancelled_alone(place: Path) -> None:
    command = sweep_command(place, "--grid", "kind=wait", "--grid", "lr=1,2")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: have_reported() == [True, False], 60), status()
            name = status()["name"]
            refused = subprocess.run([TF4SLURM, "cancel", f"{name}_1"], capture_output=True, text=True)
            assert (refused.returncode, "has not started. Cancel the whole sweep." in refused.stderr) == (2, True)
            done = subprocess.run([TF4SLURM, "cancel", f"{name}_0"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert wait_until(lambda: have_reported() == [True, True], 60), status()  # it has started now
            subprocess.run([TF4SLURM, "cancel", name], check=True)
            assert process.wait(60) == 143
        finally:
            process.kill()


def test_limit_of_elements_may_be_an_option_of_a_sweep() -> None:
    sweep = tf4slurm.Sweep("true", grid={"lr": [1, 2, 3]}, ps=0, workers=0, at_most=2, site="none")
    assert "#SBATCH --array=0-2%2\n" in sweep.script()


def test_ended_sweep_has_no_pending_elements(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the sweep, this one, goes on."""
    command = [sys.executable, str(place / "train.py"), str(place)]
    sweep = tf4slurm.Sweep(command, grid={"kind": ["wait"], "lr": [1, 2]}, ps=0, workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(LocalSweep, "_start", interrupt_after(LocalSweep._start))
        with pytest.raises(KeyboardInterrupt):
            sweep.run(quiet=True)
    assert [each.state for each in sweep.status().elements] == ["STOPPED", "STOPPED"]
    assert sweep.wait(timeout_seconds=30) in (1, 130)


def interrupt_after(start: Callable[[LocalSweep, int], None]) -> Callable[[LocalSweep, int], None]:
    """Return a function that starts an element, and lets this process get a SIGINT."""

    def start_and_interrupt(sweep: LocalSweep, index: int) -> None:
        start(sweep, index)
        os.kill(os.getpid(), signal.SIGINT)

    return start_and_interrupt


def test_table_of_a_sweep_needs_pandas(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    sweep = tf4slurm.Sweep("true", points=[{"lr": 1}], ps=0, workers=0)
    with pytest.raises(MissingDependencyError, match="pip install pandas"):
        sweep.table()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs a grid or points"),
        ({"grid": {}}, "needs a grid or points"),
        ({"grid": {"lr": []}}, "expected a list of one or more values"),
        ({"grid": {"lr": [1]}, "points": [{"lr": 1}]}, "not both"),
        ({"grid": {"lr": [1]}, "array_args": "file"}, "in place of array_args"),
        ({"points": [{"lr": 1}, {"units": 1}]}, "the same names in each point"),
    ],
)
def test_invalid_sweep_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        tf4slurm.Sweep("true", **arguments)


def test_two_sweeps_that_start_together_have_names_of_their_own(place: Path) -> None:
    command = sweep_command(place, "--grid", "lr=1,2")
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as first,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as second,
    ):
        assert (first.wait(60), second.wait(60)) == (0, 0)
    assert len(list((place / "runs").glob("*.sweep"))) == 2
    assert len(list((place / "runs").glob("train-*_[01]"))) == 4
    assert os.stat(next((place / "runs").glob("*.sweep"))).st_mode & 0o777 == 0o600
