"""Requeue a batch job that was stopped before it was done: find obstacles, decide, and send the request to Slurm.

Each start of the job, the first or one after a requeue, is a run with a run directory of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import signal
from collections.abc import Sequence

from tf4slurm.control.records import JobProgress
from tf4slurm.errors import EXIT_REQUEUED, REQUEUED, LaunchError, SchemaVersionError
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.slurm.commands import allow_requeue, exclude_nodes, query_job, requeue_job
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.parsing import SlurmJob
from tf4slurm.system.exec_child import NOW_SIGNAL

logger = logging.getLogger(__name__)

BY_SLURM = "Slurm"
_USER_SIGNALS = (signal.SIGINT, signal.SIGHUP, NOW_SIGNAL)  # Ctrl-C, a closed terminal or `cancel --now`


@dataclasses.dataclass(frozen=True)
class Requeue:
    """Decides whether a stopped job runs again, and requeues it in Slurm.

    A job is requeued whenever it is preempted, and up to `limit` times after other stop signals, such as that of its
    time limit.

    Attributes:
        job_id: The id of the job. For an element of a job array it is the element's own.
        restart_count: The number of requeues until now.
    """

    job_id: JobId
    limit: int
    restart_count: int = 0

    def find_obstacle(self) -> str | None:
        """Return a warning for the user if Slurm perhaps cannot requeue this job. Otherwise return None.

        Also return one if Slurm does not requeue at a preemption. Call this method when the job starts.
        """
        try:
            job = query_job(self.job_id)
        except LaunchError as error:
            return f"It is unknown whether the job can be requeued: {error}"
        if not job.is_batch:
            return "The job cannot be requeued: it is not a batch job. Submit it with sbatch."
        if not job.can_requeue:
            return "The job cannot be requeued: Slurm has Requeue=0 for it. Submit it with sbatch --requeue."
        if job.preempt_mode in ("CANCEL", "SUSPEND", "GANG"):
            mode = f"PreemptMode={job.preempt_mode} in partition {job.partition}"
            return f"Preemption does not requeue here ({mode}): the job requeues itself within its grace time."
        return None

    def find_reason(self, exit_code: int, run_directory: RunDirectory) -> str | None:
        """Return why a stopped job is requeued: "preemption", "time limit" or BY_SLURM. Return None if it is not.

        "time limit" stands for every stop signal that is neither preemption nor of a person's end of the job, such as
        SIGUSR1. BY_SLURM means that the job is requeued already: by a person with scontrol, or at a preemption whose
        signal came too early for a task. A job is not requeued after SIGINT, SIGHUP or SIGQUIT, if it does not run in
        Slurm any more, if Slurm cannot be queried, or if it has been requeued `limit` times for other reasons than
        preemption.

        Args:
            exit_code: The exit code of the job: 128 + the number of the stop signal.
            run_directory: The run directory of this run. Earlier runs have theirs beside it.
        """
        if exit_code in {128 + number for number in _USER_SIGNALS}:
            if exit_code == 128 + signal.SIGHUP:
                logger.warning("the job is not requeued after SIGHUP: let --signal send USR1 or TERM")
            return None
        try:
            job = query_job(self.job_id)
        except LaunchError as error:
            logger.error("the job is not requeued: %s", error)
            return None
        if self._has_requeued(job):
            return BY_SLURM
        if job.state != "RUNNING":  # cancelled or timed out
            logger.warning("the job is not requeued: its state in Slurm is %s", job.state)
            return None
        if job.is_preempted:
            return "preemption"
        done = len(self._requeued_runs(run_directory))
        if done >= self.limit:
            logger.warning("the job is not requeued: it has been requeued %d times (--requeue %d)", done, self.limit)
            return None
        return "time limit"

    def requeue(self, excluded_nodes: Sequence[str] = ()) -> bool:
        """Requeue the job. Return whether Slurm accepts the request.

        If Slurm accepts it, Slurm ends the job's processes, including this one. If possible, the job then runs on other
        nodes than `excluded_nodes`.
        """
        try:
            requeue_job(self.job_id)
        except LaunchError as error:
            logger.error("the job is not requeued: %s", error)
            return False
        if excluded_nodes:  # only now, because Slurm refuses it for a running job
            try:
                exclude_nodes(self.job_id, excluded_nodes)
            except LaunchError as error:
                logger.warning("%s may be used again: %s", ", ".join(excluded_nodes), error)
        return True

    def progress_of_runs(self, run_directory: RunDirectory, furthest_step: int | None) -> JobProgress:
        """Return the progress of the runs that were requeued at their time limit, and of this run.

        It shows whether the last runs had a new step. `furthest_step` is the highest step of this run, or None.
        """
        progress = JobProgress()
        for step in (*(run.furthest_step for run in self._requeued_runs(run_directory)), furthest_step):
            progress.note_step(step)
            progress.end_attempt()
        return progress

    def end(self) -> bool:
        """Forbid Slurm to requeue the job at its end. Return whether Slurm has requeued it already.

        Slurm requeues a preempted job when its grace time ends, perhaps in the seconds in which the job ends by itself.
        In Slurm 24.11 a job that has requeued itself at a preemption counts as preempted for ever, and Slurm would
        requeue it once more at its end.
        """
        try:
            if self._has_requeued(query_job(self.job_id)):
                return True
            allow_requeue(self.job_id, False)
            is_requeued = self._has_requeued(query_job(self.job_id))
            if is_requeued:  # before it was forbidden: the next run may be requeued
                allow_requeue(self.job_id, True)
        except LaunchError as error:
            logger.warning("Slurm may run the job again: %s", error)
            return False
        return is_requeued

    def _has_requeued(self, job: SlurmJob) -> bool:
        """Return whether Slurm has requeued the job during this run."""
        return job.state != "RUNNING" and job.restart_count > self.restart_count

    def _requeued_runs(self, run_directory: RunDirectory) -> list[ResultFile]:
        """Return the results of this job's runs that were requeued at the time limit, the first run first.

        The runs have the run directories NAME-ID, NAME-ID-2 and so on.
        """
        first = re.sub(rf"(-{re.escape(str(self.job_id))})-\d+$", r"\1", run_directory.path.name)
        job = KnownJob(str(self.job_id), first, str(run_directory.path.parent))
        results = map(_read_result, job.run_directories)
        return [result for result in results if result is not None and result.requeued == "time limit"]


def mark_requeued(result: ResultFile, reason: str) -> ResultFile:
    """Return the result with the state, exit code and reason of a run after which the job is requeued."""
    text = f"{result.reason} It is requeued ({reason})."
    return dataclasses.replace(result, state=REQUEUED, exit_code=EXIT_REQUEUED, reason=text, requeued=reason)


def _read_result(run: RunDirectory) -> ResultFile | None:
    try:
        return run.read(ResultFile)
    except SchemaVersionError as error:  # must not fail this job
        logger.warning("an earlier run is not counted: %s", error)
        return None
