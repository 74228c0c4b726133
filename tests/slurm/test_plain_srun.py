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

import psutil
import pytest

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).with_name("plain_srun_script.py")
SCRIPT_SECONDS = 90.0  # from the fault, or the end of training, to the end of the last script
SLURM_SECONDS = 30.0  # from then to the end of srun
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "exception": signal.SIGUSR1,
}
HOST_FAULTS = ("crash", "partition", "slurmd kill")
PS_FIRST = ("ps", "worker", "worker")
WORKER_FIRST = ("worker", "ps", "worker")
CHIEF_FIRST = ("chief", "ps", "worker")
PS_BEFORE_CHIEF = ("ps", "chief", "worker")


class Case(NamedTuple):
    """What happens to a step, and what srun's exit code and the output must be.

    Attributes:
        way: How the ps wait; see plain_srun_script.py. "task" is `srun tf4slurm task`.
        roles: The roles of the ranks.
        victim: The task to which the fault happens; "" for all.
        fault: One of SIGNALS, to the script or to another process that the first word names; or one of HOST_FAULTS.
        codes: The possible exit codes of srun. Which of several depends on whether Slurm or the script is faster.
        text: A part of the output.
        when: "registering" (the last task has not started), "formed" (no server has started), "training", or "ending"
            (the training is over, and no script has ended).
        quick: Whether `make test` runs it; else only `make test-long`.
    """

    way: str
    roles: tuple[str, ...]
    victim: str
    fault: str
    codes: tuple[int, ...]
    text: str
    when: str = "training"
    quick: bool = False

    @property
    def ends_training(self) -> bool:
        """Whether the others do not train on after the fault."""
        is_fatal = any(word in self.text for word in ("The step ends.", "Root cause:")) or self.way == "saving"
        return is_fatal or (self.way == "strategy" and self.fault != "none")

    def __str__(self) -> str:
        when = "" if self.when == "training" else f"-{self.when}"
        return "-".join((self.way, self.fault, self.victim or "all", f"{self.roles[0]}_first")) + when


class Step:
    """A running step of the script, one task per host."""

    def __init__(self, lab: SlurmLab, directory: Path, case: Case) -> None:
        self.lab, self.directory, self.case = lab, directory, case
        self._output = (directory / "output").open("w")
        roles, is_task = case.roles, case.way == "task"
        self.names = [f"{role}-{roles[:rank].count(role)}" for rank, role in enumerate(roles)]
        for name in self._held_names():
            self._hold_file(name).touch()
        self.process = lab.popen(
            *("srun", "-Q", "-K0", f"-n{len(roles)}", f"-N{len(roles)}"),
            *((TF4SLURM, "task", "--ps", "1", "--placement", ",".join(roles), "--") if is_task else ()),
            *map(str, (sys.executable, SCRIPT, "barrier" if is_task else case.way, directory, *roles)),
            cwd=directory,
            env=QUIET | ({"TIMEOUT_SECONDS": "30"} if case.when == "registering" else {}),
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self.places: dict[str, list[str]] = {}

    def wait_for_moment(self) -> None:
        """Wait until all tasks are where the fault happens."""
        case, directory = self.case, self.directory
        self.places = {name: self._wait_for_place(name) for name in self.names}
        if case.when == "registering":
            assert wait_until(lambda: any(directory.glob("runs/*/control.json")), 60), self.output
        if case.when == "ending":
            self.end_training()
            names = [name for name in self.names if case.way != "join" or not name.startswith("ps")]
            assert wait_until(lambda: all((directory / f"{name}.end").exists() for name in names), 60), self.output

    def _wait_for_place(self, name: str) -> list[str]:
        """Wait until a task is where the fault happens; return its host and the ids of its processes."""
        trains = not name.startswith("ps") and (self.case.way, name) != ("strategy", "worker-0")
        moment = {"registering": "start", "formed": "formed"}.get(self.case.when, "step" if trains else "training")
        path = self.directory / f"{name}.{moment}"
        assert wait_until(path.exists, 120), f"no {path.name}: {self.output}"
        return path.read_text().split()

    def _held_names(self) -> list[str]:
        if self.case.when == "training":
            return []
        return self.names[-1:] if self.case.when == "registering" else self.names

    def _hold_file(self, name: str) -> Path:
        moment = {"registering": "start", "formed": "formed", "ending": "end"}[self.case.when]
        return self.directory / f"hold.{name}.{moment}"

    def release(self) -> None:
        for name in self._held_names():
            self._hold_file(name).unlink()

    def fail(self) -> None:
        """Make the fault happen."""
        which, _, fault = self.case.fault.rpartition(" ")
        if fault == "none":
            return
        if not self.case.victim:
            self.lab.run("scancel", f"--signal={SIGNALS[fault].name[3:]}", f"{self.job_id}.0")
            return
        node = self.node
        if self.case.fault == "crash":
            self.lab.crash(node)
        elif self.case.fault == "partition":
            self.lab.partition(node)
        elif which == "slurmd":
            self.lab.kill_slurmd(node)
        else:
            self.lab.on(node, "kill", f"-{SIGNALS[fault].value}", self._find_process(which))

    def restore(self) -> None:
        """Undo the fault, as far as others would notice it."""
        if self.case.victim not in self.places:
            return
        if self.case.fault == "crash":
            self.lab.boot(self.node)
        elif self.case.fault == "partition":
            self.lab.heal(self.node)
        elif self.case.fault == "slurmd kill":
            self.lab.start_slurmd(self.node)
        elif self.case.fault == "slurmstepd stop":
            self.lab.on(self.node, "kill", "-CONT", self._find_process("slurmstepd"), check=False)

    @property
    def node(self) -> str:
        return self.places[self.case.victim][0]

    @property
    def job_id(self) -> str:
        (job,) = self.lab.queue()
        return job.split()[0]

    def _find_process(self, which: str) -> str:
        """Return the id, on its host, of the script of the victim, or of another process beside it."""
        node, script, companion = self.places[self.case.victim]
        if which == "slurmstepd":
            return self.lab.on(node, "pgrep", "-f", r"^slurmstepd: \[[0-9]+\.0\]").stdout.split()[0]
        if which == "sidecar" and self.case.when == "registering":
            return self.lab.on(node, "pgrep", "-P", script).stdout.split()[0]
        return companion if which in ("sidecar", "agent") else script

    def end_training(self) -> None:
        (self.directory / "end").touch()

    def wait(self) -> int:
        """Wait for the end of all scripts, and then for that of srun; return its exit code."""
        if not wait_until(lambda: not self._has_scripts() or self.process.poll() is not None, SCRIPT_SECONDS, 0.5):
            pytest.fail(f"a script does not end: {self.output}")
        try:
            return self.process.wait(SLURM_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"srun does not end: {self.output}")

    def _has_scripts(self) -> bool:
        """Return whether a script runs; one that is stopped by a signal does not."""
        found = (process.info for process in psutil.process_iter(["cmdline", "status"]))
        return any(
            (info["cmdline"] or [])[1:2] == [str(SCRIPT)]
            and str(self.directory) in info["cmdline"]
            and info["status"] != psutil.STATUS_STOPPED
            for info in found
        )

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.lab.cancel_all()
            self.process.wait()
        self._output.close()


KILLED, STOPPED, TERMINATED = (137,), (0, 137), (143,)
ALL_DONE = "ps/0 done worker/0 worker/1 failed\n"
ONE_FAILED = "ps/0 done worker/1 failed worker/0\n"
ENDS = "ps/0 ends: training was over 3 s ago"
LOST = "ran the control service, is lost. The step ends."
HOST_LOST = "which hosted the control service, is lost. The step ends."
RESTART = "restart 1 of at most 3"
VARIABLES = "and with it the variables there. The step ends."
NO_SERVICE = "The launcher has ended or was not started"
NO_WORKER = "chief/0 ends: its ClusterCoordinator waits for a worker"
CASES = [
    Case("barrier", PS_FIRST, "", "none", (0,), ALL_DONE, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "kill", KILLED, ONE_FAILED, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "stop", STOPPED, ONE_FAILED, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "terminate", TERMINATED, ONE_FAILED),
    Case("barrier", PS_FIRST, "worker-0", "exception", (1,), ONE_FAILED, quick=True),
    Case("barrier", PS_FIRST, "", "terminate", (137, 143), ""),
    Case("barrier", PS_FIRST, "worker-0", "slurmstepd kill", (0, 137), ALL_DONE, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "slurmstepd stop", (0, 137), ALL_DONE, quick=True),
    Case("barrier", WORKER_FIRST, "worker-0", "slurmstepd kill", (0, 137), ALL_DONE, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "sidecar kill", (0,), ONE_FAILED, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "sidecar stop", (0, 137), ONE_FAILED, quick=True),
    Case("barrier", PS_FIRST, "ps-0", "sidecar kill", (1, 137), LOST, quick=True),
    Case("barrier", PS_FIRST, "ps-0", "sidecar stop", (1, 137), LOST, quick=True),
    Case("barrier", WORKER_FIRST, "worker-0", "sidecar kill", (1, 137), LOST, quick=True),
    Case("barrier", WORKER_FIRST, "worker-0", "kill", KILLED, ONE_FAILED, quick=True),
    Case("barrier", WORKER_FIRST, "worker-0", "exception", (1,), ONE_FAILED),
    Case("barrier", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES, quick=True),
    Case("barrier", WORKER_FIRST, "ps-0", "stop", (1, 137), VARIABLES, quick=True),
    Case("barrier", WORKER_FIRST, "ps-0", "terminate", TERMINATED, VARIABLES),
    Case("barrier", WORKER_FIRST, "ps-0", "exception", KILLED, VARIABLES),
    Case("barrier", WORKER_FIRST, "ps-0", "sidecar kill", (1, 137), VARIABLES, quick=True),
    Case("barrier", PS_FIRST, "worker-0", "kill", KILLED, "worker/0", "registering", quick=True),
    Case("barrier", PS_FIRST, "worker-0", "stop", STOPPED, ONE_FAILED, "registering"),
    Case("barrier", PS_FIRST, "worker-0", "sidecar kill", (1,), "worker/0", "registering"),
    Case("barrier", PS_FIRST, "worker-0", "sidecar stop", KILLED, "worker/0", "registering"),
    Case("barrier", PS_FIRST, "ps-0", "kill", KILLED, "ps/0", "registering"),
    Case("barrier", PS_FIRST, "ps-0", "sidecar kill", (1,), NO_SERVICE, "registering"),
    Case("barrier", PS_FIRST, "ps-0", "sidecar stop", (1, 137), NO_SERVICE, "registering"),
    Case("barrier", WORKER_FIRST, "ps-0", "kill", KILLED, "ps/0", "registering"),
    Case("barrier", PS_FIRST, "worker-0", "kill", KILLED, ONE_FAILED, "formed"),
    Case("barrier", PS_FIRST, "worker-0", "exception", (1,), ONE_FAILED, "formed"),
    Case("barrier", PS_FIRST, "ps-0", "kill", KILLED, VARIABLES, "formed"),
    Case("barrier", PS_FIRST, "worker-0", "kill", KILLED, ALL_DONE, "ending"),
    Case("barrier", PS_FIRST, "worker-0", "stop", KILLED, ALL_DONE, "ending"),
    Case("barrier", PS_FIRST, "ps-0", "kill", KILLED, ALL_DONE, "ending"),
    Case("barrier", PS_FIRST, "ps-0", "sidecar kill", (0, 137), ALL_DONE, "ending", quick=True),
    Case("barrier", PS_FIRST, "ps-0", "sidecar stop", (0, 137), ALL_DONE, "ending"),
    Case("barrier", WORKER_FIRST, "ps-0", "kill", KILLED, ALL_DONE, "ending"),
    Case("barrier", WORKER_FIRST, "ps-0", "stop", KILLED, ALL_DONE, "ending"),
    Case("saving", PS_FIRST, "worker-1", "terminate", (0,), ALL_DONE, quick=True),
    Case("saving", WORKER_FIRST, "ps-0", "kill", KILLED, "worker/1 saves\n", quick=True),
    Case("sleep", PS_FIRST, "", "none", (0,), ENDS, quick=True),
    Case("sleep", WORKER_FIRST, "worker-1", "kill", KILLED, ENDS, quick=True),
    Case("sleep", WORKER_FIRST, "ps-0", "exception", KILLED, VARIABLES),
    Case("serve", PS_FIRST, "", "none", (0,), ALL_DONE),
    Case("serve", PS_FIRST, "worker-0", "kill", KILLED, ONE_FAILED, quick=True),
    Case("serve", PS_FIRST, "worker-0", "stop", STOPPED, ONE_FAILED),
    Case("serve", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("queue", PS_FIRST, "", "none", (0,), ALL_DONE),
    Case("queue", PS_FIRST, "worker-0", "kill", KILLED, ONE_FAILED),
    Case("queue", PS_FIRST, "worker-0", "exception", (1,), ONE_FAILED),
    Case("queue", PS_FIRST, "worker-0", "terminate", TERMINATED, ONE_FAILED),
    Case("queue", PS_FIRST, "worker-0", "stop", STOPPED, ONE_FAILED),
    Case("queue", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("queue", WORKER_FIRST, "ps-0", "exception", KILLED, VARIABLES),
    Case("queue", PS_FIRST, "worker-0", "kill", KILLED, ONE_FAILED, "formed"),
    Case("queue", PS_FIRST, "worker-0", "kill", KILLED, ALL_DONE, "ending"),
    Case("old", PS_FIRST, "", "none", (0,), "ps/0 returns\n"),
    Case("old", PS_FIRST, "worker-1", "kill", KILLED, "ps/0 returns\n", quick=True),
    Case("old", WORKER_FIRST, "worker-0", "kill", KILLED, "ps/0 returns\n", quick=True),
    Case("old", PS_FIRST, "worker-0", "stop", STOPPED, "worker/1 returns\n"),
    Case("old", PS_FIRST, "worker-1", "exception", (1,), "ps/0 returns\n"),
    Case("old", WORKER_FIRST, "worker-0", "exception", (1,), "ps/0 returns\n"),
    Case("old", PS_FIRST, "worker-1", "terminate", TERMINATED, "ps/0 returns\n"),
    Case("old", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("old", PS_FIRST, "worker-1", "kill", KILLED, ENDS, "formed"),  # its session waits for all servers
    Case("old", PS_FIRST, "worker-0", "kill", KILLED, "its session waits for worker/0, which has failed", "formed"),
    Case("old", PS_FIRST, "worker-1", "kill", KILLED, "ps/0 returns\n", "ending"),
    Case("join", PS_FIRST, "", "none", (0,), ENDS),
    Case("join", PS_FIRST, "worker-0", "kill", KILLED, ENDS),
    Case("join", PS_FIRST, "worker-0", "stop", STOPPED, ENDS),
    Case("join", PS_FIRST, "worker-0", "exception", (1,), ENDS),
    Case("join", PS_FIRST, "worker-0", "terminate", TERMINATED, ENDS),
    Case("join", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("join", PS_FIRST, "worker-0", "kill", KILLED, ENDS, "formed"),
    Case("join", PS_FIRST, "worker-0", "kill", KILLED, ENDS, "ending"),
    Case("join", WORKER_FIRST, "ps-0", "kill", KILLED, VARIABLES, "ending"),  # the workers send no signal
    Case("strategy", CHIEF_FIRST, "", "none", (0,), ENDS, quick=True),
    Case("strategy", CHIEF_FIRST, "worker-0", "kill", KILLED, NO_WORKER),
    Case("strategy", CHIEF_FIRST, "worker-0", "stop", KILLED, NO_WORKER),
    Case("strategy", CHIEF_FIRST, "chief-0", "kill", KILLED, ENDS),
    Case("strategy", CHIEF_FIRST, "chief-0", "stop", KILLED, ENDS),
    Case("strategy", CHIEF_FIRST, "chief-0", "exception", (1,), ENDS),
    Case("strategy", CHIEF_FIRST, "chief-0", "terminate", TERMINATED, ENDS),
    Case("strategy", CHIEF_FIRST, "ps-0", "kill", KILLED, VARIABLES),
    Case("strategy", PS_BEFORE_CHIEF, "chief-0", "kill", KILLED, ENDS),
    Case("strategy", PS_BEFORE_CHIEF, "chief-0", "stop", KILLED, ENDS),
    Case("task", CHIEF_FIRST, "", "none", (0,), ""),
    Case("task", CHIEF_FIRST, "worker-0", "kill", (0,), RESTART, quick=True),
    Case("task", CHIEF_FIRST, "worker-0", "stop", (0,), RESTART),
    Case("task", CHIEF_FIRST, "worker-0", "exception", (0,), RESTART),
    Case("task", CHIEF_FIRST, "chief-0", "kill", KILLED, "Root cause: SIGKILL: another process killed it (chief/0)"),
    Case("task", CHIEF_FIRST, "ps-0", "kill", KILLED, "Root cause: SIGKILL: another process killed it (ps/0)"),
    Case("task", CHIEF_FIRST, "worker-0", "agent kill", (7, 137), "Root cause: worker/0 "),
    Case("task", CHIEF_FIRST, "worker-0", "agent stop", (7, 137), "Root cause: worker/0 "),
    Case("task", CHIEF_FIRST, "chief-0", "agent kill", (7, 137), HOST_LOST),
    Case("task", CHIEF_FIRST, "chief-0", "agent stop", (7, 137), HOST_LOST),
    Case("task", CHIEF_FIRST, "worker-0", "slurmstepd kill", (7, 137), "Root cause: worker/0 "),
    Case("task", CHIEF_FIRST, "worker-0", "slurmstepd stop", (0, 137), "COMPLETED", quick=True),
    Case("task", CHIEF_FIRST, "chief-0", "slurmstepd kill", (7, 137), "was killed. The step ends."),
    Case("task", CHIEF_FIRST, "chief-0", "slurmstepd stop", (0, 137), "ps/0 returns\n"),
    Case("task", CHIEF_FIRST, "worker-0", "crash", (7, 137), "Root cause: worker/0 "),
    Case("task", CHIEF_FIRST, "chief-0", "crash", (7, 137), HOST_LOST),
    Case("barrier", PS_FIRST, "worker-1", "crash", (0, 137), "ps/0 done worker/0 failed worker/1\n", quick=True),
    Case("barrier", PS_FIRST, "ps-0", "crash", (1, 137), LOST, quick=True),
    Case("barrier", PS_FIRST, "worker-1", "partition", (0, 137), "ps/0 done worker/0 failed worker/1\n"),
    Case("barrier", PS_FIRST, "ps-0", "partition", (1, 137), LOST),
    Case("barrier", PS_FIRST, "worker-1", "slurmd kill", (0,), ALL_DONE),
    Case("queue", PS_FIRST, "worker-0", "crash", (0, 137), ONE_FAILED),
    Case("old", PS_FIRST, "worker-1", "crash", (0, 137), ENDS),  # its session waits for the lost host to close
    Case("join", PS_FIRST, "worker-0", "crash", (0, 137), ENDS),
    Case("join", WORKER_FIRST, "ps-0", "partition", (1, 137), VARIABLES),
]


@pytest.fixture(scope="module")
def patient_lab(slurm: None) -> Iterator[SlurmLab]:
    """A lab in which Slurm itself would notice the loss of a host only after 300 s, its default."""
    with SlurmLab(slurmd_timeout_seconds=300) as lab:
        yield lab


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case.quick else pytest.mark.long) for case in CASES]
)
def test_all_scripts_and_srun_end(
    case: Case, request: pytest.FixtureRequest, tmp_path: Path, process_mark: str
) -> None:
    is_host = case.fault in HOST_FAULTS
    lab: SlurmLab = request.getfixturevalue("patient_lab" if is_host else "lab")
    lab.wait_idle()
    step = Step(lab, tmp_path, case)
    try:
        check(step)
    finally:
        step.restore()
        step.close()
        print(f"{case}: srun ended with {step.process.returncode}\n{step.output}")
        lab.cancel_all(timeout_seconds=240 if is_host else 60)  # slurmctld repeats its request to a host that was lost


def check(step: Step) -> None:
    case = step.case
    step.wait_for_moment()
    step.fail()
    step.release()
    if not case.ends_training:
        if case.fault != "none" and case.when == "training" and case.victim:
            time.sleep(1)
            assert step.process.poll() is None, step.output  # the others train on
        if case.text == RESTART:
            assert wait_until(lambda: RESTART in step.output, SCRIPT_SECONDS), step.output
        step.end_training()
    code = step.wait()
    assert case.text in step.output
    assert code in case.codes, step.output
    if case.victim or case.fault == "none":
        assert step.output.count("The step ends.") == ("The step ends." in case.text or case.way == "saving")
    assert NO_SERVICE not in step.output or case.text in (LOST, HOST_LOST, NO_SERVICE)
