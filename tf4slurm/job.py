"""`Job`: one job for notebooks and programs, from its options to its report."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import escape

from tf4slurm import api
from tf4slurm.errors import LaunchError, UnknownJobError
from tf4slurm.jobs.formatting import as_sentence, format_table
from tf4slurm.jobs.progress import show_progress
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.status import JobStatus
from tf4slurm.jobs.status_reader import describe_progress
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import SLURM_OPTIONS, JobSpec
from tf4slurm.spec.keywords import JobKeywords, takes_command_and_options_of
from tf4slurm.spec.options import options_of, to_fields
from tf4slurm.spec.points import format_labels
from tf4slurm.spec.settings import SITE, fill_in, read_settings


class Job:
    """One job: a command, and the options of `tf4slurm submit` as keyword arguments, with _ in place of -.

    Example:
        Job("python train.py", ps=1, workers=3, nodes=2, mem="32G", module=("tensorflow/2.16",)).submit().wait()
    """

    @takes_command_and_options_of(JobKeywords)
    def __init__(self, command: str | Sequence[str], **options: Any) -> None:
        """Check the options. Nothing is started.

        Args:
            command: Command of each task: a list of words, or a line in the shell's syntax.
            OPTIONS
            site: Profile of the cluster's settings, or "none" to read no settings. By default the settings name it.

        Raises:
            OptionError: An option is unknown or invalid, or two options exclude each other.
        """
        self._command = tuple(shlex.split(command) if isinstance(command, str) else command)
        self._site: str | None = options.pop(SITE, None)
        self._options = to_fields(BatchSpec, options)
        self._known: KnownJob | None = None
        BatchSpec.check_each(self._command, self._options)

    @classmethod
    def find(cls, job: str | None = None) -> Job:
        """Return an existing job by its Slurm job id, its name or its run directory. By default, return the latest.

        Raises:
            UnknownJobError: There is no such job.
        """
        found = cls(())
        found._known = api.find(job)
        return found

    def script(self) -> str:
        """Return the batch script. This host needs no Slurm.

        Raises:
            OptionError, PlacementError: Options and settings contradict each other, or `workers` is missing.
            SettingsError, UntrustedFileError: A settings file cannot be used.
        """
        return api.script(self._spec())

    def submit(self) -> Job:
        """Submit the job to Slurm. Return this object. The errors are as in `script` and `tf4slurm.submit`."""
        self._known = api.submit(self._spec())
        return self

    def run(self, *, local: bool = False, isolated: bool = False, quiet: bool = False) -> int:
        """Run the job to its end like `tf4slurm.run`. Return its exit code, or that of a launcher that cannot start it.

        Options for sbatch are ignored.

        Args:
            local: See `tf4slurm.run`.
            isolated: See `tf4slurm.run`.
            quiet: Print the launcher's output at the end, and only if the job has failed. `logs` returns the output of
                the tasks in any case.

        Raises:
            OptionError, PlacementError, SettingsError, UntrustedFileError: As `script`.
            SlurmEnvironmentError: A variable of the Slurm allocation is invalid.
        """
        spec = self._local_spec() if local or SlurmAllocation.from_environ(os.environ) is None else self._run_spec()
        show = functools.partial(print, end="", flush=True)
        kept: list[str] = []
        try:
            status = api.run(spec, local=local, isolated=isolated, on_output=kept.append if quiet else show)
            self._known = api.find(status.run_directory)
            exit_code = status.exit_code or 0
        except LaunchError as error:  # the output has the reason
            exit_code = error.returncode
        if exit_code != 0:
            show("".join(kept))
        return exit_code

    def status(self) -> JobStatus:
        """Return the state of the job and its tasks."""
        return api.status(self._started())

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Show a progress bar until the job has ended. Return its exit code.

        Ctrl-C ends the wait, not the job. In a notebook without the package ipywidgets, lines of text replace the bar.

        Raises:
            WaitTimeoutError: The job did not end in time.
        """
        with show_progress() as show:
            for (status,) in api.watch([self._started()], timeout_seconds=timeout_seconds):
                step = status.furthest_step
                reached = describe_progress(status.elements) if status.elements else status.phase or status.reason
                reached = reached if step is None else f"step {step:,}"
                show(f"{status.name} {status.state} {reached}")
        return 1 if status.exit_code is None else status.exit_code

    def logs(self, *tasks: str) -> str:
        """Return the output of tasks such as "chief/0" or "worker/*", by default of all tasks, sorted by time.

        If several tasks have printed lines, each line begins with its task, such as "worker/0 | ".

        Raises:
            UnknownTaskError: No task matches, or the job has no logs yet.
        """
        lines = list(api.logs(self._started(), *tasks, merged=True))
        has_names = len({line.source for line in lines}) > 1
        return "".join(f"{line.source} | {line.text}\n" if has_names else f"{line.text}\n" for line in lines)

    def cancel(self, grace_period_seconds: float | None = None, *, now: bool = False) -> None:
        """Ask the job to save and stop, and kill it if it does not end in time. See `tf4slurm.cancel`.

        `now` ends it at once, also while it saves.
        """
        api.cancel(self._started(), grace_period_seconds=grace_period_seconds, now=now)

    def grow(self, workers: int, **options: Any) -> str:
        """Add workers to this running job. Return the id of their job array. See `tf4slurm.grow`.

        The default of `site` is the one given to this `Job`.
        """
        return api.grow(self._started(), workers, **{SITE: self._site, **options})

    def shrink(self, workers: int) -> tuple[str, ...]:
        """Remove workers that `grow` has added. Return the ids of their Slurm jobs. See `tf4slurm.shrink`."""
        return api.shrink(self._started(), workers)

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the job's report. Return its path. See `tf4slurm.make_report`."""
        return api.make_report(self._started(), path)

    def plot(self) -> Picture:
        """Return a picture of the timeline, the metrics over steps and the steps per second, for a notebook.

        Raises:
            MissingDependencyError: matplotlib is not installed: pip install "tf4slurm[plot]".
        """
        from tf4slurm.reports.picture import make_picture
        from tf4slurm.reports.summary import JobSummary

        return Picture(make_picture(JobSummary(latest_run(self._started())), "png", is_short=True))

    def __repr__(self) -> str:
        name = self._known.name if self._known else "not started"
        return f"{type(self).__name__}({shlex.join(self._command)}: {name})"

    def _repr_html_(self) -> str:
        if self._known is None:
            return f"<pre>{escape(repr(self))}</pre>"
        status = self.status()
        rows: list[tuple[object, ...]] = [("task", "node", "state", "step", "step/s")]
        for task in status.tasks:
            rows.append((task.name_text, task.node, task.state_text, task.step, task.steps_per_second))
        if status.elements:
            rows = [("element", "arguments", "state", "exit code", "step")]
        for each in status.elements:
            arguments = " ".join(format_labels(each.labels))
            rows.append((each.job_id or each.name, arguments, each.state, each.exit_code, each.furthest_step))
        texts = [["" if value is None else str(value) for value in row] for row in rows]
        table = "\n".join(format_table(texts))
        start = f"Expected start: {status.start}." if status.start else ""
        reason = " ".join(filter(None, (as_sentence(status.headline), start, status.stop_text)))
        facts = ", ".join(status.facts)
        return f"<b>{escape(status.name)}</b> {escape(facts)}<br>{escape(reason)}<pre>{escape(table)}</pre>"

    def _spec(self) -> BatchSpec:
        """Return the given options, completed with options from the settings files."""
        return self._batch_spec()

    def _batch_spec(self, **changes: Any) -> BatchSpec:
        """Return the given options with `changes`, completed with options from the settings files."""
        settings = read_settings(os.environ, self._site)
        return BatchSpec(self._command, **{**fill_in(BatchSpec, self._options, settings), **changes})

    def _run_spec(self, left_out: Collection[str] = ()) -> JobSpec:
        """Return the given options for `tf4slurm run`, completed with options from the settings, except `left_out`."""
        settings = read_settings(os.environ, self._site)
        settings = {name: setting for name, setting in settings.items() if name not in left_out}
        options = {name: value for name, value in self._options.items() if name in options_of(JobSpec)}
        return JobSpec(self._command, **fill_in(JobSpec, options, settings))

    def _local_spec(self) -> JobSpec:
        return self._run_spec(SLURM_OPTIONS)

    def _started(self) -> KnownJob:
        if self._known is None:
            raise UnknownJobError("This job was not started yet: call submit() or run().")
        return self._known


@dataclass(frozen=True, repr=False)  # a notebook stores the repr beside the picture
class Picture:
    """A picture that a notebook shows. `png` is the content of a PNG file."""

    png: bytes

    def _repr_png_(self) -> bytes:
        return self.png
