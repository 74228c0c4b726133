"""The result of a job: result.json and report.html."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tf4slurm.control.state import JobState
from tf4slurm.errors import EXIT_PREFLIGHT, RunDirectoryError, Tf4SlurmError, describe_end
from tf4slurm.jobs.known_errors import explain
from tf4slurm.jobs.recorder import describe_task
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import FILE_NAMES, ResultFile, Sample
from tf4slurm.system import program

logger = logging.getLogger(__name__)

_CHEAP_REPORT_BYTES = 1_000_000  # of events and samples; a report of this size takes 0.1 s
_CHEAP_METRICS_BYTES = 2_500_000  # of metrics; reading them takes up to 0.4 s
_FILE_SYSTEM_SECONDS = 10.0  # for the result of a launcher that fails
_TRACEBACK_LINES = 20


class Result(NamedTuple):
    """The result of a job.

    Attributes:
        file: The content of result.json.
        report: The path of the report. None if there is no report.
    """

    file: ResultFile
    run_directory: RunDirectory
    report: Path | None = None


def make_result_file(state: JobState, run_directory: RunDirectory, started_at: float, now: float) -> ResultFile:
    """Return the content of result.json for a job that has ended. `started_at` and `now` are job times in seconds."""
    outcome = state.outcome
    assert outcome is not None
    causes = (each.observed for each in state.tasks if each.task == outcome.cause and each.observed.killed_by is None)
    cause = next((observed.returncode for observed in causes), None)
    failure = outcome.failure
    if failure is not None and outcome.cause is not None:
        name = str(outcome.cause)
        failure = replace(failure, task=name, worker=failure.worker if failure.worker != name else None)
    failed = [each for each in state.tasks if each.task != outcome.cause and each.observed.returncode]
    is_known_kill = failure is not None and failure.type == "SIGKILL"  # its message says who sent the signal
    returncode = None if is_known_kill else cause
    texts = [f"{failure.type}: {failure.message}", failure.caused_by] if failure is not None else []
    return ResultFile(
        state=outcome.state,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        cause=str(outcome.cause) if outcome.cause else None,
        failure=failure,
        tail=tuple(outcome.tail),
        meaning=() if outcome.is_success else tuple(explain((*outcome.tail, *texts, outcome.reason), returncode)),
        log=str(run_directory.log(outcome.cause, state.attempt)) if outcome.cause else None,
        collateral=()
        if outcome.is_success
        else tuple(f"{r} {describe_end(r.observed.returncode or 0)}" for r in failed),
        seconds=round(now - started_at, 3),
        attempts=state.attempt,
        furthest_step=state.progress.furthest_step,
        warnings=state.watches.warnings,
        shards=state.scripts.shards,
        workers_left=state.tasks.num_left,
        tasks=tuple(describe_task(state.tasks, record, started_at, now) for record in state.tasks.in_order()),
    )


@contextlib.contextmanager
def recording_failure(run_directory: RunDirectory) -> Iterator[None]:
    """Write result.json and the report if an exception ends the `with` block, and raise the exception again.

    So every end of a launcher whose run directory exists has a result, unless the launcher is killed. The block begins
    when the run directory exists, with LAUNCHER_SIGNALS blocked. `Launcher.run` blocks them again when it raises an
    exception. A result that the launcher has written is kept. If the file system does not answer for 10 s, nothing is
    written.
    """
    started = time.monotonic()
    try:
        yield
    except BaseException as error:
        content = make_failure_file(error, time.monotonic() - started)
        writing = threading.Thread(target=_record_failure, args=(content, run_directory), daemon=True)
        writing.start()
        writing.join(_FILE_SYSTEM_SECONDS)
        raise


def _record_failure(content: ResultFile, run_directory: RunDirectory) -> None:
    if run_directory.read(ResultFile) is None:
        save_result(content, run_directory)
        write_report(run_directory)


def make_failure_file(error: BaseException, seconds: float) -> ResultFile:
    """Return the content of result.json for a launcher that `error` ends after `seconds`.

    The exit code and the reason are those of `run_program`. For an error that it does not expect, the last lines of the
    traceback are the tail.
    """
    content = ResultFile(seconds=round(seconds, 3), attempts=1)
    if isinstance(error, Tf4SlurmError):
        return replace(content, exit_code=error.exit_code, reason=str(error))
    if isinstance(error, (OSError, ValueError)):
        return replace(content, exit_code=EXIT_PREFLIGHT, reason=program.explain(error))
    lines = "".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:]
    reason = f"The launcher failed: {type(error).__name__}: {error}".rstrip(": ")
    return replace(content, reason=f"{reason}.", tail=tuple(lines))


def save_result(content: ResultFile, run_directory: RunDirectory) -> None:
    """Write result.json. An error such as a full disk is logged, because it does not change the outcome."""
    try:
        run_directory.write_result(content)
    except RunDirectoryError as error:
        logger.error("%s", error)


def load_report() -> None:
    """Load the modules and templates that `write_report` needs, so that a later report takes less time."""
    from tf4slurm.reports.report import load_templates

    load_templates()


def write_report(directory: RunDirectory) -> Path | None:
    """Write the report. Return its path, or None if it is not written.

    No report is written if the job's records are so large that the report would delay the end of the job. Any error is
    logged as a warning.
    """
    try:
        records = (directory.events, directory.path / FILE_NAMES[Sample])
        metrics = (directory.path / "metrics").glob("*.jsonl")
        if _size_of(records) > _CHEAP_REPORT_BYTES or _size_of(metrics) > _CHEAP_METRICS_BYTES:
            return None
        from tf4slurm.reports.report import make_report
        from tf4slurm.reports.summary import JobSummary

        return directory.write_report(make_report(JobSummary(directory)).encode("utf-8", "replace"))
    except Exception as error:  # a report must never change the job's exit code
        logger.warning("there is no report.html: %s: %s", type(error).__name__, error)
        return None


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())
