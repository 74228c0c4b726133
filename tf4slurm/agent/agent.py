"""One task's agent: owns its child process, does what the launcher says, and ends its child when the launcher is gone.

It never imports TensorFlow, so it cannot hang in TensorFlow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from tf4slurm.agent.bootstrap import ControlEndpoint, read_place, settings_from_environ
from tf4slurm.agent.liveness import wait_for_silence
from tf4slurm.agent.log_tail import LastLines
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.agent.script_channel import ScriptChannelServer
from tf4slurm.agent.usage import watch_usage
from tf4slurm.cluster import Address, Cluster, Task
from tf4slurm.control.messages import ScriptState, Usage
from tf4slurm.control.outcome import exit_code_of
from tf4slurm.errors import (
    EXIT_TASK_LOST,
    PlacementError,
    RendezvousClosedError,
    RendezvousError,
    RunDirectoryError,
    Tf4SlurmError,
)
from tf4slurm.jobs.run_directory import TIMES_SUFFIX, RunDirectory, open_to_append
from tf4slurm.jobs.schema import LastState
from tf4slurm.network.reachability import bypass_proxies
from tf4slurm.placeholders import fill_in
from tf4slurm.roles import Role, role_of
from tf4slurm.slurm.gpus import gpu_environ, hidden_gpus
from tf4slurm.slurm.slurmstepd import wait_for_slurmstepd_loss
from tf4slurm.slurm.step import SlurmStep
from tf4slurm.system.background import in_thread
from tf4slurm.system.child_process import Child, adopt_orphans, kill_descendants, reap_orphans
from tf4slurm.system.guard import GUARD_LOST
from tf4slurm.system.output import LineSplitter, LineWriter
from tf4slurm.system.program import run_program
from tf4slurm.system.variables import (
    AGENT_VARIABLES,
    ATTEMPT_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    SCRIPT_CHANNEL_VARIABLE,
    SERVICES_VARIABLE,
    TASK_VARIABLE,
)

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What asks the whole job to save and stop, to whichever of its processes it is sent."""

_HOME = Path(__file__).parents[1]
_TIMES_SECONDS = 1.0
_GOODBYE_SECONDS = 2.0
_KILL_SECONDS = 2.0
_CANNOT_START = 126  # as exec_child.py exits
_PAGES_OF_A_VARIABLE = 32  # linux/binfmts.h: MAX_ARG_STRLEN
_ORPHAN_SECONDS = 2.0  # from SIGTERM to SIGKILL for the child of an agent without a launcher
# gRPC doubles its pauses from 1 s to 2 min: a worker that is back, or a ps that is late, would wait for the chief's.
_QUICK_RECONNECTION = "grpc.initial_reconnect_backoff_ms=100,grpc.max_reconnect_backoff_ms=500"


class Agent:
    """The life of one task, from its registration to its leave."""

    def __init__(
        self, command: Sequence[str], join: Rendezvous, environ: Mapping[str, str], writer: LineWriter
    ) -> None:
        """`writer` gets the child's output, each line with the task's name before it."""
        self._command = command
        self._join = join
        self._client = join.client
        self._environ = environ
        self._writer = writer
        self._child: Child | None = None
        self._running: asyncio.Task[None] | None = None
        self._line = ScriptChannelServer(self._on_script_report)
        self._was_told_to_stop = False
        self._is_ending_child = False
        self._guard_is_lost = asyncio.Event()
        self.has_lost_launcher = False

    @property
    def has_left(self) -> bool:
        """Whether the launcher told this task to leave, after it had taken part."""
        return self._client.observed.state == "terminated" and self._join.failure is None

    async def run(self, run_directory: RunDirectory) -> int:
        """Live the task's life; return the exit code of this process.

        That is 0 if the child ended well or was told to, the child's own exit code if it failed, and that of the error
        if this task could not take part or lost its launcher.
        """
        adopt_orphans()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        if isinstance(self._join.place, SlurmStep):  # a local agent has no guard
            asyncio.get_running_loop().add_signal_handler(GUARD_LOST, self._guard_is_lost.set)
        await self._line.open()
        member = asyncio.create_task(self._client.run())
        obedience = asyncio.create_task(self._obey(run_directory))
        guard_loss = asyncio.create_task(self._guard_is_lost.wait())
        slurmstepd_watch = asyncio.create_task(self._watch_slurmstepd())
        try:
            await asyncio.wait({member, obedience, guard_loss}, return_when=asyncio.FIRST_COMPLETED)
            if guard_loss.done():
                logger.error("%s: the process above this agent was killed", self._name)
                return EXIT_TASK_LOST
            if obedience.done():
                obedience.result()
                await asyncio.wait({member}, timeout=_GOODBYE_SECONDS)
                return self._exit_code()
            member.result()
            return self._exit_code()
        except RendezvousError as error:
            logger.error("%s: %s", self._name, error)
            self.has_lost_launcher = not isinstance(error, RendezvousClosedError)
            return EXIT_TASK_LOST if self._client.cluster else error.exit_code
        finally:
            guard_loss.cancel()
            slurmstepd_watch.cancel()
            obedience.cancel()
            member.cancel()
            await self._end_child(_ORPHAN_SECONDS)
            self._line.close()
            await asyncio.wait({in_thread(kill_descendants)}, timeout=_KILL_SECONDS)
            if self.has_lost_launcher and self._client.cluster:
                await self._write_last_state(run_directory, self._client.cluster)

    async def _watch_slurmstepd(self) -> None:
        """Leave once the slurmstepd of this task's step is killed: Slurm does not end the task then. Cancel this."""
        if isinstance(self._join.place, SlurmStep):  # a local agent ends with its launcher, which saves first
            process_id = await wait_for_slurmstepd_loss()
            self._client.update(state="terminated", detail=f"its slurmstepd (process {process_id}) was killed")

    async def _obey(self, run_directory: RunDirectory) -> None:
        """Do what the launcher's latest order says, attempt by attempt, until that is to leave."""
        while True:
            cluster = await self._join.wait_for_cluster()
            if cluster is not None:
                await self._train(cluster, run_directory)
            order = self._client.desired
            await self._end_child(order.kill_wait_seconds)
            if order.terminate:
                self._client.update(state="terminated")
                return
            await in_thread(kill_descendants)  # what the child left behind may hold its port, or its GPU
            self._line.disconnect()
            await self._join.begin_attempt(order.attempt)

    async def _train(self, cluster: Cluster, run_directory: RunDirectory) -> None:
        """Have the child started as often as the launcher says, and tell it what it may know, in one attempt."""
        attempt, starts = self._client.observed.attempt, self._client.observed.starts
        while (order := self._client.desired).attempt == attempt and not order.terminate:
            if order.starts > starts:
                starts += 1
                self._line.disconnect()
                self._running = asyncio.create_task(self._run_child(cluster, attempt, starts, run_directory))
            self._line.tell(order)
            self._tell_to_stop(cluster)
            await self._client.wait_for_change()

    def _tell_to_stop(self, cluster: Cluster) -> None:
        """Signal the child once if the job is to stop, unless its script asks by itself."""
        if self._child is None or self._was_told_to_stop or not self._client.desired.stop_reason:
            return
        self._was_told_to_stop = True
        role = role_of(cluster.members[self._join.place.rank].task.task_type, has_chief=cluster.has_chief)
        if role.is_waited_for and not self._client.observed.script.handles_stop:
            self._child.signal(self._join.settings.stop_signal)

    # The child

    async def _run_child(self, cluster: Cluster, attempt: int, starts: int, run_directory: RunDirectory) -> None:
        """Start the child and watch it to its end; while a file system holds up its start, the launcher is obeyed."""
        task = cluster.members[self._join.place.rank].task
        role = role_of(task.task_type, has_chief=cluster.has_chief)
        try:
            log = await in_thread(_ChildLog, run_directory.log(task, attempt), str(task), self._writer)
            environment = self._child_environment(cluster, task, attempt)
            command = self._command_of(role, cluster, task, run_directory.work(task, attempt))
            self._child = await Child.start(command, environment, log.write, is_shielded=not role.is_waited_for)
        except (Tf4SlurmError, OSError, RuntimeError) as error:  # the last: no thread can be started
            returncode = getattr(error, "exit_code", _CANNOT_START)
            self._client.update(state="exited", starts=starts, returncode=returncode, tail=(str(error),))
            return
        self._reap()  # what has ended meanwhile
        self._client.update(
            state="running",
            starts=starts,
            process_id=self._child.process_id,
            returncode=None,
            detail=None,
            tail=(),
            script=ScriptState(),
            usage=Usage(),
            has_server=False,
        )
        has_server = role.is_in_cluster or role.serves
        address = cluster.members[self._join.place.rank].address if has_server else None
        self._tell_to_stop(cluster)
        in_thread(importlib.import_module, "psutil")  # for `kill_descendants`, which waits for no file system then
        await self._watch_child(self._child, log, address)

    def _command_of(self, role: Role, cluster: Cluster, task: Task, directory: Path) -> Sequence[str]:
        """Return what the child runs; a program of ours is started by its path: that Python need not have tf4slurm."""
        if not role.program:
            return fill_in(self._command, cluster.to_dictionary(), task)
        return (self._join.settings.python, str(_HOME / role.program), str(directory))

    def _child_environment(self, cluster: Cluster, task: Task, attempt: int) -> dict[str, str]:
        """Return the environment of a child: ours, its place in the cluster, its GPUs, nothing of the job's secret."""
        result = {name: value for name, value in self._environ.items() if name not in AGENT_VARIABLES}
        result["TF_CONFIG"] = _check_length(cluster.to_tf_config(task), len(cluster.members))
        result["TF_GRPC_REUSE_PORT"] = "true"  # the agent holds the port: TensorFlow's server listens beside it
        result[TASK_VARIABLE] = str(task)
        result[ATTEMPT_VARIABLE] = str(attempt)
        result[RUN_DIRECTORY_VARIABLE] = self._join.settings.run_directory
        result[SCRIPT_CHANNEL_VARIABLE] = self._line.name
        result[SERVICES_VARIABLE] = json.dumps(cluster.to_services())
        result.setdefault("PYTHONUNBUFFERED", "1")
        result.setdefault("TF_GRPC_DEFAULT_OPTIONS", _QUICK_RECONNECTION)
        result.update(self._gpu_environ(cluster, task))
        result.update(bypass_proxies(result, (member.address.host for member in cluster.members)))
        return result

    def _gpu_environ(self, cluster: Cluster, task: Task) -> dict[str, str]:
        place, has_chief = self._join.place, cluster.has_chief
        if not isinstance(place, SlurmStep):
            return {} if role_of(task.task_type, has_chief=has_chief).sees_gpus else hidden_gpus()
        here = [member for member in cluster.members if member.node == place.node_name]
        sees_gpus = [role_of(member.task.task_type, has_chief=has_chief).sees_gpus for member in here]
        return gpu_environ(place, sees_gpus, self._join.settings.gpus_per_worker)

    async def _watch_child(self, child: Child, log: _ChildLog, address: Address | None) -> None:
        """Tell of the child's end; a child that counts as dead is ended first."""
        ending = asyncio.create_task(child.wait())
        heartbeat_timeout, serve = self._join.settings.heartbeat_timeout_seconds, self._join.settings.serve_seconds
        serve_seconds = serve if address is not None else None
        judging = wait_for_silence(child.process_id, address, heartbeat_timeout, serve_seconds, self._note_server)
        silence = asyncio.create_task(judging)
        port = address.port if address is not None else None
        num_tasks = self._join.settings.num_tasks
        usage = asyncio.create_task(watch_usage(child.process_id, port, self._client.update_usage, num_tasks))
        try:
            await asyncio.wait({ending, silence}, return_when=asyncio.FIRST_COMPLETED)
            detail = silence.result() if silence.done() and not ending.done() else None
            if detail is not None:
                child.signal(signal.SIGKILL)
            returncode = await ending
        finally:
            silence.cancel()
            usage.cancel()
            ending.cancel()
        self._child = None
        tail = log.close()
        self._client.update(state="exited", returncode=returncode, detail=detail, tail=() if returncode == 0 else tail)

    def _note_server(self) -> None:
        self._client.update(has_server=True)

    async def _end_child(self, grace_period_seconds: float) -> None:
        """End the child if it still runs. What it exits with then is our doing, and not reported as its failure."""
        if self._running is not None:
            self._running.cancel()
        child = self._child
        if child is not None:
            self._is_ending_child = True
            await child.end(grace_period_seconds)
            await child.wait()
            self._is_ending_child = False
            self._child = None

    async def _write_last_state(self, run_directory: RunDirectory, cluster: Cluster) -> None:
        """Write down where this task stood, for readers of a job whose launcher is gone; give a slow disk 2 s."""
        task, status = cluster.members[self._join.place.rank].task, self._client.observed
        state = LastState(
            task=str(task),
            time=round(time.time(), 3),
            attempt=status.attempt,
            starts=status.starts,
            state="ended" if status.state == "running" else status.state,  # by this agent
            returncode=status.returncode,
        )

        def write() -> None:
            try:
                run_directory.write_last_state(state)
            except RunDirectoryError as error:
                logger.warning("%s", error)

        await asyncio.wait({in_thread(write)}, timeout=_GOODBYE_SECONDS)

    # What the launcher hears

    def _reap(self) -> None:
        if self._child is not None:  # else our own child may be among them, between its start and our knowing it
            reap_orphans(self._child.process_id)

    def _on_script_report(self, report: ScriptState) -> None:
        if self._is_ending_child and report.stop_signal == "SIGTERM" and self._child is not None:
            self._child.signal(signal.SIGKILL)  # it passes the agent's SIGTERM on, so it would not end by it
            report = dataclasses.replace(report, stop_signal=None)
        self._client.update_script(report)

    def _on_signal(self, number: signal.Signals) -> None:
        self._client.update(stop_signal=signal.Signals(number).name)

    def _exit_code(self) -> int:
        if self._join.failure is not None:
            return getattr(self._join.failure, "exit_code", 1)
        return exit_code_of(self._client.observed.returncode or 0)

    @property
    def _name(self) -> str:
        rank = self._join.place.rank
        return str(self._client.cluster.members[rank].task) if self._client.cluster else f"rank {rank}"


def run_agent(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Be the agent that a launcher started with this environment; return the exit code of the process.

    Raises:
        SlurmEnvironmentError: The environment does not tell which task this is.
    """
    place = read_place(environ)
    service = ControlEndpoint.from_environ(environ, place)
    settings = settings_from_environ(environ)
    writer = LineWriter(sys.stdout)
    try:
        agent = Agent(command, Rendezvous(place, settings, lambda: service), environ, writer)
        return asyncio.run(agent.run(RunDirectory(Path(settings.run_directory))))
    finally:
        logging.shutdown()
        writer.close()


def main() -> NoReturn:
    """Be the agent of the task as which srun started this process; its arguments are the child's command."""
    run_program(lambda environ: run_agent(sys.argv[1:], environ))


def _check_length(tf_config: str, num_tasks: int) -> str:
    """Return it, if a process can have it in its environment: TensorFlow reads the map nowhere else.

    Raises:
        PlacementError: It is too long.
    """
    length, limit = len(f"TF_CONFIG={tf_config}"), _PAGES_OF_A_VARIABLE * resource.getpagesize()
    if length < limit:
        return tf_config
    text = f"The cluster of {num_tasks:,} tasks makes TF_CONFIG {length:,} bytes long"
    why = f"{text}, and Linux gives no process a variable of {limit:,} or more. Start fewer tasks."
    raise PlacementError(why, requested=length, available=limit - 1)


class _ChildLog:
    """Where the output of one start of a child goes: its log file, and line by line to the terminal.

    A file that cannot be written (a full disk) is given up with a word; the child goes on.
    """

    def __init__(self, path: Path, name: str, writer: LineWriter) -> None:
        self._name = name
        self._writer = writer
        self._splitter = LineSplitter()
        self._tail = LastLines()
        self._file: BinaryIO | None = None
        self._times: BinaryIO | None = None
        self._timed_at = float("-inf")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(path)
            self._times = open_to_append(path.with_suffix(TIMES_SUFFIX))
        except OSError as error:
            self._show([f"[tf4slurm: no log file: {error}]"])

    def write(self, data: bytes) -> None:
        """Take more output; none is its end. A file system that does not answer holds up only what comes after it."""
        self._show(self._splitter.split(data))
        if not data:
            self._close_files()
        elif self._file is not None:
            try:
                self._note_time(self._file)
                self._file.write(data)
            except OSError as error:
                self._show([f"[tf4slurm: the log file ends here: {error}]"])
                self._close_files()

    def _close_files(self) -> None:
        for file in (self._file, self._times):
            try:
                if file is not None:
                    file.close()
            except OSError as error:  # a full disk behind NFS is told only now
                self._show([f"[tf4slurm: the log file may be incomplete: {error}]"])
        self._file = self._times = None

    def _note_time(self, file: BinaryIO) -> None:
        """Write down, at most every second, from which byte on the log is later than now."""
        now = time.time()
        if self._times is not None and not 0 <= now - self._timed_at < _TIMES_SECONDS:
            self._timed_at = now
            self._times.write(b"%d %.1f\n" % (file.seek(0, os.SEEK_END), now))

    def close(self) -> tuple[str, ...]:
        """Return the last lines."""
        self._show(self._splitter.finish())
        return self._tail.to_tuple()

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._tail.append(line)
            self._writer.write(f"{self._name} | {line}")
