"""The sidecar of a script under plain srun: an agent that the script itself has started."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys

from tf4slurm.agent.child import TaskProcess
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.cluster import Cluster
from tf4slurm.control.messages import cluster_to_entries
from tf4slurm.roles import role_of

_DRAIN_SECONDS = 0.5
_POLL_SECONDS = 1.0  # between checks for the end of the script, whose pipe usually closes first


class CallingScript(TaskProcess):
    """The script that started this process. It reads one line from this process: the cluster, or an error."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        self.has_started = False
        self._process_id = os.getppid()
        self._end = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._end.is_set()

    async def open(self) -> None:
        await super().open()
        self._watch = asyncio.create_task(self._watch_script())

    async def wait_until_orphaned(self) -> int:
        """Wait for the end of the script, and report it; return 0, because only slurmstepd gets the exit code."""
        await self._end.wait()
        await self.channel.drain(_DRAIN_SECONDS)  # the end of this process may reveal the completion signal of another
        state, cluster = self._client.observed.script, self._client.cluster
        if self.channel.was_used and state.completion is None and cluster is not None:
            task = cluster.member(self._rendezvous.identity.rank).task
            if not role_of(task.task_type, has_chief=True).is_server:
                self._client.update_script(dataclasses.replace(state, completion="failed", barrier=None))
        self._client.update(state="terminated")
        return 0

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        if self._rendezvous.listener is not None:
            self._rendezvous.listener.close()  # from now on the script's server listens
        self.has_started = True
        self._client.update(state="running", start_count=start_count, process_id=self._process_id)
        _print({"channel": self.channel.name, "entries": cluster_to_entries(cluster)})

    async def end(self, kill_wait_seconds: float) -> None:
        """Close the script channel, and wait for the end of the script."""
        if self.has_started and not self._end.is_set():
            self.channel.close()
            await self._end.wait()

    async def _watch_script(self) -> None:
        """Set `_end` when the script ends: standard input is closed, or the parent process changes."""
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
        closing = asyncio.create_task(stream.read())
        while not closing.done() and os.getppid() == self._process_id:
            await asyncio.wait({closing}, timeout=_POLL_SECONDS)
        closing.cancel()
        self._end.set()


def send_error(error: Exception) -> None:
    """Send the script the reason why the cluster did not form."""
    _print({"error": [type(error).__name__, str(error), vars(error)]})


def _print(content: object) -> None:
    print(json.dumps(content, default=str), flush=True)
