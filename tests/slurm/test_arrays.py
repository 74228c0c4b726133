"""Job arrays and heterogeneous jobs in every verb, on a real Slurm."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab
from tf4slurm.errors import COMPLETED, FAILED, STOPPED
from tf4slurm.slurm.parsing import ENDED_STATES, parse_queue

SCRIPT = """
import os, sys, time, tf4slurm
from pathlib import Path
index = os.environ["SLURM_ARRAY_TASK_ID"] if "SLURM_ARRAY_TASK_ID" in os.environ else "job"
directory = Path(sys.argv[1])
kind = sys.argv[2] if len(sys.argv) > 2 else "train"
if os.environ["TF4SLURM_TASK"].startswith("ps"):
    time.sleep(1000)
print("hello from", index, "with", *sys.argv[2:], flush=True)
if kind == "fail" and not (directory / "repaired").exists():
    sys.exit(7)
step = 0
while step == 0 or not ((directory / "finish").exists() or (directory / f"finish-{index}").exists()):
    step += 1
    tf4slurm.report(step=step, loss=1 / step)
    time.sleep(0.05)
    if tf4slurm.should_stop():
        for name in ("saving", "saved") if os.environ["TF4SLURM_TASK"] == "chief/0" else ():  # it ends the job
            with (directory / name).open("a") as file:
                print(index, file=file)
            time.sleep(2 if name == "saving" else 0)
        break
"""
ROLES = ("--workers", "1", "--ps", "1", "-t", "5")


class Sweep:
    """Submits arrays of the script in `directory`, and calls the verbs on the login host."""

    def __init__(self, lab: SlurmLab, directory: Path) -> None:
        self.lab = lab
        self.directory = directory
        self._script = directory / "train.py"
        self._script.write_text(SCRIPT)

    def run(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        return self.lab.run(TF4SLURM, *arguments, cwd=self.directory, check=check)

    def submit(self, *options: str, lines: tuple[str, ...] = ()) -> str:
        """Submit a job, an array with one element for each of `lines`, its arguments, if there are some."""
        arguments = self.directory / "lines"
        arguments.write_text("\n".join(lines))
        array = ("--array-args", str(arguments)) if lines else ()
        command = (sys.executable, str(self._script), str(self.directory))
        return self.run("submit", *ROLES, *array, *options, "--", *command, check=True).stdout.strip()

    def status(self, job_id: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json", job_id, check=True).stdout)
        return found[0]

    def states(self, job_id: str) -> dict[str, str]:
        """Return the state of each element by its id."""
        return {each["job_id"]: each["state"] for each in self.status(job_id)["elements"]}

    def wait_for_steps(self, *job_ids: str) -> None:
        """Wait until all workers have reported a step, and thus handle a stop request."""

        def has_stepped(job_id: str) -> bool:
            return any(task["step"] for task in self.status(job_id)["tasks"])

        assert wait_until(lambda: all(map(has_stepped, job_ids)), 90, poll_seconds=0.5), self.run("status").stdout

    def finish(self) -> None:
        (self.directory / "finish").touch()

    def saves(self) -> tuple[list[str], list[str]]:
        """Return the index of the element of each save that has begun, and of each that was completed."""

        def read(name: str) -> list[str]:
            path = self.directory / name
            return sorted(path.read_text().split()) if path.exists() else []

        return read("saving"), read("saved")


@pytest.fixture
def sweep(lab: SlurmLab, tmp_path: Path) -> Iterator[Sweep]:
    yield Sweep(lab, tmp_path)
    lab.cancel_all()


def test_each_verb_knows_whole_array_and_elements(sweep: Sweep) -> None:
    array = sweep.submit(lines=("train --lr 0.1", "fail", "train"))
    first, failed, last = (f"{array}_{index}" for index in range(3))
    errors = (sweep.directory / "errors").open("w+")
    waited = sweep.lab.popen(TF4SLURM, "wait", array, cwd=sweep.directory, stderr=errors)
    sweep.wait_for_steps(first, last)
    assert wait_until(lambda: sweep.states(array) == {first: "RUNNING", failed: FAILED, last: "RUNNING"}, 60), (
        sweep.status(array)
    )
    shown = sweep.run("status", array).stdout
    assert "3 elements: 1 FAILED, 2 RUNNING." in shown
    assert re.search(rf"^{first} +arguments=train --lr 0\.1 +RUNNING +- +\d+ +loss=", shown, re.MULTILINE)
    assert re.search(rf"^{failed} +arguments=fail +FAILED +7 ", shown, re.MULTILINE)
    assert sweep.status(f"train-{array}_1")["exit_code"] == 7
    assert re.search(rf"^{array} +train-{array} +1 of 3 done, 1 failed", sweep.run("list").stdout, re.MULTILINE)
    assert re.search(rf"^{failed} +train-{failed} +FAILED +7 ", sweep.run("list", "--elements").stdout, re.MULTILINE)
    assert "hello from 0 with train --lr 0.1\n" in sweep.run("logs", first, "worker/0").stdout
    assert re.search(r"^2 worker/0 \| hello from 2", sweep.run("logs", array).stdout, re.MULTILINE)
    progress = f"train-{array} 1 of 3 done, 1 failed"  # of which it asks Slurm every 10 s
    assert wait_until(lambda: progress in (sweep.directory / "errors").read_text(), 30)
    assert waited.poll() is None
    sweep.finish()
    assert waited.wait(60) == 7
    printed = (sweep.directory / "errors").read_text()
    assert f"train-{array} FAILED, exit code 7. 3 elements: 2 COMPLETED, 1 FAILED." in printed
    assert f"train-{failed} FAILED, exit code 7" in printed
    assert f"train-{first} COMPLETED" not in printed


def test_failed_elements_alone_are_resumed(sweep: Sweep) -> None:
    sweep.finish()
    array = sweep.submit("--sbatch", "array=0-2%2", lines=("train", "fail --lr 1", "train"))
    assert sweep.run("wait", array).returncode == 7
    (sweep.directory / "repaired").touch()
    again = sweep.run("resume", array)
    assert again.returncode == 0, again.stderr
    job_id = again.stdout.strip()
    assert sweep.run("wait", job_id).returncode == 0
    (element,) = sweep.status(job_id)["elements"]
    assert (element["job_id"], element["labels"]) == (f"{job_id}_1", {"arguments": "fail --lr 1"})
    done = sweep.run("resume", job_id)
    assert (done.returncode, "1 elements of" in done.stderr and "have completed" in done.stderr) == (2, True), (
        done.stderr
    )
    single = sweep.run("resume", f"{array}_1")
    assert single.returncode == 0, single.stderr
    assert sweep.run("wait", single.stdout.strip()).returncode == 0


def test_cancel_of_an_array_lets_running_elements_save_and_starts_no_other(sweep: Sweep) -> None:
    array = sweep.submit("--array", "0-2%1", lines=("train", "train", "train"))
    sweep.wait_for_steps(f"{array}_0")
    done = sweep.run("cancel", array)
    assert done.returncode == 0, done.stderr
    assert "2 pending elements cancelled" in done.stderr
    assert sweep.saves() == (["0"], ["0"])
    assert set(sweep.states(array).values()) == {STOPPED}, sweep.status(array)
    assert not list((sweep.directory / "runs").glob(f"train-{array}_[12]"))
    assert sweep.run("wait", array).returncode == 130


def test_cancel_of_one_element_lets_it_save_and_leaves_the_others(sweep: Sweep) -> None:
    """The last element has the array's own number as its SLURM_JOB_ID."""
    array = sweep.submit("--array", "0-3%2", lines=("train", "train", "train", "train"))
    sweep.wait_for_steps(f"{array}_0", f"{array}_1")
    assert sweep.run("cancel", f"{array}_0").returncode == 0
    assert sweep.saves() == (["0"], ["0"])
    assert sweep.run("cancel", f"{array}_3").returncode == 0
    sweep.wait_for_steps(f"{array}_2")
    states = sweep.states(array)
    assert [states[f"{array}_{index}"] for index in range(4)] == [STOPPED, "RUNNING", "RUNNING", STOPPED]
    numbers = sweep.lab.run("squeue", "-h", "-r", "-t", "R", "-o", "%i %A").stdout.split()
    assert numbers[0] == f"{array}_1" or numbers[2] == f"{array}_1"
    assert sweep.run("cancel", f"{array}_2").returncode == 0
    assert sweep.states(array)[f"{array}_1"] == "RUNNING"
    assert sweep.run("cancel", f"{array}_[1-1]").returncode == 0
    assert sweep.saves() == (["0", "1", "2"], ["0", "1", "2"])
    assert not list((sweep.directory / "runs").glob(f"train-{array}_3"))


def test_second_cancel_of_an_element_or_the_array_leaves_the_save_its_time(sweep: Sweep) -> None:
    array = sweep.submit(lines=("train", "train"))
    sweep.wait_for_steps(f"{array}_0", f"{array}_1")
    with sweep.lab.popen(TF4SLURM, "cancel", f"{array}_0", cwd=sweep.directory) as first:
        assert wait_until(lambda: sweep.saves()[0] == ["0"], 60)
        element = sweep.run("cancel", f"{array}_0")
        assert first.wait(60) == 0
    with sweep.lab.popen(TF4SLURM, "cancel", array, cwd=sweep.directory) as first:
        assert wait_until(lambda: sweep.saves()[0] == ["0", "1"], 60)
        whole = sweep.run("cancel", array)
        assert first.wait(60) == 0
    for done, name in ((element, f"train-{array}_0"), (whole, f"1 element of train-{array}")):
        assert re.search(rf"{name} saves already, or ends: at most \d+ s are left\. To skip them: ", done.stderr)
    assert sweep.saves() == (["0", "1"], ["0", "1"])
    assert set(sweep.states(array).values()) == {STOPPED}


def test_cancel_now_cuts_the_save_of_one_element(sweep: Sweep) -> None:
    array = sweep.submit(lines=("train", "train"))
    sweep.wait_for_steps(f"{array}_0", f"{array}_1")
    with sweep.lab.popen(TF4SLURM, "cancel", f"{array}_0", cwd=sweep.directory) as first:
        assert wait_until(lambda: sweep.saves()[0] == ["0"], 60)
        now = sweep.run("cancel", "--now", f"{array}_0")
        assert first.wait(60) == 0
    assert "has ended: STOPPED, exit code 130" in now.stderr
    assert sweep.saves() == (["0"], [])
    assert sweep.states(array)[f"{array}_1"] == "RUNNING"
    assert sweep.run("cancel", array).returncode == 0


def test_unknown_elements_are_refused(sweep: Sweep) -> None:
    sweep.finish()
    array = sweep.submit(lines=("train", "train"))
    plain = sweep.submit()
    for job_id, text in {
        f"{array}_2": f"The array train-{array} has the elements 0-1, and no element 2.",
        f"train-{array}_9": f"The array train-{array} has the elements 0-1, and no element 9.",
        f"{plain}_0": f"train-{plain} is no job array, so it has no element 0.",
        f"{array}_[0-5]": f"The array train-{array} has the elements 0-1, and no element 2.",
    }.items():
        for verb in ("status", "cancel", "resume", "wait", "logs"):
            done = sweep.run(verb, job_id)
            assert (done.returncode, text in done.stderr) == (5, True), (verb, done.stderr)
    assert sweep.run("wait", array, plain).returncode == 0


def test_array_beyond_slurms_limit_is_refused_with_the_limit(sweep: Sweep) -> None:
    values = ",".join(map(str, range(1100)))
    done = sweep.run("submit", *ROLES, "--grid", f"lr={values}", "--", "true")
    assert done.returncode == 4, done.stderr
    assert "MaxArraySize=1001: the largest index is 1000" in done.stderr
    assert not list((sweep.directory / "runs").iterdir())


def test_sweep_in_python(sweep: Sweep) -> None:
    program = """
import sys, tf4slurm
command = [sys.executable, "train.py", ".", "{kind}"]
sweep = tf4slurm.Sweep(command, grid={"kind": ["train", "fail", "short"]}, ps=1, workers=1, time=5, site="none")
code = sweep.submit(at_most=2).wait()
print(code, [(run.labels["kind"], run.state, run.exit_code) for run in sweep.results()], sweep.best("loss").labels)
"""
    (sweep.directory / "sweep.py").write_text(program)
    sweep.finish()
    done = sweep.lab.run(sys.executable, "sweep.py", cwd=sweep.directory, check=False)
    assert done.returncode == 0, done.stderr
    expected = [("train", COMPLETED, 0), ("fail", FAILED, 7), ("short", COMPLETED, 0)]
    assert done.stdout.splitlines()[-1].startswith(f"7 {expected} ")


def test_job_that_an_element_submits_has_its_own_id(sweep: Sweep) -> None:
    """It inherits SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID of the element."""
    inner = (TF4SLURM, "run", *ROLES[:4], "--name", "inner", "--", sys.executable, "train.py", ".")
    (sweep.directory / "inner.sh").write_text(f"#!/bin/bash\nexec {' '.join(map(str, inner))}\n")
    (sweep.directory / "outer.sh").write_text("#!/bin/bash\nsbatch --parsable -n3 inner.sh > inner-id\n")
    sweep.finish()
    sweep.lab.run("sbatch", "--array=3", "outer.sh", cwd=sweep.directory)
    path = sweep.directory / "inner-id"
    assert wait_until(lambda: path.exists() and bool(path.read_text().strip()), 60)
    inner_id = path.read_text().strip()
    assert wait_until(lambda: f"inner-{inner_id} " in sweep.run("list").stdout, 60)
    assert sweep.run("wait", inner_id).returncode == 0
    assert [path.name for path in (sweep.directory / "runs").iterdir()] == [f"inner-{inner_id}"]


def test_heterogeneous_job_is_one_job_in_each_verb(sweep: Sweep) -> None:
    job_id = sweep.submit("--het")
    sweep.wait_for_steps(job_id)
    assert re.search(rf"^{job_id} +train-{job_id} +RUNNING", sweep.run("list").stdout, re.MULTILINE)
    assert sweep.status(f"{job_id}+1")["job_id"] == job_id
    resumed = sweep.run("resume", job_id)
    assert (resumed.returncode, f"train-{job_id} is still RUNNING" in resumed.stderr) == (2, True), resumed.stderr
    grown = sweep.run("grow", job_id, "--workers", "1", "--sbatch", "begin=now+1hour")
    assert grown.returncode == 0, grown.stderr
    assert _queue(sweep.lab, grown.stdout.strip()) == {f"{grown.stdout.strip()}_0": "PENDING"}
    done = sweep.run("cancel", job_id)
    assert (done.returncode, "has ended: STOPPED, exit code 130" in done.stderr) == (0, True), done.stderr
    assert sweep.saves() == (["job"], ["job"])
    assert sweep.run("wait", job_id).returncode == 130


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_states_are_true_at_every_look_and_no_save_is_cut(sweep: Sweep, seed: int) -> None:
    """Elements fail, end, are cancelled and preempted at random. Their states are compared with Slurm's at each look.

    With an even seed all that is left is cancelled in the end.
    """
    chosen = random.Random(seed)
    kinds = tuple(chosen.choice(("train", "train", "fail")) for _ in range(12))
    array = sweep.submit("--array", "0-11%4", "-p", "low", "--requeue", "3", "--grace-period", "20", lines=kinds)
    ended: dict[str, str] = {}
    disturber = Disturber(sweep, array, chosen)
    deadline = time.monotonic() + 330
    for number in itertools.count():
        before = _queue(sweep.lab, array)
        states = sweep.states(array)
        _check_look(states, ended, before, _queue(sweep.lab, array))
        ended = {job_id: state for job_id, state in states.items() if state in (COMPLETED, FAILED, STOPPED)}
        if len(ended) == 12:
            break
        assert time.monotonic() < deadline, states
        disturber.disturb([job_id for job_id, state in states.items() if state == "RUNNING"])
        if number == 40 and seed % 2:
            sweep.finish()
        elif number == 40:
            disturber.cancel_all()
        time.sleep(0.5)
    for index, kind in enumerate(kinds):
        job_id = f"{array}_{index}"
        expected = {FAILED if kind == "fail" else COMPLETED, *([STOPPED] if job_id in disturber.cancelled else [])}
        assert ended[job_id] in expected, sweep.status(job_id)
    begun, done = sweep.saves()
    assert begun == done
    assert begun, "nothing was disturbed"
    states_left = set(ended.values())
    worst = (7,) if FAILED in states_left else (1, 130) if STOPPED in states_left else (0,)
    assert sweep.run("wait", array).returncode in worst


class Disturber:
    """Ends, cancels or preempts an element of an array at random.

    Attributes:
        cancelled: The ids of the elements that it has cancelled.
        num_preemptions: How often a job with a higher priority has taken all nodes.
    """

    def __init__(self, sweep: Sweep, array: str, chosen: random.Random) -> None:
        self.cancelled: set[str] = set()
        self.num_preemptions = 0
        self._sweep = sweep
        self._array = array
        self._chosen = chosen

    def disturb(self, running: list[str]) -> None:
        victim = self._chosen.choice(running) if running and self._chosen.random() < 0.5 else None
        if victim is None or not any(task["step"] for task in self._sweep.status(victim)["tasks"]):
            return
        kind = self._chosen.choice(("finish", "cancel", "preempt"))
        if kind == "preempt" and self.num_preemptions < 2:
            self.num_preemptions += 1
            urgent = ("-p", "high", "-N4", "--exclusive", "--job-name", "urgent", "--wrap", "sleep 1")
            self._sweep.lab.run("sbatch", *urgent, cwd=self._sweep.directory)
        elif kind == "cancel" and len(self.cancelled) < 3:
            self.cancelled.add(victim)
            assert self._sweep.run("cancel", victim).returncode == 0
        else:
            (self._sweep.directory / f"finish-{victim.partition('_')[2]}").touch()

    def cancel_all(self) -> None:
        self.cancelled |= {f"{self._array}_{index}" for index in range(12)}
        assert self._sweep.run("cancel", self._array).returncode == 0


def _check_look(states: dict[str, str], ended: dict[str, str], before: dict[str, str], after: dict[str, str]) -> None:
    """Compare the states of 12 elements with Slurm's before and after the look, and with those that ended earlier."""
    assert len(states) == 12
    for job_id, state in states.items():
        assert ended.get(job_id, state) == state, "an ended element does not change"
        slurm = {before.get(job_id, "gone"), after.get(job_id, "gone")}
        if slurm == {"PENDING"}:
            assert state == "PENDING", (job_id, state)
        elif slurm == {"RUNNING"}:
            assert state in ("RUNNING", COMPLETED, FAILED, STOPPED), (job_id, state)  # or its result was just written
        elif slurm <= {*ENDED_STATES, "gone"}:
            assert state in (COMPLETED, FAILED, STOPPED), (job_id, state)


def _queue(lab: SlurmLab, array: str) -> dict[str, str]:
    done = lab.run("squeue", "-h", "--array", "-t", "all", "-j", array, "-o", "%i|%T|%r|%M|%l|%S|%N")
    return {str(entry.job_id): entry.state for entry in parse_queue(done.stdout)}
