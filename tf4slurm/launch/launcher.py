"""The launcher: forms the cluster, decides, reports. One per job, outside every role."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tf4slurm import __version__
from tf4slurm.agent.agent import STOP_SIGNALS
from tf4slurm.agent.bootstrap import ControlEndpoint, join_settings, settings_to_environ
from tf4slurm.agent.log_tail import explain
from tf4slurm.cluster import Address
from tf4slurm.control.credentials import create_credentials
from tf4slurm.control.idle_watch import IdleWatch
from tf4slurm.control.outcome import Outcome, describe_end
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState, Phase
from tf4slurm.control.task_record import TaskRecord
from tf4slurm.errors import EXIT_PREFLIGHT, EXIT_REQUEUED, EXIT_TASK_LOST, LaunchError, RunDirectoryError
from tf4slurm.jobs.recorder import EventLog, Recorder
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event, JobFile, Process, ResultFile, ResultTask
from tf4slurm.launch.requeue import Reason, Requeue
from tf4slurm.launch.spawner import Spawner
from tf4slurm.network.interfaces import host_addresses, interface_address
from tf4slurm.placement import SPREAD, place_tasks
from tf4slurm.slurm.commands import ask_grant
from tf4slurm.slurm.slurmstepd import wait_for_slurmstepd_loss
from tf4slurm.spec import JobSpec
from tf4slurm.system.background import OrderedThread, in_thread
from tf4slurm.system.child_process import adopt_orphans

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
_CLOSE_SECONDS = 2.0
_IDLE_LOOK_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0  # without an answer from the file system of the run directory, before a warning
_FILE_SYSTEM_SECONDS = 300.0  # then: a failover of a parallel file system takes 30 to 300 s
_LOAD_SECONDS = 3.0
_CHEAP_REPORT_BYTES = 1_000_000  # of events and samples: a report of these took 0.1 s
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Result:
    """How a job went: its outcome, what is known of each task in the last attempt, and how long it took."""

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
        """What the task that failed first has printed; None if no single task did."""
        cause = self.outcome.cause
        return self.run_directory.log(cause, self.attempt) if cause is not None else None

    @property
    def collateral(self) -> list[str]:
        """What else failed in the last attempt, one line each."""
        others = (record for record in self.records if record.task != self.outcome.cause)
        return [f"{r} {describe_end(r.observed.returncode)}" for r in others if r.observed.returncode]


class Reporter:
    """Who is told, as it happens. This one says nothing; the command line has others."""

    def on_run_directory(self, run_directory: RunDirectory) -> None:
        """The run directory is there."""

    def on_event(self, event: Event, state: JobState) -> None:
        """The life of the job or of a task has changed."""

    def on_output(self, line: str) -> None:
        """A child, or whatever started the agents, printed a line."""

    def on_result(self, result: Result) -> None:
        """The job has ended; nothing else follows."""

    def close(self) -> None:
        """Show what is still to be shown."""


class Launcher:
    """Runs one job to its end."""

    def __init__(
        self,
        spec: JobSpec,
        spawner: Spawner | None,
        run_directory: RunDirectory,
        reporter: Reporter,
        requeue: Requeue | None = None,
        facts: Mapping[str, Any] | None = None,
        node: str = "",
    ) -> None:
        """Without a spawner the tasks come by themselves (plain srun), and find the service in the run directory.

        `facts` are added to job.json, such as the job's id in Slurm. `node` is Slurm's name of this
        node, which is used without a spawner.
        """
        self._node = node
        self._facts = facts or {}
        self._requeue = requeue
        self._spec = spec
        self._spawner = spawner
        self._run_directory = run_directory
        self._reporter = reporter
        self._files = OrderedThread()  # writes the run directory
        self._events = EventLog(run_directory.events, self._files)
        self._started_at = time.monotonic()
        place = functools.partial(place_tasks, spec.counts, spec.placement)
        tasks = place([""] * spec.num_tasks)
        needs_nodes = spec.placement == SPREAD
        self._state = JobState(tasks, spec, self._started_at, self._on_event, place if needs_nodes else None)
        self._credentials = create_credentials()
        self._service = ControlService(self._state, self._credentials)
        self._recorder = Recorder(run_directory, self._state, self._started_at, self._files)
        self._is_hurried = asyncio.Event()

    async def run(self) -> Result:
        """Form the cluster, watch it, end it; return how it went. Every wait in it ends by the job's limits."""
        adopt_orphans()
        if self._spawner is not None:
            self._take_signals()
        recording = asyncio.create_task(self._recorder.run())
        idle_watch = asyncio.create_task(self._watch_for_idleness())
        slurmstepd_watch = asyncio.create_task(self._watch_slurmstepd())
        # What the report needs is loaded while the job trains: neither its start nor its end waits for that.
        loading = threading.Thread(target=importlib.import_module, args=("tf4slurm.reports.report",), daemon=True)
        asyncio.get_running_loop().call_later(_LOAD_SECONDS, loading.start)
        job_id = self._facts.get("job_id")
        if job_id is not None:  # a thread that nobody waits for: a controller may take its time
            threading.Thread(target=self._note_grant, args=(job_id,), daemon=True).start()
        try:
            await self._in_time(self._files.run(self._write_job))
            self._reporter.on_run_directory(self._run_directory)
            for doubt in await in_thread(self._requeue.find_doubts) if self._requeue is not None else ():
                logger.warning("%s", doubt)
            port = await self._service.start(self._listen_host(), self._spec.service_ports)
            service = await in_thread(self._locate, port)
            if self._spawner is None:  # those of a spawner are told by it
                await self._in_time(self._files.run(self._write_control, service))
            ending = asyncio.create_task(self._service.wait_for_end())
            if self._spawner is not None and self._state.outcome is None:
                settings = join_settings(self._spec, self._run_directory.path)
                environment = {**service.to_environ(), **settings_to_environ(settings)}
                starting = asyncio.create_task(self._spawner.start(environment, self))
                await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                starting.cancel()
            await ending
        finally:
            recording.cancel()
            idle_watch.cancel()
            slurmstepd_watch.cancel()
            try:
                if self._spawner is not None:
                    await self._spawner.close(_CLOSE_SECONDS)
            finally:
                await self._service.close()
                await asyncio.wait({self._files.run(self._remove_control)}, timeout=_CLOSE_SECONDS)
        return await self._conclude()

    # What the spawner sees

    def on_output(self, line: str) -> None:
        self._reporter.on_output(line)

    def on_agent_exit(self, rank: int, returncode: int) -> None:
        self._state.on_agent_exit(rank, returncode, time.monotonic())
        self._service.publish()

    def on_all_exit(self, returncode: int, words: str) -> None:
        said = f" It said:\n{words}" if words else ""
        if self._state.count("running", "exited", "ready", "registered", "terminated"):
            outcome = Outcome(EXIT_TASK_LOST, f"srun ended before the job did: it {describe_end(returncode)}.{said}")
        else:
            outcome = Outcome(EXIT_PREFLIGHT, f"srun could not start the tasks: it {describe_end(returncode)}.{said}")
        self._state.on_spawner_exit(outcome, time.monotonic())
        self._service.publish()

    # Inside

    def _take_signals(self) -> None:
        """From here on a stop signal ends the job in order; one that came before was held back for this moment."""
        for number in LAUNCHER_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and what a script starts in the background
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)

    def _listen_host(self) -> str:
        return _LOOPBACK if self._spawner is not None and self._spawner.is_local else ""

    def _locate(self, port: int) -> ControlEndpoint:
        """Return the addresses under which the tasks may find the service, the likeliest first."""
        if self._listen_host() == _LOOPBACK:
            hosts: tuple[str, ...] = (_LOOPBACK,)
        elif self._spec.interface is not None and self._spawner is None:
            hosts = (interface_address(self._spec.interface, self._node),)
        else:
            hosts = host_addresses() or (socket.gethostname(),)
        return ControlEndpoint(tuple(Address(host, port) for host in hosts), self._credentials.shared)

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._state.phase is Phase.ENDED:
            self._is_hurried.set()
        if number == signal.SIGINT and self._state.phase is Phase.STOPPING:
            self._state.skip_grace_period(now)  # Ctrl-C again
        self._state.on_stop(signal.Signals(number), f"the launcher got {signal.Signals(number).name}", now)
        self._service.publish()

    async def _watch_for_idleness(self) -> None:
        """Tell when all tasks only wait: cancel this."""
        watch = IdleWatch()
        while True:
            await asyncio.sleep(_IDLE_LOOK_SECONDS)
            text = watch.look(self._state.records, time.monotonic())
            if text is not None:
                self._on_event("idle", None, text)

    async def _watch_slurmstepd(self) -> None:
        """Stop the job once the slurmstepd of the batch script is killed: Slurm does not end it then. Cancel this."""
        if self._spawner is None:  # the agent in this process sees to it
            return
        process_id = await wait_for_slurmstepd_loss()
        job_id = self._facts.get("job_id")
        advice = f" (Slurm may keep the job: scancel {job_id})" if job_id is not None else ""
        what = f"the slurmstepd above the launcher (process {process_id}) was killed{advice}"
        self._state.on_stop(signal.SIGHUP, what, time.monotonic())
        self._service.publish()

    def _note_grant(self, job_id: str) -> None:
        """Write down what Slurm has given the job: it forgets jobs a few minutes after their end."""
        try:
            self._run_directory.write(ask_grant(job_id))
        except (LaunchError, RunDirectoryError) as error:
            logger.info("what Slurm has given the job is not written down: %s", error)

    def _on_event(self, kind: str, task: str | None, text: str) -> None:
        self._reporter.on_event(self._events.add(kind, task, text), self._state)

    # Files

    def _write_job(self) -> None:
        self._run_directory.write(_job_file(self._spec, self._facts))

    def _write_control(self, service: ControlEndpoint) -> None:
        self._run_directory.write_control(service.to_json())

    def _remove_control(self) -> None:
        with contextlib.suppress(OSError):
            self._run_directory.control.unlink()

    async def _in_time(self, writing: asyncio.Future[_T]) -> _T:
        """Wait for a file system that may not answer, until a signal comes after the job's end.

        Raises:
            RunDirectoryError: It did not answer in time.
        """
        hurry: asyncio.Future[Any] = asyncio.create_task(self._is_hurried.wait())
        path = str(self._run_directory.path)
        text = f"The file system of the run directory {path!r} does not answer"
        try:
            await asyncio.wait({writing}, timeout=_PATIENCE_SECONDS)
            if not writing.done():
                logger.warning("%s: waiting for it, at most %g s", text, _FILE_SYSTEM_SECONDS)
                both: set[asyncio.Future[Any]] = {writing, hurry}
                await asyncio.wait(both, timeout=_FILE_SYSTEM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
        if writing.done():
            return writing.result()
        raise RunDirectoryError(f"{text}: what was to be written there may be missing.", path=path)

    async def _conclude(self) -> Result:
        outcome = self._state.outcome
        assert outcome is not None
        assert self._state.phase is Phase.ENDED
        seconds = time.monotonic() - self._started_at
        records = tuple(self._state.records)
        result = Result(
            *(outcome, records, self._run_directory, seconds, self._started_at, self._state.attempt),
            warnings=self._state.warnings,
        )
        self._recorder.write()
        self._events.close()
        try:
            if self._requeue is not None and self._state.was_stopped:
                result = await self._put_back(result, self._requeue)
            await self._in_time(self._files.run(self._write, result))  # the last: whoever finds it finds all else
            result = dataclasses.replace(result, report=await self._in_time(self._files.run(self._write_report)))
        except RunDirectoryError as error:  # a full disk, or one that hangs, does not change how the job went
            logger.error("%s", error)
        self._reporter.on_result(result)
        return result

    async def _put_back(self, result: Result, requeue: Requeue) -> Result:
        """Put the job back into the queue, if that is what its stop calls for; Slurm then ends this process."""
        reason = await self._in_time(in_thread(requeue.find_reason, result.outcome, result.run_directory))
        if reason is None:
            return result
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
        outcome = dataclasses.replace(
            result.outcome, exit_code=EXIT_REQUEUED, reason=f"{result.outcome.reason} It is requeued ({reason})."
        )
        requeued = dataclasses.replace(result, outcome=outcome, requeued=reason)
        await self._in_time(self._files.run(self._write, requeued))  # before Slurm knows: it may end us at once
        return requeued if await in_thread(requeue.carry_out) else result

    def _write(self, result: Result) -> None:
        try:
            self._run_directory.write_result(_result_file(result))
        except RunDirectoryError as error:  # a full disk does not change how the job went
            logger.error("%s", error)

    def _write_report(self) -> Path | None:
        """Write the report of a job that is small enough for it to cost milliseconds: its hosts are held meanwhile."""
        try:
            if self._run_directory.size_of_record() > _CHEAP_REPORT_BYTES:
                return None
            from tf4slurm.reports.report import make_report
            from tf4slurm.reports.summary import read_summary

            report = make_report(read_summary(self._run_directory)).encode("utf-8", "replace")
            return self._run_directory.write_report(report)
        except Exception as error:  # whatever it is: a picture must not cost the job its exit code
            logger.warning("there is no report.html: %s: %s", type(error).__name__, error)
            return None


def _job_file(spec: JobSpec, facts: Mapping[str, Any]) -> JobFile:
    return JobFile(
        name=spec.name,
        command=spec.command,
        counts=spec.counts,
        grace_period_seconds=spec.grace_period_seconds,
        options=spec.to_json(),
        host=socket.gethostname(),
        directory=os.getcwd(),
        process=Process.own(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        versions={"tf4slurm": __version__, "python": platform.python_version()},
        **facts,
    )


def _result_file(result: Result) -> ResultFile:
    outcome = result.outcome
    return ResultFile(
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        cause=str(outcome.cause) if outcome.cause else None,
        tail=tuple(outcome.tail),
        meaning=tuple(explain(outcome.tail)),
        log=str(result.cause_log) if result.cause_log else None,
        collateral=() if outcome.is_success else tuple(result.collateral),
        seconds=round(result.seconds, 3),
        attempts=result.attempt,
        requeued=result.requeued,
        warnings=tuple(result.warnings),
        tasks=tuple(_result_task(record, result.started_at) for record in result.records),
    )


def _result_task(record: TaskRecord, started_at: float) -> ResultTask:
    def since_start(at: float | None) -> float | None:
        return None if at is None else round(at - started_at, 3)

    return ResultTask(
        task=str(record.task),
        rank=record.rank,
        node=record.node or None,
        address=str(record.address) if record.address else None,
        starts=record.observed.starts,
        state=record.observed.state if record.has_registered else "missing",
        returncode=record.observed.returncode,
        started_seconds=since_start(record.started_at),
        ended_seconds=since_start(record.ended_at),
    )
