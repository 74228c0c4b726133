"""Print a job's progress on the terminal: the output of its tasks, its events, and a summary at the end."""

from __future__ import annotations

import sys
import time
from typing import Any

from tf4slurm.control.records import EVENT_KINDS
from tf4slurm.control.state import JobState
from tf4slurm.errors import COMPLETED, FAILED, describe_end
from tf4slurm.jobs.formatting import format_count, format_number, format_table
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event, ResultFile, TaskStatus
from tf4slurm.launch.result_files import Result
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.reports.metrics import choose_loss
from tf4slurm.system.output import LineWriter

_DRAW_SECONDS = 0.1


class PlainOutput(TerminalOutput):
    """Prints the tasks' output to `output`, and the job's events and summary to `notes`.

    Only events whose kind has `is_on_terminal` in `EVENT_KINDS` are printed.
    """

    def __init__(self, num_tasks: int, output: LineWriter | None, notes: LineWriter) -> None:
        """Prepare the output for a job of `num_tasks` tasks.

        The lines of the tasks go to `output`, events and the summary to `notes`. If `output` is None, neither the lines
        of the tasks nor the summary of a successful job is printed.
        """
        self._num_tasks = num_tasks
        self._output = output
        self._notes = notes
        self._summary: list[str] = []

    def on_run_directory(self, run_directory: RunDirectory) -> None:
        self._note(f"forming a cluster of {format_count(self._num_tasks, 'task')}; run directory {run_directory.path}")

    def on_event(self, event: Event, state: JobState) -> None:
        if EVENT_KINDS[event.kind].is_on_terminal:
            self._note(f"{event.seconds:6.2f} s  {event.text}")

    def on_output(self, line: str) -> None:
        if self._output is not None:
            self._output.write(line)

    def on_result(self, result: Result) -> None:
        if self._output is not None or result.file.exit_code != 0:
            self._summary = summary(result)

    def close(self) -> None:
        if self._output is not None and self._output is not self._notes:
            self._output.close()
        self._notes.close(self._summary)

    def _note(self, text: str) -> None:
        self._notes.write(f"tf4slurm | {text}")


class LiveOutput(PlainOutput):
    """Prints what `PlainOutput` prints, and below it a line with the job's phase and duration, which it updates.

    A thread of rich draws the last line, so that a paused terminal (Ctrl-S) does not block the launcher.
    """

    def __init__(self, num_tasks: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        console = Console(stderr=True)
        self._started = time.monotonic()
        self._num_tasks = num_tasks  # set before the thread that reads it starts
        self._state: JobState | None = None
        self._drawn_at = float("-inf")
        self._text = ""
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._draw, console=console, transient=True, refresh_per_second=8)
        self._live.start()
        above = LineWriter(_ConsoleStream(console))
        super().__init__(num_tasks, above if sys.stdout.isatty() else LineWriter(sys.stdout), above)

    def on_event(self, event: Event, state: JobState) -> None:
        super().on_event(event, state)
        self._state = state

    def close(self) -> None:
        super().close()
        self._live.stop()

    def _draw(self) -> Any:
        now = time.monotonic()
        if now - self._drawn_at >= _DRAW_SECONDS:  # rich calls this method for each printed line, too
            self._drawn_at = now
            self._text = self._describe(self._state)
        self._spinner.update(text=f"{self._text}  {now - self._started:.0f} s")
        return self._spinner

    def _describe(self, state: JobState | None) -> str:
        """Return the job's phase and how many tasks have completed it, such as "importing 3/4".

        The furthest step and the last loss follow, if they are known. `state` is None before the first event.
        """
        if state is None:
            return f"rendezvous 0/{self._num_tasks}"
        now = time.monotonic()
        phase = state.tasks.describe_phase(state.phase, now)
        if phase == "rendezvous":
            done = sum(record.attempt == state.attempt for record in state.tasks)
        elif phase == "terminating":
            done = sum(record.is_gone for record in state.tasks)
        elif phase == "ended":
            done = self._num_tasks
        elif phase == "importing":
            done = state.tasks.count("running") - sum(record.is_importing(now) for record in state.tasks)
        else:
            done = state.tasks.count("ready" if phase == "checking" else "running")
        return f"{phase} {done}/{self._num_tasks}{_describe_progress(state)}"


def _describe_progress(state: JobState) -> str:
    """Return the furthest step that a task has reported and the last loss as text, such as "  step 1,200  loss 0.25".

    The loss is that of the chief, or else of the first task that has reported one, as in `JobStatus.metrics`.
    """
    scripts = [record.observed.script for record in state.tasks.in_order()]
    steps = [script.step for script in scripts if script.step is not None]
    metrics = next((dict(script.metrics) for script in scripts if script.metrics), {})
    loss = choose_loss(metrics)
    text = f"  step {max(steps):,}" if steps else ""
    return text if loss is None else f"{text}  {loss} {format_number(metrics[loss])}"


class _ConsoleStream:
    """A stream whose text rich prints above the last line, which `LiveOutput` updates."""

    def __init__(self, console: Any) -> None:
        self._console = console

    def write(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        pass


def make_terminal_output(num_tasks: int) -> PlainOutput:
    """Return a `LiveOutput` if standard error is a terminal, else a `PlainOutput`."""
    if sys.stderr.isatty():
        return LiveOutput(num_tasks)
    return PlainOutput(num_tasks, LineWriter(sys.stdout), LineWriter(sys.stderr))


def summary(result: Result) -> list[str]:
    """Return the lines of the summary: a table of the tasks, how the job ended, and the paths of logs and report."""
    file = result.file
    rows = [("task", "node", "address", "started", "ended", "end"), *map(_row, file.tasks)]
    lines = ["", *format_table(rows), "", *_describe_end_of(file), *(f"WARNING: {text}" for text in file.warnings)]
    lines += ["", f"logs: {result.run_directory.path / 'logs'}"]
    return lines if result.report is None else [*lines, f"report: {result.report}"]


def _describe_end_of(file: ResultFile) -> list[str]:
    if file.state == COMPLETED:
        return [f"{file.state} in {file.seconds:.1f} s. {file.reason}"]
    end = f"{file.state} with exit code {file.exit_code} after {file.seconds:.1f} s."
    if file.state != FAILED:
        return [f"{end} {file.reason}"]
    lines = [end, f"Root cause: {file.headline}", *(f"Explanation: {meaning}" for meaning in file.meaning)]
    if file.headline != file.reason:
        lines.append(file.reason)
    if file.tail and file.log:
        lines += [f"The last lines of {file.log}:", *(f"    {line}" for line in file.tail)]
    return [*lines, *(f"Failure that followed: {event}." for event in file.collateral)]


def _row(task: TaskStatus) -> tuple[str, ...]:
    times = ("-" if at is None else f"{at:.2f} s" for at in (task.started_seconds, task.ended_seconds))
    return (task.task, task.node or "-", task.address or "-", *times, _end_of(task))


def _end_of(task: TaskStatus) -> str:
    restarts = f" (restarted {format_count(task.starts - 1, 'time')})" if task.starts > 1 else ""
    if task.state == "missing":
        return "never registered"
    if task.returncode is not None:
        return describe_end(task.returncode) + restarts
    if task.state == "terminated":
        return ("terminated" if task.starts else "never started") + restarts
    return "lost" + restarts
