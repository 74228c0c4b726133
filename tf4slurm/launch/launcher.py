"""The launcher of a job: it starts the agents, follows the job to its end, and records its events and result."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf4slurm import __version__
from tf4slurm.agent.rendezvous import spec_to_environ
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.control.records import Outcome, Phase
from tf4slurm.control.rules import StopRequest, stop_request_of
from tf4slurm.errors import (
    EXIT_NO_PROGRESS,
    EXIT_PREFLIGHT,
    EXIT_TASK_LOST,
    FAILED,
    REQUEUED,
    STOPPED,
    LaunchError,
    RunDirectoryError,
    describe_end,
)
from tf4slurm.jobs.failures import find_slurm_kill
from tf4slurm.jobs.recorder import EventLog, Recorder
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, ResultFile
from tf4slurm.jobs.worker_jobs import end_worker_jobs
from tf4slurm.launch.hosting import close_service, make_service, start_service, wait_for_late_tasks, write_control
from tf4slurm.launch.patience import PatientWriter
from tf4slurm.launch.requeue import BY_SLURM, Requeue, mark_requeued
from tf4slurm.launch.result_files import Result, load_report, make_result_file, save_result, write_report
from tf4slurm.launch.suspension import handle_suspension
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.roles import can_grow
from tf4slurm.slurm.commands import query_resources
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.slurmstepd import wait_for_slurmstepd_loss
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS
from tf4slurm.system.proc import adopt_orphans
from tf4slurm.system.threads import in_thread
from tf4slurm.system.versions import read_commit, read_versions

if TYPE_CHECKING:
    from tf4slurm.launch.spawners import Spawner

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0
_LOAD_SECONDS = 3.0
_PUBLISH_POLL_SECONDS = 1.0
_STARTER_POLL_SECONDS = 0.5
_END_JOBS_SECONDS = 15.0  # for Slurm's programs too


class Launcher:
    """Runs one job to its end, in a process of its own or in the process of rank 0's agent."""

    def __init__(
        self,
        spec: JobSpec,
        spawner: Spawner,
        run_directory: RunDirectory,
        terminal: TerminalOutput,
        requeue: Requeue | None = None,
        *,
        job_id: str | None = None,
        arguments: Sequence[str] = (),
        node: str | None = None,
        step: str | None = None,
        starter_id: int | None = None,
        has_person: bool = True,
    ) -> None:
        """Create the launcher.

        Args:
            requeue: Decides whether a stopped job is requeued, and requeues it. None for a job that is never requeued.
            job_id: Slurm's job id. None for a local job.
            arguments: The command line of this process, which job.json records.
            node: Slurm's name of this node if the launcher is in the process of a task's agent, else None.
            step: Slurm's id of the step, such as "4711.0", if the launcher is in the process of a task's agent.
            starter_id: Process id of the parent, if it is a program that will join the job as its external chief.
            has_person: See `rules.stop_request_of`.
        """
        self._spec = spec
        self._spawner = spawner
        self._run_directory = run_directory
        self._terminal = terminal
        self._requeue = requeue
        self._job_id = job_id
        self._arguments = tuple(arguments)
        self._node = node
        self._step = step
        self._starter_id = starter_id
        self._has_person = has_person
        self._writer = PatientWriter(run_directory)
        self._service = make_service(spec, spec.counts, self._on_event)
        self._clock = self._service.clock
        self._events = EventLog(run_directory.events, self._clock, self._writer.thread)
        self._state = self._service.state
        self._started_at = self._clock.now()
        self._recorder = Recorder(run_directory, self._state, self._clock, self._writer.thread)

    @property
    def leaves_step_running(self) -> bool:
        """Whether the step may go on after the job, so that the caller must cancel it.

        This is so if a connected agent has not reported that it has terminated, or if Slurm may not notice the end of a
        task.
        """
        return any(
            record.is_hidden_from_slurm
            or (record.has_registered and record.is_connected and record.observed.state != "terminated")
            for record in self._state.tasks.members
        )

    async def run(self) -> Result:
        """Run the job to its end. Return the result. After an exception, LAUNCHER_SIGNALS are blocked."""
        try:
            return await self._run()
        except BaseException:
            signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)  # until the caller has written the result
            raise

    async def _run(self) -> Result:
        adopt_orphans()
        watches = [asyncio.create_task(self._recorder.run())]
        if not self._spawner.is_external:
            self._take_signals()
            watches.append(asyncio.create_task(self._watch_slurmstepd()))  # else this process's agent watches it
        if self._starter_id is not None:
            watches.append(asyncio.create_task(self._watch_starter(self._starter_id)))
        self._start_threads()
        try:
            await self._writer.call(self._write_job)
            self._terminal.on_run_directory(self._run_directory)
            if self._requeue is not None and (obstacle := await in_thread(self._requeue.find_obstacle)) is not None:
                logger.warning("%s", obstacle)
            await self._run_tasks()
        finally:
            for watch in watches:
                watch.cancel()
            try:
                await self._spawner.close(_CLOSE_SECONDS)
            finally:
                await close_service(self._service, self._run_directory, self._writer.thread)
        return await self._conclude()

    def _start_threads(self) -> None:
        """Start daemon threads that import the report's modules and, on Slurm, write slurm.json.

        The launcher does not wait for these threads, because slurmctld or the file system may be slow.
        """
        # Loading during training does not delay the end of the job.
        loading = threading.Thread(target=load_report, daemon=True)
        asyncio.get_running_loop().call_later(_LOAD_SECONDS, loading.start)
        if self._job_id is not None:
            threading.Thread(target=self._write_resources, args=(self._job_id,), daemon=True).start()

    async def _run_tasks(self) -> None:
        """Start the control service and the agents, and wait for the end of the job."""
        endpoint = await start_service(self._service, self._node, is_local=self._spawner.is_local)
        ending = asyncio.create_task(self._service.wait_for_end())
        publishing = asyncio.create_task(self._publish_control(endpoint))  # staging may take longer than `join` waits
        try:
            await self._start_tasks(endpoint, ending)
            await ending
            if self._spawner.is_external:
                await wait_for_late_tasks(self._service)
        finally:
            publishing.cancel()

    async def _start_tasks(self, endpoint: ControlEndpoint, ending: asyncio.Task[None]) -> None:
        """Start the agents. If srun has started them already, only write control.json, in which they find the service.

        `ending` is done when the job has ended. If this happens during the start of the agents, the start is cancelled.
        """
        if self._spawner.is_external:
            await self._writer.call(write_control, endpoint, self._run_directory)
        elif self._state.outcome is None:
            environment = {**endpoint.to_environ(), **spec_to_environ(self._spec, self._run_directory.path)}
            starting = asyncio.create_task(self._spawner.start(environment, self))
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            starting.cancel()

    # Calls of the spawner

    def on_staging(self, text: str | None) -> None:
        self._state.postpone_start(self._clock.now() if text is None else math.inf)
        if text is not None:
            self._on_event("staging", None, text)

    def on_output(self, line: str) -> None:
        self._terminal.on_output(line)

    def on_agent_exit(self, rank: int, returncode: int) -> None:
        self._service.receiver.on_agent_exit(rank, returncode, self._clock.now())
        self._service.publish()

    def on_all_exit(self, returncode: int, message: str) -> None:
        end = f"it {describe_end(returncode)}." + (f" Its last output:\n{message}" if message else "")
        failure = find_slurm_kill(message.splitlines())
        if self._state.tasks.count("running", "exited", "ready", "registered", "terminated"):
            outcome = Outcome(EXIT_TASK_LOST, f"srun ended before the job did: {end}", failure=failure)
        else:
            outcome = Outcome(EXIT_PREFLIGHT, f"srun could not start the tasks: {end}", failure=failure)
            if returncode == 128 + signal.SIGTERM:  # at a preemption, Slurm signals only the step
                self._stop(signal.SIGTERM, "the step received SIGTERM while its tasks started")
        self._state.on_spawner_exit(outcome, self._clock.now())
        self._service.publish()

    # Stop requests

    def _take_signals(self) -> None:
        """Start to handle stop signals. The caller has blocked them, so those that came earlier are handled now."""
        for number in LAUNCHER_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a background process of a shell script
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)
        is_local, others = self._spawner.is_local, self._spawner.others
        handle_suspension(self._spec.launcher_loss_seconds, is_local=is_local, others=others)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._state.phase is Phase.ENDED:
            self._writer.is_impatient.set()
        request = stop_request_of(number, has_person=self._has_person)
        self._stop(number, f"the launcher received {signal.Signals(number).name}", request)

    async def _watch_slurmstepd(self) -> None:
        """Stop the job when the slurmstepd of the batch script is killed, because Slurm then does not stop the job."""
        process_id = await wait_for_slurmstepd_loss()
        advice = f" (Slurm may keep the job: scancel {self._job_id})" if self._job_id is not None else ""
        self._stop(signal.SIGHUP, f"the slurmstepd above the launcher (process {process_id}) was killed{advice}")

    async def _watch_starter(self, process_id: int) -> None:
        """End the job if the process that has started it ends before a chief has registered."""
        while (chief := self._state.tasks.chief) is not None and not chief.has_registered:
            if os.getppid() != process_id:
                reason = f"Process {process_id}, which has started the cluster, has ended before it was the chief."
                self._state.decide(Outcome(EXIT_TASK_LOST, reason, chief.task))
                self._service.publish()
                return
            await asyncio.sleep(_STARTER_POLL_SECONDS)

    def _stop(self, number: int, why: str, request: StopRequest = StopRequest.SIGNAL) -> None:
        self._state.on_stop(signal.Signals(number), why, self._clock.now(), request)
        self._service.publish()

    # Files of the run directory

    def _on_event(self, kind: str, task: str | None, text: str, **facts: Any) -> None:
        self._terminal.on_event(self._events.add(kind, task, text, **facts), self._state)
        if kind == Phase.STOPPING.value:
            self._recorder.write()  # at once: `tf4slurm cancel` reads the time that is left there
        if kind == Phase.TRAINING.value and self._state.attempt == 1:  # beside the script's import of TensorFlow
            threading.Thread(target=self._add_versions, daemon=True).start()

    def _write_job(self) -> None:
        spec = self._spec
        self._job = JobFile(
            name=spec.name,
            job_id=self._job_id,
            step=self._step,
            command=spec.command,
            arguments=self._arguments,
            directory=os.getcwd(),
            labels=spec.labels,
            counts=spec.counts,
            grace_period_seconds=spec.grace_period_seconds,
            options=spec.to_json(),
            process=Process.of(os.getpid()),
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            versions={"tf4slurm": __version__},
        )
        self._run_directory.write(self._job)

    def _add_versions(self) -> None:
        """Add the versions of the script's software and the git commit to job.json."""
        versions = {**self._job.versions, **read_versions(self._spec.script_python)}
        commit = read_commit(Path.cwd())
        job = dataclasses.replace(self._job, versions=versions)
        if commit is not None:
            job = dataclasses.replace(job, commit=commit.name, is_dirty=commit.is_dirty)
        try:
            self._run_directory.write(job)
        except RunDirectoryError as error:
            logger.info("job.json has no versions: %s", error)

    async def _publish_control(self, endpoint: ControlEndpoint) -> None:
        """Write control.json: at once for an external chief, else when `grow` or `join` is called, for joined workers.

        Return at once if no worker can join this job, or if the job has control.json already, because srun has started
        its tasks.
        """
        if self._spawner.is_external or not can_grow(self._spec.counts):
            return
        has_failed = False
        while True:
            is_wanted = self._spec.external_chief or await asyncio.wrap_future(
                self._writer.thread.submit(self._run_directory.has_worker_arrays)
            )
            if is_wanted:
                try:
                    return await self._writer.call(write_control, endpoint, self._run_directory)
                except RunDirectoryError as error:
                    if not has_failed:
                        logger.warning("no other process can join this job yet: %s", error)
                    has_failed = True
            await asyncio.sleep(_PUBLISH_POLL_SECONDS)

    async def _end_worker_jobs(self) -> None:
        """Cancel the Slurm jobs that add workers to this job, also those that were submitted before a requeue.

        Wait at most 15 s.
        """
        if self._job_id is None or not can_grow(self._spec.counts):
            return
        path = self._run_directory.path
        name = path.name if self._spawner.is_external else f"{self._spec.name}-{self._job_id}"
        ending: asyncio.Future[Any] = in_thread(end_worker_jobs, KnownJob(self._job_id, name, str(path.parent)))
        # A signal does not end this wait, because Slurm sends some to a job that was requeued.
        await asyncio.wait({ending}, timeout=_END_JOBS_SECONDS)

    def _write_resources(self, job_id: str) -> None:
        """Write the allocation to slurm.json, because Slurm forgets a job a few minutes after its end."""
        try:
            self._run_directory.write(query_resources(JobId.parse(job_id)))
        except (LaunchError, RunDirectoryError) as error:
            logger.info("slurm.json is not written: %s", error)

    async def _conclude(self) -> Result:
        """Requeue the job if necessary, write the result and the report, then end the Slurm jobs of joined workers."""
        assert self._state.phase is Phase.ENDED
        for text in self._state.watches.check_at_end(self._state.tasks.members).warnings:
            self._on_event("warning", None, text)
        directory = self._run_directory
        report = None
        file = make_result_file(self._state, directory, self._started_at, self._clock.now())
        self._recorder.write()
        self._events.close()
        try:
            if self._requeue is not None:
                file = await self._requeue_job(file, self._requeue)
            await self._writer.call(save_result, file, directory)  # last: all other files exist then
            report = await self._writer.call(write_report, directory)
        except RunDirectoryError as error:  # a full or stalled disk does not change the outcome
            logger.error("%s", error)
        result = Result(file, directory, report)
        self._terminal.on_result(result)
        await self._end_worker_jobs()
        return result

    async def _requeue_job(self, file: ResultFile, requeue: Requeue) -> ResultFile:
        """Requeue the job if necessary, or else forbid Slurm to do so. Return the new content of result.json.

        `file` is the content without a requeue.
        """
        if file.state == STOPPED:
            file = await self._requeue_stopped_job(file, requeue)
        if file.state != REQUEUED and await in_thread(requeue.end):
            file = mark_requeued(file, BY_SLURM)
        return file

    async def _requeue_stopped_job(self, file: ResultFile, requeue: Requeue) -> ResultFile:
        """Requeue the job if `Requeue.find_reason` returns a reason. Return the new content of result.json.

        A job whose last two runs had no new step is not requeued at its time
        limit, and its result is a failure. If Slurm accepts the request, Slurm ends this process.
        """
        reason = await self._writer.call(requeue.find_reason, file.exit_code, self._run_directory)
        if reason is None:
            return file
        if reason == "time limit":  # a preempted run may not have had the time for a step
            progress = await self._writer.call(requeue.progress_of_runs, self._run_directory, file.furthest_step)
            if progress.is_stuck:
                text = f"{file.reason} The job is not requeued. {progress}"
                return dataclasses.replace(file, state=FAILED, exit_code=EXIT_NO_PROGRESS, reason=text)
        requeued = mark_requeued(file, reason)
        if reason == BY_SLURM:
            return requeued
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)  # Slurm sends them to end this process
        await self._writer.call(save_result, requeued, self._run_directory)  # before Slurm may end this process
        # Not in `PatientWriter.call`: Slurm's signal after its answer would end that wait.
        return requeued if await in_thread(requeue.requeue, self._state.excluded_nodes) else file
