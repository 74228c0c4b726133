"""The sidecar of a script under plain srun: an agent that the script itself has started."""

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
from tf4slurm.agent.probes import wait_until_unresponsive
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.cluster import Cluster
from tf4slurm.control.messages import cluster_to_entries
from tf4slurm.roles import role_of
from tf4slurm.slurm.slurmstepd import find_slurmstepd, is_slurmstepd_stopped, wait_for_slurmstepd_loss

_DRAIN_SECONDS = 0.5
_SAVE_POLL_SECONDS = 0.05
_POLL_SECONDS = 1.0  # between checks for the end of the script, whose pipe usually closes first


class CallingScript(TaskProcess):
    """The script that started this process.

    The script reads one line from this process's standard output: the cluster, or an error. At its end it writes its
    exit code to this process's standard input: 0, or 1 after an uncaught exception. A killed script writes nothing.
    """

    def __init__(self, rendezvous: Rendezvous, on_launcher_loss: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`on_launcher_loss` is awaited when the control service is lost after the cluster has formed."""
        super().__init__(rendezvous)
        self.has_started = False
        self._on_launcher_loss = on_launcher_loss
        self._process_id = os.getppid()
        self._end = asyncio.Event()
        self._end_or_stop = asyncio.Event()  # the script has ended, or is stopped for the heartbeat timeout
        self._stop_detail: str | None = None
        self._returncode: int | None = None
        self._slurmstepd = find_slurmstepd()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def has_ended(self) -> bool:
        return self._end.is_set()

    async def open(self) -> None:
        await super().open()
        self._watches = [asyncio.create_task(self._watch_script()), asyncio.create_task(self._watch_slurmstepd())]

    async def wait_until_orphaned(self) -> int:
        """Wait until the script has ended, or is suspended (SIGSTOP) for longer than the heartbeat timeout.

        Then report this task to the control service as terminated. Return 0, which the sidecar's program does not use.

        If the cluster has formed and the task is no server, a script without a completion signal counts as failed.
        """
        await self._end_or_stop.wait()
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
        self._client.update(state="terminated", returncode=self._returncode)
        return 0

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        if self._rendezvous.listener is not None:
            self._rendezvous.listener.close()  # from now on the script's server listens
        self.has_started = True
        self._client.update(state="running", start_count=start_count, process_id=self._process_id)
        self._watches.append(asyncio.create_task(self._watch_for_stop()))
        _print({"channel": self.channel.name, "entries": cluster_to_entries(cluster)})

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

    async def _watch_script(self) -> None:
        """Wait for the end of the script. Keep its exit code, and set the events `_end` and `_end_or_stop`.

        The script has ended when this process's standard input is closed, or when its parent process changes.
        """
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
        closing = asyncio.create_task(stream.read())
        while not closing.done() and os.getppid() == self._process_id:
            await asyncio.wait({closing}, timeout=_POLL_SECONDS)
        if closing.done() and (code := closing.result().strip()):
            self._returncode = int(code)
        closing.cancel()
        self._end.set()
        self._end_or_stop.set()

    async def _watch_for_stop(self) -> None:
        seconds = self._rendezvous.spec.unresponsive_seconds
        self._stop_detail = await wait_until_unresponsive(self._process_id, None, seconds)
        self._end_or_stop.set()

    async def _watch_slurmstepd(self) -> None:
        """Report the loss of the slurmstepd to the control service.

        The script continues, but Slurm will not notice the script's end.
        """
        await wait_for_slurmstepd_loss()
        self._client.update(killed_by="slurmstepd")


def send_error(error: Exception) -> None:
    """Send the script the reason why the cluster did not form."""
    _print({"error": [type(error).__name__, str(error), vars(error)]})


def _print(content: object) -> None:
    print(json.dumps(content, default=str), flush=True)
