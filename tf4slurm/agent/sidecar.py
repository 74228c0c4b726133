"""The sidecar of a process: an agent that the process itself has started.

`CallingScript` is a script under plain srun. `CallingChief` is the chief of a job with --external-chief, such as a
notebook.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tf4slurm.agent.child import TaskProcess
from tf4slurm.agent.metric_log import MetricLog
from tf4slurm.agent.port_handover import PortHandover
from tf4slurm.agent.probes import wait_until_unresponsive
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.cluster import Cluster
from tf4slurm.control.messages import cluster_to_entries
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.errors import EXIT_TASK_LOST
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.reachability import bypass_proxies
from tf4slurm.roles import role_of
from tf4slurm.slurm.slurmstepd import find_slurmstepd, is_slurmstepd_stopped, wait_for_slurmstepd_loss

_DRAIN_SECONDS = 0.5
_SAVE_POLL_SECONDS = 0.05
_POLL_SECONDS = 1.0  # between checks for the end of the script, whose pipe usually closes first


class CallingProcess(TaskProcess):
    """The process that started this sidecar.

    It reads one line from the sidecar's standard output: the cluster, its rank, and the environment variables that
    TensorFlow needs, or an error. At its end it writes how it ended to
    the sidecar's standard input. A killed process writes nothing.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        self.has_started = False
        self._process_id = os.getppid()
        self._end = asyncio.Event()
        self._end_text = ""  # what the process wrote at its end
        self._watches: list[asyncio.Task[None]] = []
        self._handover = PortHandover(rendezvous.spec.hold_ports)

    @property
    def has_ended(self) -> bool:
        return self._end.is_set()

    async def open(self) -> None:
        await super().open()
        self._watches = [asyncio.create_task(self._watch_end())]

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        if self._rendezvous.listener is not None:
            self._rendezvous.listener.close()  # from now on the server of the process listens
        self._handover.begin(self._rendezvous.held_port, releases_ports=False)
        self._watches.append(asyncio.create_task(self._handover.restrict(self._process_id, is_forked=False)))
        self.has_started = True
        self._client.update(state="running", start_count=start_count, process_id=self._process_id)
        hosts = (member.address.host for member in cluster.members)
        _print(
            {
                "channel": self.channel.name,
                "entries": cluster_to_entries(cluster),
                "rank": self._rendezvous.rank,
                "environment": {"TF_GRPC_REUSE_PORT": "true", **bypass_proxies(os.environ, hosts)},
            }
        )

    async def _watch_end(self) -> None:
        """Wait for the end of the process. Then set `_end_text` and `_end`.

        The process has ended when this process's standard input is closed, or when its parent process changes.
        """
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
        closing = asyncio.create_task(stream.read())
        while not closing.done() and os.getppid() == self._process_id:
            await asyncio.wait({closing}, timeout=_POLL_SECONDS)
        if closing.done():
            self._end_text = closing.result().decode().strip()
        closing.cancel()
        self._end.set()


class CallingScript(CallingProcess):
    """The script under plain srun that started this sidecar.

    At its end it writes its exit code: 0, or 1 after an uncaught exception.
    """

    def __init__(self, rendezvous: Rendezvous, on_launcher_loss: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`on_launcher_loss` is awaited when the control service is lost after the cluster has formed."""
        super().__init__(rendezvous)
        self._on_launcher_loss = on_launcher_loss
        self._stop = asyncio.Event()  # the script is stopped for the heartbeat timeout
        self._stop_detail: str | None = None
        self._slurmstepd = find_slurmstepd()

    async def open(self) -> None:
        await super().open()
        self._watches.append(asyncio.create_task(self._watch_slurmstepd()))

    async def wait_until_orphaned(self) -> int:
        """Wait until the script has ended, or is suspended (SIGSTOP) for longer than the heartbeat timeout.

        Then report this task to the control service as terminated. Return 0, which the sidecar's program does not use.

        If the cluster has formed and the task is no server, a script without a completion signal counts as failed.
        """
        waits = {asyncio.create_task(self._end.wait()), asyncio.create_task(self._stop.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        await self.channel.drain(_DRAIN_SECONDS)  # the last messages may contain a completion signal
        state, cluster = self._client.observed.script, self._client.cluster
        if state.completion is None and cluster is not None:
            task = cluster.member(self._rendezvous.identity.rank).task
            if not role_of(task.task_type, has_chief=True).is_server:
                self._client.update_script(dataclasses.replace(state, completion="failed", barrier=None))
        if self._stop_detail is not None:
            self._client.update(killed_by="liveness_probe", detail=self._stop_detail)
        elif is_slurmstepd_stopped(self._slurmstepd):  # it does not notice the end of the script
            self._client.update(killed_by="slurmstepd")
        self._client.update(state="terminated", returncode=int(self._end_text) if self._end_text else None)
        return 0

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        super().start(cluster, attempt, start_count)
        self._watches.append(asyncio.create_task(self._watch_for_stop()))

    async def on_launcher_loss(self) -> None:
        await self._on_launcher_loss()

    def request_save(self, reason: str) -> None:
        """Request that the script saves and stops, after the control service is lost."""
        seconds = self._rendezvous.spec.grace_period_seconds
        desired = dataclasses.replace(self._client.desired, stop_reason=reason, grace_period_seconds=seconds)
        self.channel.send(desired)

    async def wait_until_saved(self) -> None:
        """Wait until the script has saved or ended, at most for the grace period.

        Return at once if the script does not check for stop requests.
        """
        deadline = time.monotonic() + self._rendezvous.spec.grace_period_seconds
        while time.monotonic() < deadline and not self.has_ended:
            script = self._client.observed.script
            if script.has_saved or not script.handles_stop:
                return
            await asyncio.sleep(_SAVE_POLL_SECONDS)

    async def end(self, kill_wait_seconds: float) -> None:
        """Send the last desired state, close the script channel, and wait without a limit for the end of the script.

        Do nothing if the script has received no cluster. `kill_wait_seconds` is not used, because the script is not the
        sidecar's child.
        """
        if self.has_started and not self._end.is_set():
            self.channel.send(self._client.desired)
            self.channel.close()
            await self._end.wait()

    async def _watch_for_stop(self) -> None:
        seconds = self._rendezvous.spec.unresponsive_seconds
        self._stop_detail = await wait_until_unresponsive(self._process_id, None, seconds)
        self._stop.set()

    async def _watch_slurmstepd(self) -> None:
        """Report the loss of the slurmstepd to the control service.

        The script continues, but Slurm will not notice the script's end.
        """
        await wait_for_slurmstepd_loss()
        self._client.update(killed_by="slurmstepd")


class CallingChief(CallingProcess):
    """The chief of a job with --external-chief, such as a notebook, that started this sidecar.

    At its end it writes a JSON list: its exit code, and the type and the message of the exception that ended it, or
    empty texts. A process that leaves the job to another chief (`restart`) writes a JSON number: the seconds for which
    the job waits for that chief. A process that writes nothing was killed: then the chief is lost.

    The sidecar does not end the process, and a process that is stopped (SIGSTOP) keeps its cluster.
    """

    prints_errors = True

    def __init__(self, rendezvous: Rendezvous, run_directory: RunDirectory) -> None:
        """`run_directory` gets the metrics that the process reports."""
        super().__init__(rendezvous)
        self._run_directory = run_directory
        self._metric_log: MetricLog | None = None

    @property
    def has_left(self) -> bool:
        """Whether the process has left the job to another chief."""
        return self._client.observed.next_chief_seconds is not None

    async def wait_until_orphaned(self) -> int:
        """Wait for the end of the process, and report it.

        After an orderly end, never return: the launcher ends the job, and with it this task. If the process leaves the
        job to another chief, report this task as terminated and return 0. If it was killed, or ends before the cluster
        has formed, do the same and return 7.
        """
        await self._end.wait()
        await self.channel.drain(_DRAIN_SECONDS)
        await self._close_metric_log()
        if not self._end_text or not self.has_started:
            detail = f"process {self._process_id}, which was the chief, ended without closing the cluster"
            self._client.update(state="terminated", detail=detail)
            return EXIT_TASK_LOST
        end = json.loads(self._end_text)
        if not isinstance(end, list):
            self._client.update(state="terminated", next_chief_seconds=float(end))
            return 0
        returncode, kind, message = end
        failure = ScriptFailure(kind, message) if kind else None
        self._client.exited_at = time.monotonic()
        self._client.update(state="exited", returncode=returncode, failure=failure)
        await asyncio.Event().wait()
        raise AssertionError("the wait has no end")

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        task = cluster.member(self._rendezvous.rank).task
        self._metric_log = MetricLog(self._run_directory, task, attempt, len(cluster.members))
        super().start(cluster, attempt, start_count)

    def request_stop(self) -> None:
        """Report that a process has saved that does not check for stop requests: the job need not wait for it."""
        script = self._client.observed.script
        if self._client.desired.stop_reason and not (script.handles_stop or script.has_saved):
            self._client.update_script(dataclasses.replace(script, has_saved=True))

    async def end(self, kill_wait_seconds: float) -> None:
        """Send the last desired state to the process, which goes on without its cluster. Idempotent."""
        self.channel.send(self._client.desired)
        await self._close_metric_log()

    async def _close_metric_log(self) -> None:
        metric_log, self._metric_log = self._metric_log, None
        if metric_log is not None:
            await metric_log.close()

    def _on_metrics(self, entry: StepMetrics) -> None:
        if self._metric_log is not None:
            self._metric_log.add(entry)


def send_leave() -> None:
    """Send the process that the launcher waits for another chief."""
    _print({})


def send_error(error: Exception, rank: int | None = None) -> None:
    """Send the process the reason why the cluster did not form, and its rank if the sidecar goes on."""
    _print({"error": [type(error).__name__, str(error), vars(error)], "rank": rank})


def _print(content: object) -> None:
    print(json.dumps(content, default=str), flush=True)
