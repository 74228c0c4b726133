"""Inject faults from outside, or on demand, during training."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.cases import Case
from tests.faults.disk import fill
from tests.faults.job import TrainingJob


def inject(case: Case, job: TrainingJob, node: str) -> float:
    """Inject the fault of a case; return its wall-clock time in seconds. `node` is the host of the target."""
    if case.fault.startswith("SIG"):
        return _signal(case, job)
    if case.fault.startswith("exit ") and case.tasks:
        return _exit(case, job)
    now = time.time()
    if case.fault == "exit 0 too early":
        job.exit_file.touch()
    elif case.fault == "hang in atexit":  # the chief hangs when it has finished, the others when terminated
        if case.target == "chief/0":
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
    names = case.tasks if len(case.tasks) > 1 else (case.target,)
    targets = [job.process_of(name) for name in names]
    now = time.time()
    for target in targets:
        os.kill(target, signal.Signals[case.fault])
    return now


def _exit(case: Case, job: TrainingJob) -> float:
    """Make a task exit by itself; see `train.exit_on_request`."""
    request = job.directory / f"{case.target.replace('/', '-')}.request"
    draft = request.with_suffix(".draft")
    draft.write_text(case.fault.split()[1])
    draft.replace(request)
    job.wait_for(lambda: job.time_in("faulted") is not None, 30, f"{case.target} did not exit")
    return job.time_in("faulted") or 0.0
