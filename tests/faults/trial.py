"""One trial: inject one fault into a training job and measure the outcome."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import Case, Form, Outcome
from tests.faults.disk import fill, small_disk
from tests.faults.injection import inject
from tests.faults.job import TASKS, TrainingJob
from tests.processes import marked_processes, wait_until, wait_until_gone
from tests.slurm.lab import SlurmLab

_FROM_THE_START = ("exception at import", "starts late", "never starts", "never serves", "disk full from the start")
_WAIT_SECONDS = 60.0  # timeout of each wait; the bounds are far below
_SLURM_SECONDS = 60.0  # until Slurm itself has noticed the end


@dataclass(frozen=True)
class Measured:
    """A measured time of a trial and its bound, both in seconds."""

    what: str
    seconds: float
    bound: float

    @property
    def is_kept(self) -> bool:
        return self.seconds < self.bound


def run_trial(case: Case, lab: SlurmLab, directory: Path, mark: str) -> list[Measured]:
    """Run one case on an intact, idle lab, which is intact and idle again afterwards; return the measured times.

    Args:
        mark: Mark in the environment of all started processes.

    Raises:
        AssertionError: The outcome was not the expected one.
    """
    if case.target != "run directory":
        return Trial(case, lab, directory, mark).run()
    with small_disk(directory / "runs"), SlurmLab() as fresh_lab:  # hosts see only what was mounted before they started
        return Trial(case, fresh_lab, directory, mark).run()


class Trial:
    """One case on one lab; see `run_trial`."""

    def __init__(self, case: Case, lab: SlurmLab, directory: Path, mark: str) -> None:
        self._case = case
        self._lab = lab
        self._mark = mark
        self._job = TrainingJob(directory, lab, mark)
        self._node = ""
        self._is_on_host = case.target.startswith("host of ")
        self._measured: list[Measured] = []

    def run(self) -> list[Measured]:
        case = self._case
        try:
            self._start()
            if case.fault not in _FROM_THE_START:
                self._job.wait_until_training()
                if self._is_on_host:
                    self._node = self._job.node_of(case.target.removeprefix("host of "))
                faulted_at = inject(case, self._job, self._node)
            else:
                faulted_at = time.time()
            check = {
                Outcome.ENDS: self._check_end,
                Outcome.CONTINUES: self._check_continuation,
                Outcome.IS_RESTARTED: self._check_restart,
                Outcome.STARTS_ATTEMPT: self._check_attempt,
                Outcome.ENDS_WITHOUT_LAUNCHER: self._check_end_without_launcher,
                Outcome.IS_REFUSED: self._check_refusal,
            }[case.outcome]
            check(faulted_at)
            return self._measured
        finally:
            self._job.close()
            self._repair()
            self._lab.cancel_all(_SLURM_SECONDS)

    def _start(self) -> None:
        case, fault = self._case, self._case.fault
        misbehaviours = dict.fromkeys(case.tasks, fault)
        if not case.uses_tf4slurm:
            misbehaviours["chief/0"] = "does not use tf4slurm"
        if fault == "disk full from the start":
            fill(self._job.runs)
        absent = case.target if fault == "never starts" else None
        self._job.start(case.form, case.options, misbehaviours, absent)

    def _repair(self) -> None:
        if self._node and self._case.fault == "cable pulled":
            self._lab.heal(self._node)
        elif self._node:
            self._lab.boot(self._node)
        self._node = ""

    # Outcomes

    def _check_end(self, faulted_at: float) -> None:
        case, job = self._case, self._job
        ended_at = job.wait_for_event("outcome", _WAIT_SECONDS)
        if case.fault == "never starts":  # the script notes no time
            faulted_at = ended_at - float((job.event("outcome") or {})["seconds"])
        elif case.fault in _FROM_THE_START:
            faulted_at = job.time_in("faulted") or 0.0
        self._measure("outcome", ended_at - faulted_at)
        if "child of the cut-off host" in case.within:
            gone = wait_until(lambda: not job.children_on(self._node), _WAIT_SECONDS)
            assert gone, f"children are left on {self._node}"
            self._measure("child of the cut-off host", time.time() - faulted_at)
        if self._is_on_host:
            self._repair()
        self._wait_until_gone(since=ended_at)
        self._check_result()
        if case.saves:
            assert (job.time_in("saved") or 0.0) >= faulted_at, "the chief did not save"

    def _check_continuation(self, faulted_at: float) -> None:
        job = self._job
        settled_at = faulted_at + 1.0
        job.wait_for(lambda: any(at > settled_at for _, _, at in job.steps()), 150, "training did not go on")
        if self._case.target == "batch script":  # it notices the end of the job once it is continued
            self._job.finish()
            job.wait_for_event("outcome", _WAIT_SECONDS)
            script = job.process_of("batch script")
            job.wait_for((job.run_directory / "result.json").exists, 10, "there was no result")
            os.kill(script, signal.SIGCONT)
        if self._case.target == "run directory":  # no event can be written any more
            self._job.finish()
            finished_at = time.time()
            self._check_exit_code()
            self._wait_until_gone(since=finished_at)
            return
        self._end_normally()
        assert all(task["starts"] == 1 for task in job.result["tasks"]), job.result

    def _check_restart(self, faulted_at: float) -> None:
        case, job = self._case, self._job
        imports = [self._wait_for_second_import(task) for task in case.tasks]
        for task, (_, imported_at) in zip(case.tasks, imports, strict=True):
            ran_at = self._wait_for_step(task, imported_at)
            slowest = max(seconds for seconds, _ in imports)  # TensorFlow uses none before all are back
            self._measure("first step again", ran_at - faulted_at - slowest)
        self._end_normally()
        starts = {task["task"]: task["starts"] for task in job.result["tasks"]}
        assert starts == {task: 2 if task in case.tasks else 1 for task in TASKS}, f"starts: {starts}"
        exits = " ".join(event["text"] for event in job.events if event["kind"] == "exited")
        assert case.cause in exits, f"{case.cause!r} is not in: {exits}"

    def _wait_for_second_import(self, task: str) -> tuple[float, float]:
        """Return its duration and its end."""
        imports = self._job.import_seconds
        self._job.wait_for(lambda: len(imports(task)) > 1, _WAIT_SECONDS, f"{task} was not restarted")
        return imports(task)[1][1:]

    def _wait_for_step(self, task: str, since: float) -> float:
        """Return the time of a worker's first closure after `since`."""
        runs = self._job.worker_ran_at
        self._job.wait_for(lambda: runs(task)[-1] > since, _WAIT_SECONDS, f"{task} did not run a step again")
        return next(at for at in runs(task) if at > since)

    def _check_attempt(self, faulted_at: float) -> None:
        case, job = self._case, self._job
        saved = job.steps()[-1][1]
        job.wait_for(lambda: job.steps()[-1][0] == 2, _WAIT_SECONDS, "there was no step of attempt 2")
        _, first_step, first_at = next(step for step in job.steps() if step[0] == 2)
        imports = [seconds for task in TASKS for attempt, seconds, _ in job.import_seconds(task) if attempt == 2]
        self._measure("training again", first_at - faulted_at - max(imports))
        self._end_normally()
        assert first_step > 40, f"it began at step {first_step}, and had reached {saved}"
        assert job.result["attempts"] == 2, f"attempts: {job.result['attempts']}"
        reason = str((job.event("attempt") or {})["text"])
        assert self._expand(case.cause) in reason, f"{self._expand(case.cause)!r} is not in: {reason}"

    def _check_end_without_launcher(self, faulted_at: float) -> None:
        case, job = self._case, self._job
        if case.fault == "SIGSTOP":
            stopped = job.process_of(case.target)
            remain = {stopped, *job.waiting_for(stopped)}
            is_gone = wait_until(lambda: {p.pid for p in marked_processes(self._mark)} <= remain, _WAIT_SECONDS)
            assert is_gone, f"left behind: {marked_processes(self._mark)}"
            self._measure("gone", time.time() - faulted_at)
            os.kill(stopped, signal.SIGCONT)
        else:
            self._wait_until_gone(since=faulted_at)
        if not self._is_on_host:
            self._check_exit_code()

    def _check_refusal(self, faulted_at: float) -> None:
        job = self._job
        self._check_exit_code()
        self._wait_until_gone(since=faulted_at)
        assert self._case.cause in job.output, job.output
        assert "Traceback" not in job.output, job.output

    # Helpers

    def _expand(self, text: str) -> str:
        """Put the target's node in place of NODE."""
        return text.replace("NODE", self._job.node_of(self._case.tasks[0])) if "NODE" in text else text

    def _measure(self, what: str, seconds: float) -> None:
        self._measured.append(Measured(what, round(seconds, 3), self._case.within[what]))

    def _wait_until_gone(self, since: float) -> None:
        left = wait_until_gone(self._mark, _WAIT_SECONDS)
        assert not left, f"left behind: {'; '.join(map(str, left))}"
        self._measure("gone", time.time() - since)

    def _end_normally(self) -> None:
        self._job.finish()
        ended_at = self._job.wait_for_event("outcome", _WAIT_SECONDS)
        self._wait_until_gone(since=ended_at)
        self._check_result()

    def _check_result(self) -> None:
        case, job = self._case, self._job
        assert job.result["exit_code"] == case.exit_code, f"exit code {case.exit_code} was expected: {job.result}"
        if not (self._is_on_host and case.form is Form.BATCH):  # Slurm then sets its own exit code
            self._check_exit_code()
        has_failed = job.result["state"] == "FAILED"
        heading = "Root cause:" if has_failed else f"{job.result['state']} with exit code {case.exit_code}"
        cause = job.output.partition(heading)[2]
        if case.exit_code == 0:
            assert "Root cause:" not in job.output, f"a cause is shown although there is none: {job.output[-6000:]}"
        else:
            assert job.output.count(heading) == 1, f"not one root cause: {job.output[-6000:]}"
            assert self._expand(case.cause) in cause, f"{self._expand(case.cause)!r} is not in the cause: {cause}"
            causes = (None, *case.tasks) if case.tasks else (job.result["cause"],)
            assert job.result["cause"] in causes, job.result

    def _check_exit_code(self) -> None:
        code = self._job.wait_for_exit_code(_SLURM_SECONDS)
        assert code == self._case.exit_code, f"exit code {code}, not {self._case.exit_code}: {self._job.output[-6000:]}"
