"""Start, supervise and end the process of an agent's task."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import functools
import logging
import os
import signal
import time
from collections.abc import Mapping

from tf4slurm.agent.child_log import ChildLog
from tf4slurm.agent.child_setup import ChildSetup
from tf4slurm.agent.container import has_gpus
from tf4slurm.agent.gpu_usage import GpuUsage, watch_gpus
from tf4slurm.agent.metric_log import MetricLog
from tf4slurm.agent.port_handover import PortHandover
from tf4slurm.agent.probes import wait_until_unresponsive, watch_usage, watch_waits
from tf4slurm.agent.rendezvous import LocalTask, Rendezvous
from tf4slurm.agent.script_channel_server import ScriptChannelServer
from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.messages import ScriptState, Usage
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.errors import EXIT_TASK_LOST, Tf4SlurmError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import LastState
from tf4slurm.preload.client import Hold, NotPreloaded, Preloader, PreloaderAddress
from tf4slurm.roles import Role, role_of
from tf4slurm.slurm.slurmstepd import wait_for_slurmstepd_loss
from tf4slurm.system.child_process import Child, ForkRequest
from tf4slurm.system.guard import handle_stop_signals, watch_guard
from tf4slurm.system.oom_kills import OomKills, describe_kill, read_oom_kills
from tf4slurm.system.output import LineWriter
from tf4slurm.system.proc import adopt_orphans, kill_left_processes, read_stat, reap_orphans
from tf4slurm.system.threads import in_thread
from tf4slurm.system.variables import PRELOADER_VARIABLE, base_environment

logger = logging.getLogger(__name__)

_KILL_SECONDS = 2.0
_WRITE_SECONDS = 2.0
_DRAIN_SECONDS = 0.5
_LAST_MESSAGES_SECONDS = 0.05  # for the last messages of a script that has exited, before its exit is reported
_GUARD_LOST_SECONDS = 2.0  # from SIGTERM to SIGKILL
_CANNOT_START = 126  # also the exit code of exec_child.py


class TaskProcess(abc.ABC):
    """The process of an agent's task: the agent's child, or the script that started the agent (`sidecar.py`).

    `request_stop`, `kill_descendants` and `write_last_state` do nothing for a script that started the agent.
    """

    prints_errors = False
    """Whether the process prints the errors of its agent, so that the agent does not."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.channel = ScriptChannelServer(self._on_script_state, self._on_metrics)
        self._rendezvous = rendezvous
        self._client = rendezvous.client

    async def open(self) -> None:
        """Open the script channel. Call this before the agent registers."""
        await self.channel.open()

    @abc.abstractmethod
    async def wait_until_orphaned(self) -> int:
        """Wait until an event above the agent ends the agent. Return the agent's exit code.

        For an agent with a child, the event is the loss of the guard process above the agent. For a script that started
        the agent, it is the script's end, or a suspension (SIGSTOP) for longer than the heartbeat timeout.
        """

    @abc.abstractmethod
    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        """Start the child for the `start_count`-th time in this attempt, and report its state to the launcher.

        A script that started the agent runs already, and only receives the cluster.
        """

    def request_stop(self) -> None:  # noqa: B027
        """Send the stop signal to the child, once, if the launcher has requested a stop."""

    @abc.abstractmethod
    async def end(self, kill_wait_seconds: float) -> None:
        """Terminate the agent's child. Kill it if it still runs after `kill_wait_seconds`.

        A script that started the agent is not terminated: this method waits until the script ends.
        """

    async def on_launcher_loss(self) -> None:  # noqa: B027
        """Handle the loss of the launcher after the cluster has formed. The agent calls this before `end`.

        This method does nothing for an agent's child, which `end` terminates. For a script that started the agent, it
        calls the function that `CallingScript` received.
        """

    async def kill_descendants(self) -> None:  # noqa: B027
        """Kill the processes that the child has left behind."""

    async def write_last_state(self, cluster: Cluster) -> None:  # noqa: B027
        """Write the state of the child to the run directory, because the launcher is lost."""

    def _on_script_state(self, state: ScriptState) -> None:
        self._client.update_script(state)

    def _on_metrics(self, entry: StepMetrics) -> None:  # noqa: B027
        """Record metrics of the script. A sidecar records none, because its job has no report."""


class OwnedChild(TaskProcess):
    """The child process that the agent starts, restarts and terminates."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        environ: Mapping[str, str],
        run_directory: RunDirectory,
        writer: LineWriter,
    ) -> None:
        """`writer` receives the lines that the child prints, prefixed with the task's name."""
        super().__init__(rendezvous)
        self._setup = ChildSetup(environ, rendezvous.identity, rendezvous.spec, run_directory)
        self._run_directory = run_directory
        self._writer = writer
        self._spec = rendezvous.spec
        self._handover = PortHandover(self._spec.hold_ports)
        self._child: Child | None = None
        self._log: ChildLog | None = None  # of the last start
        self._orphan_seconds = 0.0  # processor time of orphans of the child that have ended
        self._gpu_usage = GpuUsage()
        self._metric_log: MetricLog | None = None  # of this attempt
        self._running: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None  # of the child that has exited
        self._slurmstepd_watch: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Future[None]] = set()
        self._guard_is_lost = asyncio.Event()
        self._was_stopped = False
        self._ignores_stop_signals = False
        self._sees_gpus = False
        self._is_ending = False
        self._fork: ForkRequest | None = None
        self._not_forked = ""  # why the next child is executed, or ""
        self._hold: Hold | None = None
        self._last_child: Child | None = None  # whose keeper may still run

    async def open(self) -> None:
        await super().open()
        adopt_orphans()
        loop = asyncio.get_running_loop()
        handle_stop_signals(loop, lambda name: self._client.update(stop_signal=name))
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        if not isinstance(self._rendezvous.identity, LocalTask):  # a local agent ends with the launcher
            watch_guard(loop, self._guard_is_lost.set)
            self._slurmstepd_watch = asyncio.create_task(self._watch_slurmstepd())
        self._fork = self._make_fork_request()

    def _make_fork_request(self) -> ForkRequest | None:
        """Return how children are forked: by the preloader of this host's tasks, or by one that is started here.

        Return None if they are executed.
        """
        if not self._spec.is_preloaded:
            return None
        environ = self._setup.environ
        try:
            if (text := environ.get(PRELOADER_VARIABLE)) is not None:
                address = PreloaderAddress.from_text(text)
                self._hold = Hold(address)
            else:
                address = Preloader(self._spec.command, base_environment(environ), has_own_group=False).address
        except (NotPreloaded, OSError, RuntimeError) as error:
            self._not_forked = str(error)
            self._log_not_preloaded(self._not_forked)
            return None
        return ForkRequest(address, self._spec.start_timeout_seconds)

    def _log_not_preloaded(self, why: str) -> None:
        level = logging.WARNING if self._spec.preload == "always" else logging.INFO
        logger.log(level, "rank %d: TensorFlow is not preloaded, because %s", self._rendezvous.rank, why)

    async def wait_until_orphaned(self) -> int:
        await self._guard_is_lost.wait()
        logger.error("rank %d: the process above this agent was killed", self._rendezvous.rank)
        await self.end(_GUARD_LOST_SECONDS)
        self._report(state="terminated", killed_by="guard", detail="the process above its agent was killed")
        return EXIT_TASK_LOST

    async def _watch_slurmstepd(self) -> None:
        """Report this task as terminated when its slurmstepd is lost. The agent then ends the child.

        Slurm does not end the tasks of a lost slurmstepd.
        """
        process_id = await wait_for_slurmstepd_loss()
        await self._wait_for_tail()
        detail = f"its slurmstepd (process {process_id}) was killed"
        self._report(state="terminated", killed_by="slurmstepd", detail=detail)

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        self._running = asyncio.create_task(self._run(cluster, attempt, start_count))

    def request_stop(self) -> None:
        """Send the stop signal to the child, once, if the launcher has requested a stop.

        It is not sent to a script that checks for stop requests, nor to a child that ignores stop signals: a ps, or a
        worker of a job with a chief.
        """
        if self._child is None or self._was_stopped or not self._client.desired.stop_reason:
            return
        self._was_stopped = True
        if not self._ignores_stop_signals and not self._client.observed.script.handles_stop:
            self._child.signal(signal.Signals[self._spec.stop_signal])

    async def end(self, kill_wait_seconds: float) -> None:
        """Terminate the child if it still runs, and finish its log and metrics.

        The exit code of a terminated child is not reported.
        """
        if self._running is not None:
            if self._child is not None and self._child.ended_at is not None:
                await asyncio.wait({self._running})  # the child exited before, which `_run` reports
            self._running.cancel()
        child = self._child
        if child is not None:
            self._is_ending = True
            await child.end(kill_wait_seconds)
            await child.wait()
            self._is_ending = False
            self._child = None
            self._report(killed_by="stop")
        await self._wait_for_tail()
        metric_log, self._metric_log = self._metric_log, None
        if metric_log is not None:
            await self.channel.drain(_DRAIN_SECONDS)
            await metric_log.close()

    async def kill_descendants(self) -> None:
        """Kill the processes that the child has left behind, and wait at most 2 s until they are gone."""
        # An earlier call that was cancelled may still run in its thread, and must not find the next child.
        self._killing = {each for each in self._killing if not each.done()}
        self._killing.add(in_thread(self._kill_left_processes))
        await asyncio.wait(self._killing, timeout=_KILL_SECONDS)

    def _kill_left_processes(self) -> None:
        child, self._last_child = self._last_child, None
        if child is not None:
            child.kill_left_processes()
        kill_left_processes(time.monotonic() + _KILL_SECONDS)

    async def write_last_state(self, cluster: Cluster) -> None:
        """Write the task's last state to the run directory.

        Wait at most 2 s, because the file system may have stalled.
        """
        observed = self._client.observed
        state = LastState(
            task=str(cluster.member(self._rendezvous.rank).task),
            time=round(time.time(), 3),
            attempt=observed.attempt,
            starts=observed.start_count,
            state="ended" if observed.state == "running" else observed.state,  # this agent has ended it
            returncode=observed.returncode,
        )
        done, _ = await asyncio.wait({in_thread(self._run_directory.write, state)}, timeout=_WRITE_SECONDS)
        for writing in done:
            if (error := writing.exception()) is not None:
                logger.warning("%s", error)

    # One start

    async def _run(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        """Start the child once, and supervise it to its end. A stalled file system delays only this coroutine."""
        _, task, _, address = cluster.member(self._rendezvous.rank)
        role = role_of(task.task_type, has_chief=cluster.has_chief)
        self._ignores_stop_signals, self._sees_gpus = not role.is_waited_for, role.sees_gpus
        has_server = role.is_in_cluster or role.is_server
        if self._metric_log is None:
            self._metric_log = MetricLog(self._run_directory, task, attempt, len(cluster.members))
        try:
            if start_count > 1:  # a process that the previous child has left may hold the port or a GPU
                await self.kill_descendants()
                await self._wait_for_tail()
            make_log = functools.partial(ChildLog, all_output=self._spec.all_output)
            log = await in_thread(make_log, self._run_directory.log(task, attempt), str(task), self._writer)
            environment = self._setup.make_environment(cluster, task, attempt, self.channel.name)
            command = await in_thread(self._setup.make_command, cluster, task, attempt)
            held = self._rendezvous.held_port if has_server else None
            self._handover.begin(held, releases_ports=self._client.desired.releases_ports)
            self._child = await Child.start(
                command,
                environment,
                log.write,
                ignores_stop_signals=self._ignores_stop_signals,
                name=str(task),
                fork=self._choose_fork(role),
            )
            self._last_child = self._child
        except (Tf4SlurmError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            returncode = getattr(error, "exit_code", _CANNOT_START)
            self._client.exited_at = time.monotonic()
            self._report(
                state="exited",
                start_count=start_count,
                returncode=returncode,
                killed_by=None,
                detail=None,
                tail=(str(error),),
                failure=ScriptFailure(type(error).__name__, str(error)),
            )
            return
        self._reap()  # orphans that have ended in the meantime
        self._client.exited_at = None
        self._report(
            state="running",
            start_count=start_count,
            process_id=self._child.process_id,
            is_forked=self._child.is_forked,
            not_forked=self._child.not_forked or self._not_forked,
            returncode=None,
            killed_by=None,
            detail=None,
            tail=(),
            failure=None,
            port_failure=None,
            script=ScriptState(),
            usage=Usage(),
            waits_for=(),
            has_server=False,
            printed_nothing=False,
        )
        self.request_stop()
        await self._supervise(self._child, log, address if has_server else None)

    def _choose_fork(self, role: Role) -> ForkRequest | None:
        """Return None if the child is executed: a program of tf4slurm, and by default one that has a GPU."""
        if self._fork is not None and role.sees_gpus and self._spec.preload != "always" and has_gpus():
            self._not_forked = "the task has a GPU"
            return None
        return None if role.program else self._fork

    async def _supervise(self, child: Child, log: ChildLog, address: Address | None) -> None:
        """Wait for the child's exit, and report it. `_finish_log` then reports the child's last lines.

        The exit is reported at once, except for two kinds of failure: that of a second or later start before its server
        ran, and one whose cause is the port. These are reported together with their last lines.

        A child that fails its liveness probe is killed. `address` is that of the child's server, or None if it has no
        server.
        """
        spec, must_serve = self._spec, self._spec.stall_timeout_seconds is not None and address is not None
        limits = (spec.unresponsive_seconds, spec.start_timeout_seconds if must_serve else None)
        port = address.port if address is not None else None
        self._log, self._orphan_seconds, self._gpu_usage = log, 0.0, GpuUsage()
        num_oom_kills = read_oom_kills()
        exiting = asyncio.create_task(child.wait_for_exit())
        probe = asyncio.create_task(wait_until_unresponsive(child.process_id, address, *limits, self._on_server))
        usage = watch_usage(child.process_id, child.parent_id, port, self._on_usage, spec.num_tasks, self._read_orphans)
        restricting = self._handover.restrict(child.process_id, is_forked=child.is_forked)
        watches = (usage, watch_waits(log.waited_tasks, self._on_waits), restricting)
        watching = [asyncio.create_task(watch) for watch in watches]
        if self._sees_gpus:
            watching.append(asyncio.create_task(watch_gpus(child.process_id, self._on_gpu_usage)))
        try:
            await asyncio.wait({exiting, probe}, return_when=asyncio.FIRST_COMPLETED)
            detail = probe.result() if probe.done() and not exiting.done() else None
            if detail is not None:
                child.signal(signal.SIGKILL)
            returncode = await exiting
        finally:
            for task in (probe, exiting, *watching):
                task.cancel()
            self._handover.end()
        await self.channel.drain(_LAST_MESSAGES_SECONDS)
        self._child, self._client.exited_at = None, child.ended_at
        if child.not_forked:
            self._log_not_preloaded(child.not_forked)
        killed_by = "liveness_probe" if detail is not None else None
        exit_report = {"state": "exited", "returncode": returncode, "killed_by": killed_by, "detail": detail}
        exit_report |= {"waits_for": (), "is_forked": child.is_forked}
        exit_report["not_forked"] = child.not_forked or self._not_forked
        observed = self._client.observed
        # The launcher compares the failure of a second start with that of the first before it allows a third. After the
        # loss of a port it begins on other ports.
        is_compared = observed.start_count > 1 and not observed.has_server
        waits_for_failure = returncode != 0 and (is_compared or await self._has_lost_port(child, log))
        if not waits_for_failure:
            self._report(**exit_report)
            exit_report = {}
        self._draining = asyncio.create_task(self._finish_log(child, log, returncode, num_oom_kills, exit_report))
        if waits_for_failure:
            await self._wait_for_tail()

    async def _has_lost_port(self, child: Child, log: ChildLog) -> bool:
        """Return whether the server of a child that has failed could not listen, by what the child has printed."""
        if not self._handover.may_fail:
            return False
        await child.wait_for_printed()
        return self._handover.find_failure(log.last_lines) is not None

    async def _finish_log(
        self,
        child: Child,
        log: ChildLog,
        returncode: int,
        num_oom_kills: OomKills | None,
        exit_report: Mapping[str, object],
    ) -> None:
        """Wait at most 0.5 s for the remaining output of a child that has exited.

        If the child has failed, report its last lines and what ended it, together with `exit_report`. If it has
        succeeded without any output, report that. `num_oom_kills` is from the start of the child.
        """
        await child.wait()
        tail = log.close()
        if returncode:
            try:
                failure = await in_thread(log.find_failure, returncode)
            except Exception as error:  # the exit must be reported, whatever the output contains
                logger.warning("what ended the script is unknown: %s: %s", type(error).__name__, error)
                failure = ScriptFailure(f"exit code {returncode}")
            if returncode == -signal.SIGKILL and not failure.message:
                failure = dataclasses.replace(failure, message=describe_kill(num_oom_kills))
            port_failure = self._handover.find_failure((*tail, failure.message))
            self._report(**exit_report, tail=tail, failure=failure, port_failure=port_failure, printed_nothing=False)
        elif not tail:
            self._report(tail=tail, printed_nothing=True)

    async def _wait_for_tail(self) -> None:
        """Wait until `_finish_log` has reported the last lines of the child that has exited, at most 0.5 s."""
        if self._draining is not None:
            await asyncio.wait({self._draining})

    def _read_orphans(self) -> float:
        """Return the processor time in seconds of orphans of the child that have ended."""
        if self._child is None or self._child.parent_id == os.getpid():
            return self._orphan_seconds
        return read_stat(self._child.parent_id).cpu_ticks / os.sysconf("SC_CLK_TCK")  # its keeper has reaped them

    def _report(self, **changes: object) -> None:
        if self._client.observed.state != "terminated":  # the last state
            self._client.update(**changes)

    def _on_metrics(self, entry: StepMetrics) -> None:
        if self._metric_log is not None:
            self._metric_log.add(entry)

    def _on_usage(self, usage: Usage) -> None:
        percent, memory = self._gpu_usage
        usage = dataclasses.replace(usage, gpu_percent=percent, gpu_memory_bytes=memory)
        if self._log is not None:
            printed, sessions = self._log.num_printed, self._log.num_sessions
            usage = dataclasses.replace(usage, num_printed=printed, num_sessions=sessions)
        self._client.update_usage(usage)

    def _on_waits(self, names: tuple[str, ...]) -> None:
        self._client.update(waits_for=names)

    def _on_gpu_usage(self, usage: GpuUsage) -> None:
        self._gpu_usage = usage  # sent with the next `Usage`

    def _on_server(self) -> None:
        self._client.update(has_server=True)

    def _on_script_state(self, state: ScriptState) -> None:
        if self._is_ending and state.stop_signal == "SIGTERM" and self._child is not None:
            self._child.signal(signal.SIGKILL)  # the script caught the agent's SIGTERM and will not end
            state = dataclasses.replace(state, stop_signal=None)
        if state.step != self._client.observed.script.step and self._log is not None:
            self._log.waited_tasks.clear()
        super()._on_script_state(state)

    def _reap(self) -> None:
        if self._child is not None:  # before the child's id is known, this could reap the child itself
            self._orphan_seconds += reap_orphans(self._child.process_id)
