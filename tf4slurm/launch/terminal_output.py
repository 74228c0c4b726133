"""The interface through which a launcher reports the events of its job. `cli/terminal_output.py` prints them."""

from __future__ import annotations

from tf4slurm.control.state import JobState
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event
from tf4slurm.launch.result_files import Result


class TerminalOutput:
    """Receives the events of a job. This base class ignores all events."""

    def on_run_directory(self, run_directory: RunDirectory) -> None:
        """Handle the creation of the run directory."""

    def on_event(self, event: Event, state: JobState) -> None:
        """Handle a change of the job or of a task."""

    def on_output(self, line: str) -> None:
        """Handle a line that a child process or the spawner has printed."""

    def on_result(self, result: Result) -> None:
        """Handle the end of the job. The launcher calls no other method but `close` afterwards."""

    def close(self) -> None:
        """Restore the terminal: stop the progress line and print the buffered lines."""
