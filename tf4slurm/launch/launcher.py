"""The launcher, one per job: starts the agents, follows the job to its end, and records its events and result."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tf4slurm import __version__
from tf4slurm.agent.bootstrap import ControlEndpoint, spec_to_environ
from tf4slurm.control.records import Outcome, describe_end
from tf4slurm.control.state import Phase
from tf4slurm.errors import EXIT_PREFLIGHT, EXIT_REQUEUED, EXIT_TASK_LOST, LaunchError, RunDirectoryError
from tf4slurm.jobs.recorder import EventLog, Recorder
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process
from tf4slurm.launch.control_host import ControlHost
from tf4slurm.launch.requeue import Requeue
from tf4slurm.launch.result import Reporter, Result
from tf4slurm.launch.spawner import Spawner
from tf4slurm.slurm.commands import query_grant
from tf4slurm.slurm.slurmstepd import wait_for_slurmstepd_loss
from tf4slurm.spec import JobSpec
from tf4slurm.system.child_process import adopt_orphans
from tf4slurm.system.exec_child import STOP_SIGNALS
from tf4slurm.system.program import in_thread

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
_CLOSE_SECONDS = 2.0
_PATIENCE_SECONDS = 5.0  # for the file system of the run directory, before a warning
_FILE_SYSTEM_SECONDS = 300.0  # after the warning; a parallel file system's failover takes 30 to 300 s
_LOAD_SECONDS = 3.0
_CHEAP_REPORT_BYTES = 1_000_000  # of events and samples; a report of this size takes 0.1 s


class Launcher:
    """Runs one job to its end, in its own process or in the process of rank 0's agent."""

    def __init__(
        self,
        spec: JobSpec,
        spawner: Spawner | None,
        run_directory: RunDirectory,
        reporter: Reporter,
        requeue: Requeue | None = None,
        facts: Mapping[str, Any] | None = None,
        node: str | None = None,
    ) -> None:
        """Create the launcher. Without a spawner, srun has started the tasks, and `node` is Slurm's name of this node.

        `facts`, such as the Slurm job's id, are added to job.json.
        """
        self._node = node if spawner is None else None
        self._facts = facts or {}
        self._requeue = requeue
        self._spec = spec
        self._spawner = spawner
        self._run_directory = run_directory
        self._reporter = reporter
        self._files = ThreadPoolExecutor(1)  # writes to the run directory
        self._events = EventLog(run_directory.events, self._files)
        self._host = ControlHost(spec.counts, spec, run_directory, self._files, self._on_event)
        self._state = self._host.state
        self._started_at = self._host.started_at
        self._recorder = Recorder(run_directory, self._state, self._started_at, self._files)
        self._is_impatient = asyncio.Event()

    async def run(self) -> Result:
        """Run the job to its end; return the result."""
        adopt_orphans()
        if self._spawner is not None:
            self._take_signals()
        recording = asyncio.create_task(self._recorder.run())
        slurmstepd_watch = asyncio.create_task(self._watch_slurmstepd())
        # Load the report's modules and templates during training, so that the end of the job is not delayed.
        loading = threading.Thread(target=_load_report, daemon=True)
        asyncio.get_running_loop().call_later(_LOAD_SECONDS, loading.start)
        job_id = self._facts.get("job_id")
        if job_id is not None:  # nothing waits for this thread: slurmctld may be slow
            threading.Thread(target=self._note_grant, args=(job_id,), daemon=True).start()
        try:
            await self._in_time(self._write_job)
            self._reporter.on_run_directory(self._run_directory)
            for obstacle in await in_thread(self._requeue.find_obstacles) if self._requeue is not None else ():
                logger.warning("%s", obstacle)
            endpoint = await self._start_service()
            ending = asyncio.create_task(self._host.wait_for_end())
            if self._spawner is not None and self._state.outcome is None:
                environment = {**endpoint.to_environ(), **spec_to_environ(self._spec, self._run_directory.path)}
                starting = asyncio.create_task(self._spawner.start(environment, self))
                await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                starting.cancel()
            await ending
        finally:
            recording.cancel()
            slurmstepd_watch.cancel()
            try:
                if self._spawner is not None:
                    await self._spawner.close(_CLOSE_SECONDS)
            finally:
                await self._host.close()
        return await self._conclude()

    async def _start_service(self) -> ControlEndpoint:
        is_local = self._spawner is not None and self._spawner.is_local
        endpoint = await self._host.start(self._node, is_local=is_local)
        if self._spawner is None:
            await self._in_time(self._host.announce, endpoint)
        return endpoint

    # Calls of the spawner

    def on_output(self, line: str) -> None:
        self._reporter.on_output(line)

    def on_agent_exit(self, rank: int, returncode: int) -> None:
        self._state.on_agent_exit(rank, returncode, time.monotonic())
        self._host.publish()

    def on_all_exit(self, returncode: int, message: str) -> None:
        details = f" Its last output:\n{message}" if message else ""
        if self._state.count("running", "exited", "ready", "registered", "terminated"):
            outcome = Outcome(EXIT_TASK_LOST, f"srun ended before the job did: it {describe_end(returncode)}.{details}")
        else:
            outcome = Outcome(
                EXIT_PREFLIGHT, f"srun could not start the tasks: it {describe_end(returncode)}.{details}"
            )
        self._state.on_spawner_exit(outcome, time.monotonic())
        self._host.publish()

    def _take_signals(self) -> None:
        """Start to handle stop signals. Earlier signals are pending, because the caller has blocked them."""
        for number in LAUNCHER_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a background process of a shell script
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._state.phase is Phase.ENDED:
            self._is_impatient.set()
        if number == signal.SIGINT and self._state.phase is Phase.STOPPING:
            self._state.skip_grace_period(now)  # a second Ctrl-C
        self._state.on_stop(signal.Signals(number), f"the launcher received {signal.Signals(number).name}", now)
        self._host.publish()

    async def _watch_slurmstepd(self) -> None:
        """Stop the job when the slurmstepd of the batch script is killed, as Slurm does not; runs until cancelled."""
        if self._spawner is None:  # the agent in this process watches slurmstepd
            return
        process_id = await wait_for_slurmstepd_loss()
        job_id = self._facts.get("job_id")
        advice = f" (Slurm may keep the job: scancel {job_id})" if job_id is not None else ""
        what = f"the slurmstepd above the launcher (process {process_id}) was killed{advice}"
        self._state.on_stop(signal.SIGHUP, what, time.monotonic())
        self._host.publish()

    def _note_grant(self, job_id: str) -> None:
        """Write the allocation to slurm.json, because Slurm forgets a job a few minutes after its end."""
        try:
            self._run_directory.write(query_grant(job_id))
        except (LaunchError, RunDirectoryError) as error:
            logger.info("slurm.json is not written: %s", error)

    def _on_event(self, kind: str, task: str | None, text: str, **facts: Any) -> None:
        self._reporter.on_event(self._events.add(kind, task, text, **facts), self._state)

    def _write_job(self) -> None:
        self._run_directory.write(_job_file(self._spec, self._facts))

    async def _in_time(self, write: Callable[..., _T], *arguments: object) -> _T:
        """Write to a file system that may have stalled. A signal after the end of the job ends the wait.

        Raises:
            RunDirectoryError: The write was not done in time, or has failed.
        """
        writing = asyncio.wrap_future(self._files.submit(write, *arguments))
        hurry: asyncio.Future[Any] = asyncio.create_task(self._is_impatient.wait())
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
                result = await self._requeue_job(result, self._requeue)
            await self._in_time(self._write, result)  # last: all other files exist then
            result = dataclasses.replace(result, report=await self._in_time(self._write_report))
        except RunDirectoryError as error:  # a full or stalled disk does not change the outcome
            logger.error("%s", error)
        self._reporter.on_result(result)
        return result

    async def _requeue_job(self, result: Result, requeue: Requeue) -> Result:
        """Requeue the job if `Requeue.find_reason` allows it; Slurm then ends this process."""
        reason = await self._in_time(requeue.find_reason, result.outcome, result.run_directory)
        if reason is None:
            return result
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
        outcome = dataclasses.replace(
            result.outcome, exit_code=EXIT_REQUEUED, reason=f"{result.outcome.reason} It is requeued ({reason})."
        )
        requeued = dataclasses.replace(result, outcome=outcome, requeued=reason)
        await self._in_time(self._write, requeued)  # before Slurm may end this process
        return requeued if await in_thread(requeue.requeue) else result

    def _write(self, result: Result) -> None:
        try:
            self._run_directory.write_result(result.to_file())
        except RunDirectoryError as error:  # a full disk does not change the outcome
            logger.error("%s", error)

    def _write_report(self) -> Path | None:
        """Write the report, unless its size would delay the end of the job; return its path or None."""
        try:
            if self._run_directory.size_of_record() > _CHEAP_REPORT_BYTES:
                return None
            from tf4slurm.reports.report import make_report
            from tf4slurm.reports.summary import read_summary

            report = make_report(read_summary(self._run_directory)).encode("utf-8", "replace")
            return self._run_directory.write_report(report)
        except Exception as error:  # a report must never change the job's exit code
            logger.warning("there is no report.html: %s: %s", type(error).__name__, error)
            return None


def _load_report() -> None:
    from tf4slurm.reports.report import load_templates

    load_templates()


def _job_file(spec: JobSpec, facts: Mapping[str, Any]) -> JobFile:
    return JobFile(
        name=spec.name,
        command=spec.command,
        counts=spec.counts,
        grace_period_seconds=spec.grace_period_seconds,
        options=spec.to_json(),
        host=socket.gethostname(),
        directory=os.getcwd(),
        process=Process.of(os.getpid()),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        versions={"tf4slurm": __version__, "python": platform.python_version()},
        **facts,
    )
