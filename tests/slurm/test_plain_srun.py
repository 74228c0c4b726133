"""Faults under plain srun, for each way in which a ps waits: all scripts and srun end, whatever fails.

docs/concepts/failures.md has the same cases as a table.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).with_name("plain_srun_script.py")
SLURM_SECONDS = 30.0  # from the end of the last script
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
PS_FIRST = ("ps", "worker", "worker")
WORKER_FIRST = ("worker", "ps", "worker")
CHIEF_FIRST = ("chief", "ps", "worker")


@pytest.fixture(scope="module")
def patient_lab(slurm: None) -> Iterator[SlurmLab]:
    """A lab in which Slurm itself would notice the loss of a host only after 300 s, its default."""
    with SlurmLab(slurmd_timeout_seconds=300) as lab:
        yield lab


class Step:
    """A running step of the script, one task per host."""

    def __init__(self, lab: SlurmLab, directory: Path, way: str, roles: tuple[str, ...]) -> None:
        self.lab, self.directory, self.roles = lab, directory, roles
        self._output = (directory / "output").open("w")
        command = (sys.executable, SCRIPT, way, directory, *roles)
        size = (f"-n{len(roles)}", f"-N{len(roles)}")
        self.process = lab.popen(
            *("srun", "-Q", "-K0", *size, *map(str, command)),
            cwd=directory,
            env=QUIET,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        names = [f"{role}-{roles[:rank].count(role)}" for rank, role in enumerate(roles)]
        for name in names:
            assert wait_until((directory / name).exists, 120), f"no {name}: {self.output}"
        self.places = {name: (directory / name).read_text().split() for name in names}
        if way in ("old", "strategy"):
            time.sleep(1)  # most steps are then made in sessions that exist

    def kill(self, name: str, number: int, *, sidecar: bool = False) -> None:
        node, process_id, sidecar_id = self.places[name]
        self.lab.on(node, "kill", f"-{number}", sidecar_id if sidecar else process_id)

    def signal_slurmstepd(self, name: str, number: int) -> None:
        node = self.places[name][0]
        ids = self.lab.on(node, "pgrep", "-f", r"^slurmstepd: \[[0-9]+\.0\]").stdout.split()
        self.lab.on(node, "kill", f"-{number}", ids[0])

    def end_training(self) -> None:
        (self.directory / "end").touch()

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"srun does not end: {self.output}")

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.lab.cancel_all()
            self.process.wait()
        self._output.close()


def run(lab: SlurmLab, directory: Path, way: str, roles: tuple[str, ...]) -> Iterator[Step]:
    step = Step(lab, directory, way, roles)
    try:
        yield step
    finally:
        step.close()


class Case(NamedTuple):
    """What happens to a step, and what srun's exit code and the output must be."""

    way: str
    roles: tuple[str, ...]
    victim: str
    fault: str
    codes: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.way}-{self.fault}-{self.victim}-{self.roles[0]}_first"


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
KILLED, STOPPED = (137,), (0, 137)
LOST = "ran the control service, is lost. The step ends."
VARIABLES = "and with it the variables there. The step ends."
CASES = [
    Case("barrier", PS_FIRST, "", "none", (0,), "ps/0 done worker/0 worker/1 failed\n"),
    Case("barrier", PS_FIRST, "worker-0", "kill", KILLED, "ps/0 done worker/1 failed worker/0\n"),
    Case("barrier", PS_FIRST, "worker-0", "stop", STOPPED, "ps/0 done worker/1 failed worker/0\n"),
    Case("barrier", PS_FIRST, "worker-0", "slurmstepd kill", (0, 137), "ps/0 done worker/0 worker/1 failed\n"),
    Case("barrier", PS_FIRST, "worker-0", "slurmstepd stop", (0, 137), "ps/0 done worker/0 worker/1 failed\n"),
    Case("barrier", WORKER_FIRST, "worker-0", "slurmstepd kill", (0, 137), "ps/0 done worker/0 worker/1 failed\n"),
    Case("barrier", PS_FIRST, "worker-0", "sidecar kill", (0,), "ps/0 done worker/1 failed worker/0\n"),
    Case("barrier", PS_FIRST, "worker-0", "sidecar stop", (0, 137), "ps/0 done worker/1 failed worker/0\n"),
    Case("barrier", PS_FIRST, "ps-0", "sidecar kill", (1, 137), LOST),
    Case("barrier", PS_FIRST, "ps-0", "sidecar stop", (1, 137), LOST),
    Case("barrier", WORKER_FIRST, "worker-0", "sidecar kill", (1, 137), LOST),
    Case("barrier", WORKER_FIRST, "worker-0", "kill", KILLED, "ps/0 done worker/1 failed worker/0\n"),
    Case("barrier", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("barrier", WORKER_FIRST, "ps-0", "stop", (1, 137), VARIABLES),
    Case("barrier", WORKER_FIRST, "ps-0", "sidecar kill", (1, 137), VARIABLES),
    Case("saving", PS_FIRST, "worker-1", "terminate", (0,), "ps/0 done worker/0 worker/1 failed\n"),
    Case("saving", WORKER_FIRST, "ps-0", "kill", KILLED, "worker/1 saves\n"),
    Case("sleep", PS_FIRST, "", "none", (0,), "ps/0 ends: training was over 3 s ago"),
    Case("sleep", WORKER_FIRST, "worker-1", "kill", KILLED, "ps/0 ends: training was over 3 s ago"),
    Case("queue", PS_FIRST, "", "none", (0,), "ps/0 done worker/0 worker/1 failed\n"),
    Case("queue", PS_FIRST, "worker-0", "kill", KILLED, "ps/0 done worker/1 failed worker/0\n"),
    Case("old", PS_FIRST, "", "none", (0,), "ps/0 returns\n"),
    Case("old", PS_FIRST, "worker-1", "kill", KILLED, "ps/0 returns\n"),
    Case("join", PS_FIRST, "", "none", (0,), "ps/0 ends: training was over 3 s ago"),
    Case("queue", PS_FIRST, "worker-0", "stop", STOPPED, "ps/0 done worker/1 failed worker/0\n"),
    Case("queue", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("old", WORKER_FIRST, "worker-0", "kill", KILLED, "ps/0 returns\n"),
    Case("old", PS_FIRST, "worker-0", "stop", STOPPED, "worker/1 returns\n"),
    Case("join", PS_FIRST, "worker-0", "kill", KILLED, "ps/0 ends: training was over 3 s ago"),
    Case("join", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case(
        "strategy", CHIEF_FIRST, "worker-0", "kill", KILLED, "chief/0 ends: its ClusterCoordinator waits for a worker"
    ),
    Case("strategy", CHIEF_FIRST, "", "none", (0,), "ps/0 ends: training was over 3 s ago"),
    Case("strategy", CHIEF_FIRST, "chief-0", "kill", KILLED, "worker/0 ends: training was over 3 s ago"),
]
QUICK = [case for case in CASES if case.way in ("barrier", "saving", "sleep")] + [
    case for case in CASES if (case.way, case.fault) in (("old", "kill"), ("strategy", "none"))
]


def check(step: Step, case: Case) -> None:
    which, _, fault = case.fault.rpartition(" ")
    if which == "slurmstepd":
        step.signal_slurmstepd(case.victim, SIGNALS[fault])
    elif fault in SIGNALS:
        step.kill(case.victim, SIGNALS[fault], sidecar=which == "sidecar")
    if "The step ends." not in case.text and case.way not in ("saving", "strategy"):
        if case.fault != "none":
            time.sleep(1)
            assert step.process.poll() is None, step.output  # the others train on
        step.end_training()
    elif case.fault == "none":
        step.end_training()
    try:
        code = step.wait(60 + SLURM_SECONDS)
    finally:
        if case.fault == "slurmstepd stop":
            step.signal_slurmstepd(case.victim, signal.SIGCONT)
    assert case.text in step.output
    assert code in case.codes, step.output
    assert step.output.count("The step ends.") == ("The step ends." in case.text or case.way == "saving")
    assert "The launcher has ended" not in step.output or "ran the control service" in step.output


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.long) for case in CASES]
)
def test_all_scripts_and_srun_end(case: Case, lab: SlurmLab, tmp_path: Path) -> None:
    for step in run(lab, tmp_path, case.way, case.roles):
        check(step, case)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("victim", ["worker-1", "ps-0"])
@pytest.mark.parametrize("fault", ["crash", pytest.param("partition", marks=pytest.mark.long)])
def test_loss_of_a_host_ends_the_step_long_before_slurm_notices_it(
    victim: str, fault: str, patient_lab: SlurmLab, tmp_path: Path, process_mark: str
) -> None:
    """On the host of ps-0, rank 0 runs the control service."""
    lab = patient_lab
    lab.wait_idle()
    for step in run(lab, tmp_path, "barrier", PS_FIRST):
        node = step.places[victim][0]
        lab.crash(node) if fault == "crash" else lab.partition(node)
        try:
            if victim != "ps-0":
                step.end_training()
            step.wait(60 + SLURM_SECONDS)
            expected = LOST if victim == "ps-0" else "ps/0 done worker/0 failed worker/1\n"
            assert expected in step.output
        finally:
            lab.boot(node) if fault == "crash" else lab.heal(node)
            lab.cancel_all(timeout_seconds=240)  # slurmctld repeats its request to a node that was cut off
