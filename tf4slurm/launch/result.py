"""`Result`, the result of a job, and `Reporter`, which receives the events of a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tf4slurm.control.records import Outcome, TaskRecord, describe_end
from tf4slurm.control.state import JobState
from tf4slurm.jobs.known_errors import explain
from tf4slurm.jobs.recorder import describe_task
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event, ResultFile
from tf4slurm.launch.requeue import Reason


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a job, the record of each task in the last attempt, and the duration in seconds."""

    outcome: Outcome
    records: tuple[TaskRecord, ...]
    run_directory: RunDirectory
    seconds: float
    started_at: float
    attempt: int = 1
    requeued: Reason | None = None
    warnings: tuple[str, ...] = ()
    report: Path | None = None

    @property
    def cause_log(self) -> Path | None:
        """The log of the task that failed first; None if no single task is the cause."""
        cause = self.outcome.cause
        return self.run_directory.log(cause, self.attempt) if cause is not None else None

    @property
    def collateral(self) -> list[str]:
        """The other tasks that failed in the last attempt, one line each."""
        others = (record for record in self.records if record.task != self.outcome.cause)
        return [f"{r} {describe_end(r.observed.returncode)}" for r in others if r.observed.returncode]

    def to_file(self) -> ResultFile:
        """Return the content of result.json."""
        outcome = self.outcome
        return ResultFile(
            exit_code=outcome.exit_code,
            reason=outcome.reason,
            cause=str(outcome.cause) if outcome.cause else None,
            tail=tuple(outcome.tail),
            meaning=tuple(explain(outcome.tail)),
            log=str(self.cause_log) if self.cause_log else None,
            collateral=() if outcome.is_success else tuple(self.collateral),
            seconds=round(self.seconds, 3),
            attempts=self.attempt,
            requeued=self.requeued,
            warnings=tuple(self.warnings),
            tasks=tuple(
                describe_task(record, self.started_at, self.started_at + self.seconds) for record in self.records
            ),
        )


class Reporter:
    """Receives the events of a job. This base class ignores all events."""

    def on_run_directory(self, run_directory: RunDirectory) -> None:
        """Handle the creation of the run directory."""

    def on_event(self, event: Event, state: JobState) -> None:
        """Handle a change of the job or of a task."""

    def on_output(self, line: str) -> None:
        """Handle a line that a child process or the spawner has printed."""

    def on_result(self, result: Result) -> None:
        """Handle the end of the job. Only `close` follows."""

    def close(self) -> None:
        """Finish the output."""
