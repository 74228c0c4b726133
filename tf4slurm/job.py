"""`Job`: the verbs of the command line for notebooks and programs, with the same names."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from tf4slurm.batch_spec import BatchSpec
from tf4slurm.errors import UnknownJobError
from tf4slurm.jobs.logs import LogReader, find_logs, merge
from tf4slurm.jobs.registry import KnownJob, find_job, known_jobs, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.status import JobStatus, StatusReader
from tf4slurm.options import options_of, to_fields
from tf4slurm.reports.report import make_file, make_picture
from tf4slurm.reports.summary import read_summary
from tf4slurm.settings import fill_in, settings_here
from tf4slurm.spec import JobSpec
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.snapshot import place_snapshot
from tf4slurm.submission.submit import submit

_LOOK_SECONDS = 1.0
_SLURM_SECONDS = 5.0
_LINE_SECONDS = 5.0


class Job:
    """One job: a command, and the options of `tf4slurm submit` by their long names, with _ for -.

    Job("python train.py", ps=1, workers=3, nodes=2, mem="32G", module=["tensorflow/2.16"]).submit().wait()

    What is True is an option without a value, what is False its `--no-` form, a list one that is repeated.
    """

    def __init__(self, command: str | Sequence[str], **options: Any) -> None:
        """Nothing is started yet; options are checked when they are used.

        Args:
            command: What each task runs: words, or a line as a shell would read it.
            options: See `tf4slurm submit --help`.
        """
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        self._options = options
        self._known: KnownJob | None = None

    @classmethod
    def find(cls, job: str | None = None) -> Job:
        """Return a job of before by its id in Slurm, its run's name or directory; the latest if None.

        Raises:
            UnknownJobError: There is none.
        """
        found = cls(())
        found._known = find_job(job, os.environ)
        return found

    def script(self) -> str:
        """Return the batch script that `submit` gives to sbatch; Slurm need not be there.

        Raises:
            OptionError: An option is unknown, or they contradict each other.
        """
        return make_script(self._make())

    def submit(self) -> Job:
        """Give the job to Slurm; return it.

        Raises:
            OptionError, RefusedError: It contradicts itself, or sbatch did not take it.
        """
        job_id = submit(self._make())
        self._known = find_job(job_id, os.environ)
        return self

    def run(self) -> int:
        """Run the job here (local processes, or in the allocation we are in) to its end; return its exit code.

        What it prints comes as it is printed. Options that only sbatch understands do not count.
        """
        before = {job.name for job in known_jobs(os.environ)}
        arguments = [sys.executable, "-m", "tf4slurm", "run", *self._arguments_of_run(), "--", *self._command]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
        self._known = next((job for job in known_jobs(os.environ) if job.name not in before), None)
        return process.returncode

    def status(self) -> JobStatus:
        """Return where the job stands."""
        (status,) = StatusReader([self._started()]).read()
        return status

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Wait for the end, with a bar; return the job's exit code. Interrupting it leaves the job alone.

        In a notebook the bar needs the package ipywidgets; without it there are lines of text.

        Raises:
            TimeoutError: It has not ended in time.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        reader = StatusReader([self._started()], ask_seconds=_SLURM_SECONDS)
        with _shown_progress() as show:
            while True:
                (status,) = reader.read()
                steps = [task.step for task in status.tasks if task.step is not None]
                reached = f"step {max(steps):,}" if steps else status.phase or status.reason
                show(f"{status.name} {status.state} {reached}")
                if status.exit_code is not None:
                    return status.exit_code
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{status.name} has not ended within {timeout_seconds:g} s. It goes on.")
                time.sleep(_LOOK_SECONDS)

    def logs(self, *tasks: str) -> str:
        """Return what tasks printed, such as "chief/0" or "worker/*"; all, in the order of time, if none is named."""
        logs = find_logs(self._started().run_directories, tasks)
        has_names = len({log.task for log in logs}) > 1
        lines = merge([LogReader(log) for log in logs])
        return "".join(f"{line.task} | {line.text}\n" if has_names else f"{line.text}\n" for line in lines)

    def cancel(self, grace_period_seconds: float | None = None) -> None:
        """Ask the job to save and stop, and end it after its grace; see `tf4slurm cancel`."""
        known = self._started()
        grace_period = [] if grace_period_seconds is None else ["--grace-period", f"{grace_period_seconds:g}"]
        words = [sys.executable, "-m", "tf4slurm", "cancel", known.job_id or known.name, *grace_period]
        subprocess.run(words, check=True, capture_output=True)

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the job's report, by default as report.html in its run directory; return its path.

        A name that ends in .svg or .png gets the drawings alone.
        """
        run = self._run()
        where = run.path / "report.html" if path is None else Path(path).absolute()
        return run.write_report(make_file(read_summary(run), where), where)

    def plot(self) -> Picture:
        """Return timeline and curves, as a picture that a notebook shows."""
        return Picture(make_picture(read_summary(self._run())))

    def __repr__(self) -> str:
        what = shlex.join(self._command) or "of before"
        return f"Job({what}: {f'{self._known.name}' if self._known else 'not started'})"

    def _repr_html_(self) -> str:
        if self._known is None:
            return f"<pre>{escape(self)}</pre>"
        status = self.status()
        head = "".join(
            f"<th style='text-align:left'>{name}</th>" for name in ("task", "node", "state", "step", "step/s")
        )
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td style='text-align:left'>{escape('' if value is None else value)}</td>"
                for value in (task.task, task.node, task.state, task.step, task.steps_per_second)
            )
            + "</tr>"
            for task in status.tasks
        )
        code = "" if status.exit_code is None else f", exit code {status.exit_code}"
        return (
            f"<b>{escape(status.name)}</b> {escape(status.state)}{code}<br>{escape(status.reason)}"
            f"<table><tr>{head}</tr>{rows}</table>"
        )

    def _make(self) -> BatchSpec:
        options = dict(self._options)
        settings = settings_here(os.environ, options.pop("site", None))
        values = fill_in(BatchSpec, to_fields(BatchSpec, options), settings)
        return place_snapshot(BatchSpec(tuple(self._command), **values))

    def _arguments_of_run(self) -> list[str]:
        options = dict(self._options)
        site = options.pop("site", None)
        words = ["--site", site] if site is not None else []
        words += [f"--{name}" for name in ("local", "isolated") if options.pop(name, False)]
        for name, value in to_fields(BatchSpec, options).items():
            each = options_of(JobSpec).get(name)
            words += each.to_arguments(each.convert(value)) if each is not None and value is not None else ()
        return words

    def _started(self) -> KnownJob:
        if self._known is None:
            raise UnknownJobError("This job was not started yet: call submit() or run().", job="")
        return self._known

    def _run(self) -> RunDirectory:
        return latest_run(self._started())


class Picture:
    """A picture that a notebook shows; `svg` is its text."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg


@contextlib.contextmanager
def _shown_progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows how far a job is."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console()
    if console.is_jupyter and not _has_widgets():
        lines = _Lines()
        try:
            yield lines.show
        finally:
            lines.finish()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("")
        yield lambda text: progress.update(bar, description=text)


def _has_widgets() -> bool:
    try:
        importlib.import_module("ipywidgets")
    except ImportError:
        return False
    return True


class _Lines:
    """Prints a line when it has changed, but not each second."""

    def __init__(self) -> None:
        self._shown = self._latest = ""
        self._next_at = 0.0

    def show(self, text: str) -> None:
        self._latest = text
        if time.monotonic() >= self._next_at:
            self.finish()

    def finish(self) -> None:
        """Print the latest line, if it was not."""
        if self._latest != self._shown:
            print(self._latest, flush=True)
            self._shown, self._next_at = self._latest, time.monotonic() + _LINE_SECONDS
