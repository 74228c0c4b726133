"""Whether a batch job that was stopped before its end is put into the queue again."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path
from typing import Literal

from tf4slurm.control.outcome import Outcome
from tf4slurm.errors import LaunchError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.slurm.commands import query_job, requeue_job

logger = logging.getLogger(__name__)

Reason = Literal["preemption", "time limit"]
_OWN_WISH = (signal.SIGINT, signal.SIGHUP)  # Ctrl-C, or a terminal that is gone: no scheduler sends these


class Requeue:
    """Puts a job into the queue again: at most `limit` times for its time limit, always after a preemption."""

    def __init__(self, job_id: str, limit: int, array_element: str | None = None) -> None:
        """Of an array only this element: one of them has the array's own id, by which Slurm takes them all."""
        self._job_id = job_id
        self._asked = array_element or job_id
        self._limit = limit

    def find_doubts(self) -> list[str]:
        """Return why Slurm would not do it, in sentences; asked at the start, when it can still be changed."""
        try:
            job = query_job(self._asked)
        except LaunchError as error:
            return [f"Whether the job can be requeued is not known: {error}"]
        doubts = []
        if not job.is_batch:
            doubts.append("The job cannot be requeued: it is not a batch job. Submit it with sbatch.")
        elif not job.can_requeue:
            doubts.append("The job cannot be requeued: Slurm has Requeue=0 for it. Submit it with sbatch --requeue.")
        elif job.preempt_mode in ("CANCEL", "SUSPEND", "GANG"):
            mode = f"PreemptMode={job.preempt_mode} in partition {job.partition}"
            doubts.append(f"Preemption does not requeue here ({mode}): the job requeues itself within its grace time.")
        return doubts

    def find_reason(self, outcome: Outcome, run_directory: RunDirectory) -> Reason | None:
        """Return why a job that was stopped should go back into the queue; None if it should not, or cannot."""
        if outcome.exit_code in {128 + number for number in _OWN_WISH}:
            return None
        try:
            job = query_job(self._asked)
        except LaunchError as error:
            logger.error("the job is not requeued: %s", error)
            return None
        if job.state != "RUNNING":  # cancelled, over its time, or requeued by Slurm already
            logger.warning("the job is not requeued: Slurm has it as %s", job.state)
            return None
        if job.is_preempted:
            return "preemption"
        done = self._count_requeues(run_directory)
        if done >= self._limit:
            logger.warning("the job is not requeued: that was done %d times, as --requeue allows", done)
            return None
        return "time limit"

    def carry_out(self) -> bool:
        """Ask Slurm; return whether it will. From then on it ends this job, this process too."""
        try:
            requeue_job(self._asked)
        except LaunchError as error:
            logger.error("the job is not requeued: %s", error)
            return False
        return True

    def _count_requeues(self, run_directory: RunDirectory) -> int:
        """Count the earlier runs of this job that ended so: NAME-ID, NAME-ID-2, … beside this run's directory."""
        first = re.sub(rf"(-{re.escape(self._job_id)})-\d+$", r"\1", run_directory.path.name)
        runs = re.compile(rf"{re.escape(first)}(-\d+)?")
        paths = run_directory.path.parent.iterdir()
        return sum(_was_requeued(path) for path in paths if runs.fullmatch(path.name))


def _was_requeued(path: Path) -> bool:
    result = RunDirectory(path).read(ResultFile)
    return result is not None and result.requeued == "time limit"
