"""`Sweep`: one job for each point of a grid, as a job array of Slurm or as local jobs (`LocalSweep`)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tf4slurm import api
from tf4slurm.errors import MissingDependencyError, OptionError, UnknownJobError
from tf4slurm.job import Job
from tf4slurm.jobs.registry import register_end, register_job
from tf4slurm.jobs.schema import Process
from tf4slurm.jobs.status_reader import combine
from tf4slurm.jobs.sweep_stops import SweepStop, SweepStops, reserve_sweep_name
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.points import ArrayElement, check_points, fill_point, format_labels, make_points
from tf4slurm.system.exec_child import NOW_SIGNAL
from tf4slurm.system.variables import RUN_NAME_VARIABLE

if TYPE_CHECKING:
    from tf4slurm.reports.runs import Run

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_COLUMNS = ("state", "exit_code", "steps", "seconds", "run_directory")  # of the table
_SIGNALS = {SweepStop.SAVE: signal.SIGTERM, SweepStop.NOW: NOW_SIGNAL}
_OUTPUT_SECONDS = 5.0  # for the last lines of a launcher; a process that it left may hold the pipe open


class Sweep(Job):
    """One job for each point of a grid: a `Job` whose command gets varied arguments.

    `submit` submits a job array of Slurm, and `run` runs local jobs. `status`, `wait`, `logs`, `cancel`, `grow` and
    `report` are those of `Job`, for all elements. `plot` and `shrink` are for one element: `Job.find("4711_3")`.

    Example:
        sweep = Sweep("python train.py", grid={"lr": [0.1, 0.01], "units": [32, 64]}, ps=1, workers=2, time="1h")
        sweep.submit(at_most=2).wait()
        print(sweep.best("loss").labels)
    """

    def __init__(
        self,
        command: str | Sequence[str],
        grid: Mapping[str, Sequence[object]] | None = None,
        *,
        points: Iterable[Mapping[str, object]] = (),
        **options: Any,
    ) -> None:
        """Check the grid and the options. Nothing is started.

        Args:
            command: As for `Job`. "{lr}" in it is replaced by the value of lr. Each name without such a placeholder is
                appended as an argument, such as "--lr=0.1".
            grid: The values of each argument by name. Each combination is a point.
            points: The points, in place of `grid`: the value of each argument by name. See also
                `tf4slurm.random_points`.
            options: As for `Job`, except `grid` and `array_args`.

        Raises:
            OptionError: There is no point, a point or an option is invalid, or two options exclude each other.
        """
        for name in ("array_args", "array-args"):
            if name in options:
                raise OptionError("A sweep has a grid or points in place of array_args.", option="array_args")
        super().__init__(command, **options)
        if grid is not None and points:
            raise OptionError("Give a sweep a grid or points, not both.", option="grid")
        self._points: tuple[Mapping[str, str], ...] = make_points(grid) if grid else check_points(points)
        if not self._points:
            raise OptionError("A sweep needs a grid or points.", option="grid")

    @classmethod
    def find(cls, job: str | None = None) -> Sweep:
        """Return an existing sweep, or another job array, by its Slurm job id or name. By default, return the latest.

        The points of the array are the labels of its elements.

        Raises:
            UnknownJobError: There is no such job, or it is no array.
        """
        known = api.find(job)
        if not known.array:
            raise UnknownJobError(f"{known.name} is no sweep and no job array. Use Job.find.", job=known.name)
        found = cls((), points=[{"index": each.index} for each in known.array])
        found._points = tuple(each.labels for each in known.array)
        found._known = known
        return found

    @property
    def points(self) -> tuple[Mapping[str, str], ...]:
        """The value of each varied argument by name, as text, for each point."""
        return self._points

    def submit(self, at_most: int | None = None) -> Sweep:
        """Submit the points as one job array, of which at most `at_most` elements run at once. Return this object."""
        self._known = api.submit(self._spec(at_most))
        return self

    def script(self) -> str:
        """Return the batch script of the array. See `Job.script`."""
        return api.script(self._spec())

    def run(self, *, at_most: int = 1, local: bool = True, isolated: bool = False, quiet: bool = False) -> int:
        """Run the points as local jobs. Return 0, or the exit code of the element with the worst state.

        A Ctrl-C lets the jobs that run save and stop, and starts no more. Another one ends them at once. Then
        KeyboardInterrupt is raised.

        Args:
            at_most: Maximum number of jobs that run at once.
            local: Only True is accepted. The jobs are local, also inside a Slurm allocation. `submit` uses other nodes.
            isolated: See `tf4slurm.run`.
            quiet: Print nothing. `logs` returns the output of the tasks.

        Raises:
            OptionError: An option is invalid.
            RunDirectoryError: The directory of the run directories cannot be written.
        """
        if not local:
            raise OptionError("A sweep runs local jobs, or is submitted to Slurm: omit local=False.", option="local")
        show = (lambda line: None) if quiet else (lambda line: print(line, end="", flush=True))
        runner = LocalSweep(self._local_spec(), self._points, at_most=at_most, isolated=isolated, on_output=show)
        self._known = runner.known
        try:
            exit_code = runner.run([signal.SIGINT])
        finally:
            self._known = runner.known
        if runner.stopped_by is not None:
            raise KeyboardInterrupt
        return exit_code

    def results(self) -> list[Run]:
        """Return the result of each point: labels, state, exit code, steps, metrics, seconds, run directory.

        Raises:
            UnknownJobError: The sweep was not started yet.
        """
        return api.read_runs([self._started()])

    def best(self, metric: str) -> Run:
        """Return the result with the best value of a metric.

        It is the lowest for a loss or an error, and the highest for any other metric, as in the report.

        Raises:
            OptionError: No point has reported the metric.
        """
        from tf4slurm.reports.metrics import choose_best

        found = [run for run in self.results() if metric in run.best]
        if not found:
            known = sorted({name for run in self.results() for name in run.best})
            text = f"No point of the sweep has reported a metric {metric!r}. Reported: {', '.join(known) or 'none'}."
            raise OptionError(text, option="metric")
        value = choose_best(metric, [run.best[metric] for run in found])
        return next(run for run in found if run.best[metric] == value)

    def table(self) -> Any:
        """Return the results as a pandas DataFrame, with a row for each point.

        Raises:
            MissingDependencyError: pandas is not installed: pip install pandas.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            text = "pandas is not installed: pip install pandas, or use results()."
            raise MissingDependencyError(text, package="pandas") from error
        rows = [
            {
                **{_column(name, run.last): value for name, value in run.labels.items()},
                **{"state": run.state, "exit_code": run.exit_code, "steps": run.steps, "seconds": run.seconds},
                **run.last,
                **{f"best {name}": value for name, value in run.best.items()},
                "run_directory": run.run_directory,
            }
            for run in self.results()
        ]
        return pandas.DataFrame(rows)

    def _spec(self, at_most: int | None = None) -> BatchSpec:
        return self._batch_spec(points=self._points, **({} if at_most is None else {"at_most": at_most}))


def _column(label: str, metrics: Collection[str]) -> str:
    """Return the name of the column of a varied argument, which differs from those of other columns."""
    return f"argument {label}" if label in (*_COLUMNS, *metrics) else label


class LocalSweep:
    """Runs each point of a sweep as a local job, with a launcher process of its own.

    Attributes:
        known: The sweep, as its entry in the registry.
        stopped_by: The last signal that `stop` has forwarded; None for none.
    """

    def __init__(
        self,
        spec: JobSpec,
        points: Sequence[Mapping[str, str]],
        *,
        at_most: int,
        isolated: bool,
        on_output: Callable[[str], None],
    ) -> None:
        """Register the sweep. `on_output` is called with each line that a launcher prints, after its index.

        Raises:
            OptionError: `at_most` is not a number from 1.
            RunDirectoryError: The directory of the run directories cannot be written.
        """
        if type(at_most) is not int or at_most < 1:
            raise OptionError(f"--at-most {at_most!r}: expected a number from 1.", option="at-most")
        self._spec = spec
        self._points = points
        self._at_most = at_most
        self._isolated = isolated
        self._on_output = on_output
        self._waiting = list(range(len(points)))
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._exit_codes: dict[int, int] = {}
        self.stopped_by: signal.Signals | None = None
        self._request: SweepStop | None = None
        elements = [ArrayElement(index, {**spec.labels, **point}) for index, point in enumerate(points)]
        process = Process.of(os.getpid())
        name = reserve_sweep_name(spec.runs_directory, f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self._stops = SweepStops.of(spec.runs_directory, name)
        self.known = register_job(name, spec.runs_directory, os.environ, array=elements, process=process)

    def run(self, signals: Collection[signal.Signals] = ()) -> int:
        """Run all points. Return 0, or the exit code of the element with the worst state.

        After `stop`, elements that were not started do not count. If no element failed, the result is 128 + n after
        signal n.

        Args:
            signals: Signals for which `stop` is called meanwhile. Other threads than the main thread receive none.
        """
        with _handling(signals, self.stop):
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._at_most:
                    self._start(self._waiting.pop(0))
                for index, process in list(self._running.items()):
                    if process.poll() is not None:
                        self._exit_codes[index] = process.returncode
                        del self._running[index]
                self._apply_request()
                time.sleep(_POLL_SECONDS)
        for reader in self._readers:
            reader.join(_OUTPUT_SECONDS)
        self.known = register_end(self.known, os.environ)
        elements = api.status(self.known).elements
        ended = [each for each in elements if each.run_directory is not None]
        exit_code = combine(self.known, ended).exit_code if ended else 0
        # a launcher that failed before it made its run directory
        exit_code = exit_code or next(filter(None, self._exit_codes.values()), 0)
        if self.stopped_by is not None:
            return exit_code or 128 + self.stopped_by
        return exit_code

    def stop(self, number: signal.Signals) -> None:
        """Forward a stop signal to all launchers that run, and start no more. May be called in a signal handler."""
        self.stopped_by = number
        self._waiting.clear()
        for process in list(self._running.values()):
            process.send_signal(number)

    def _apply_request(self) -> None:
        """Call `stop` if `tf4slurm cancel` has requested it, once for each kind of request."""
        request = self._stops.read()
        if request is not None and request is not self._request:
            self._request = request
            self.stop(_SIGNALS[request])

    def _start(self, index: int) -> None:
        point = self._points[index]
        spec = dataclasses.replace(
            self._spec,
            command=fill_point(self._spec.command, point),
            label=(*self._spec.label, *format_labels(point)),
        )
        isolated = ["--isolated"] if self._isolated else []
        words = ["run", "--local", *isolated, "--site", "none", *spec.to_arguments(), "--", *spec.command]
        self._on_output(f"{index} | {' '.join(format_labels(point))}\n")
        process = subprocess.Popen(
            api.own_command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, RUN_NAME_VARIABLE: self.known.element(index).name},
            start_new_session=True,  # a Ctrl-C in the terminal reaches it once, by `stop`
        )
        self._running[index] = process
        if self.stopped_by is not None:  # the signal came before the process was noted
            process.send_signal(self.stopped_by)
        self._readers.append(threading.Thread(target=self._read, args=(index, process), daemon=True))
        self._readers[-1].start()

    def _read(self, index: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._on_output(f"{index} | {line}")


@contextlib.contextmanager
def _handling(signals: Collection[signal.Signals], handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handle` for each of these signals in the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, lambda number, _frame: handle(signal.Signals(number))) for each in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
