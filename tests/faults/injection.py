"""Faults that come from outside, or on demand, in the middle of training."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.cases import Case
from tests.faults.disk import fill
from tests.faults.job import TrainingJob


def inject(case: Case, job: TrainingJob, node: str) -> float:
    """Do to the job what the case says; return when, in seconds of the wall clock. `node` is the victim's host."""
    if case.fault.startswith("SIG"):
        return _signal(case, job)
    if case.fault.startswith("exit ") and case.tasks:
        return _exit(case, job)
    now = time.time()
    if case.fault == "exit 0 too early":
        job.exit_file.touch()
    elif case.fault == "hang in atexit":  # the chief gets there when it has finished, the others when told to leave
        if case.victim == "chief/0":
            job.finish()
    elif case.fault == "scancel":
        job.cancel()
    elif case.fault == "cable pulled":
        job.lab.partition(node)
    elif case.fault == "power off":
        job.lab.crash(node)
    elif case.fault == "disk full":
        fill(job.runs)
    else:
        raise ValueError(f"There is no fault {case.fault!r}.")
    return now


def _signal(case: Case, job: TrainingJob) -> float:
    names = case.tasks if len(case.tasks) > 1 else (case.victim,)
    victims = [job.process_of(name) for name in names]
    now = time.time()
    for victim in victims:
        os.kill(victim, signal.Signals[case.fault])
    return now


def _exit(case: Case, job: TrainingJob) -> float:
    """Have a task exit by itself; see `train.obey`."""
    order = job.directory / f"{case.victim.replace('/', '-')}.order"
    draft = order.with_suffix(".draft")
    draft.write_text(case.fault.split()[1])
    draft.replace(order)
    job.wait_for(lambda: job.time_in("faulted") is not None, 30, f"{case.victim} did not exit")
    return job.time_in("faulted") or 0.0
