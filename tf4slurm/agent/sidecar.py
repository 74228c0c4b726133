"""The agent of a script that plain srun started: it does not own the script, but stands by it until that ends.

It is a process of its own, so that the script has no event loop of ours in it, and so that the script's end is seen
whatever it is. It is a member of the job for the script, holds its port, and gives it a line to what the others do.
That of rank 0 hosts the control service. `agreement.py` starts it and hears from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tf4slurm.agent.bootstrap import ControlEndpoint, JoinSettings, Place
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.agent.script_channel import ScriptChannelServer
from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.credentials import Credentials, create_credentials
from tf4slurm.control.messages import cluster_to_entries
from tf4slurm.control.service import ControlService
from tf4slurm.control.state import JobState
from tf4slurm.errors import InterfaceError, RendezvousError, RendezvousTimeoutError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.interfaces import host_addresses, interface_address
from tf4slurm.placement import SPREAD, place_tasks
from tf4slurm.roles import role_of
from tf4slurm.slurm.step import SlurmStep
from tf4slurm.spec import JobSpec
from tf4slurm.system.background import in_thread
from tf4slurm.system.output import LogHandler
from tf4slurm.system.program import silence_grpc

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 10.0
_TELL_SECONDS = 10.0  # how long a task that lacks the interface tries to tell the others
_LOOK_SECONDS = 1.0  # how often it is asked whether the script is still there, beside the pipe that tells its end


class Sidecar:
    """One task's sidecar, from its registration to the end of its script."""

    def __init__(self, counts: Mapping[str, int], placement: str, settings: JoinSettings, place: Place) -> None:
        self._counts = counts
        self._placement = placement
        self._settings = settings
        self._place = place
        path = Path(settings.run_directory)
        hosts = place.rank == 0
        self._directory = RunDirectory.open(path, reserve_result=False) if hosts else RunDirectory(path.absolute())
        self._join = Rendezvous(
            place, settings, lambda: ControlEndpoint.from_file(self._directory.control), owns_child=False
        )
        self._line = ScriptChannelServer(self._join.client.update_script)
        self._lacking = self._lacking_interface()

    async def run(self, script: int) -> None:
        """Agree with the others, tell the script, and stand by it, whose process id is `script`, until it ends."""
        client = self._join.client
        await self._line.open()
        ending = asyncio.create_task(_wait_for_end(script))
        hosting = asyncio.create_task(self._host()) if self._place.rank == 0 else None
        member = asyncio.create_task(client.run())
        agreeing = asyncio.create_task(self._join.wait_for_cluster())
        lacking = self._lacking
        try:
            done, _ = await asyncio.wait(
                {ending, member, agreeing, *filter(None, [hosting])},
                timeout=None if lacking is None else _TELL_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if lacking is not None and not done:  # rank 0 lacks it, too, and is gone
                raise lacking
            if not agreeing.done() and not ending.done():
                if hosting is not None and hosting.done():
                    await hosting
                    raise lacking or _failure(self._join)  # it was over before this task could be told
                await member
            if not ending.done():
                cluster = await agreeing
                if cluster is None:
                    raise _failure(self._join)
                await self._stand_by(cluster, script, ending, member)
        except Exception as error:
            _answer({"error": [type(error).__name__, str(error), vars(error)]})
        finally:
            agreeing.cancel()
            self._line.close()
            client.update(state="terminated")
            await asyncio.wait({member}, timeout=_LEAVE_SECONDS)
            if hosting is not None:
                if not self._line.was_used:  # a script that knows nothing of the others' ends does not wait for them
                    hosting.cancel()
                await asyncio.wait({hosting})

    def _lacking_interface(self) -> InterfaceError | None:
        """Return why this host has no address on the interface that is asked for; None if it has."""
        try:
            if self._settings.interface:
                interface_address(self._settings.interface, self._place.node_name)
            return None
        except InterfaceError as error:
            return error

    async def _stand_by(
        self, cluster: Cluster, script: int, ending: asyncio.Task[None], member: asyncio.Task[None]
    ) -> None:
        """Pass on what the script and the others say, until it ends or there is no control service any more."""
        client = self._join.client
        if self._join.listener is not None:
            self._join.listener.close()
        client.update(state="running", starts=1, process_id=script)
        _answer({"channel": self._line.name, "entries": cluster_to_entries(cluster)})
        while not (ending.done() or member.done()):
            self._line.tell(client.desired)
            changing = asyncio.create_task(client.wait_for_change())
            await asyncio.wait({ending, member, changing}, return_when=asyncio.FIRST_COMPLETED)
            changing.cancel()
        if not ending.done():
            logger.warning("the control service, at rank 0, is gone")
            self._line.close()
            await ending
        script_state = client.observed.script
        task = cluster.members[self._place.rank].task
        if (
            self._line.was_used
            and script_state.completion is None
            and not role_of(task.task_type, has_chief=True).serves
        ):
            client.update_script(dataclasses.replace(script_state, completion="failed", barrier=None))

    async def _host(self) -> None:
        """Host the control service until every task has left."""
        place = functools.partial(place_tasks, self._counts, self._placement)
        limits = JobSpec(
            start_timeout_seconds=self._settings.join_seconds,
            heartbeat_interval_seconds=self._settings.heartbeat_interval_seconds,
            heartbeat_timeout_seconds=self._settings.heartbeat_timeout_seconds,
            kill_wait_seconds=0,
        )
        needs_nodes = self._placement == SPREAD
        tasks = place([""] * sum(self._counts.values()))
        state = JobState(tasks, limits, time.monotonic(), lambda *_: None, place if needs_nodes else None)
        credentials = await in_thread(create_credentials)
        service = ControlService(state, credentials)
        try:
            port = await service.start(ports=self._settings.ports[::-1])  # the tasks take the first ones
            await in_thread(self._write_control, port, credentials.shared)
            await service.wait_for_end()
        finally:
            await service.close()
            await asyncio.wait({in_thread(self._remove_control)}, timeout=_LEAVE_SECONDS)

    def _write_control(self, port: int, credentials: Credentials) -> None:
        interface = None if self._lacking else self._settings.interface
        hosts = (interface_address(interface, self._place.node_name),) if interface else host_addresses()
        addresses = tuple(Address(host, port) for host in hosts)
        self._directory.write_control(ControlEndpoint(addresses, credentials).to_json())

    def _remove_control(self) -> None:
        with contextlib.suppress(OSError):
            self._directory.control.unlink()


async def _wait_for_end(script: int) -> None:
    """Wait for the end of the script: of its end of our standard input, or of the process itself."""
    stream = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
    closing = asyncio.create_task(stream.read())
    while not closing.done() and os.getppid() == script:
        await asyncio.wait({closing}, timeout=_LOOK_SECONDS)
    closing.cancel()


def _answer(content: object) -> None:
    """Tell the script how it went, once: it reads one line."""
    print(json.dumps(content, default=str), flush=True)


def _failure(join: Rendezvous) -> Exception:
    if join.failure is not None:
        return join.failure
    desired = join.client.desired
    kind = RendezvousTimeoutError if desired.has_timed_out else RendezvousError
    return kind(desired.terminate_reason or "The cluster did not form.")


def main() -> None:
    """Be the sidecar of the process that started this one; what it asks for is the first argument."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are the script's: this process ends with it
    silence_grpc()
    logging.basicConfig(handlers=(LogHandler(sys.stderr),), format="tf4slurm: %(levelname)s: %(message)s")
    request = json.loads(sys.argv[1])
    try:
        step = SlurmStep.from_environ(os.environ)
        settings = JoinSettings(
            run_directory=request["run_directory"],
            interface=request["interface"],
            ports=tuple(request["ports"]),
            join_seconds=request["timeout_seconds"],
            num_tasks=step.num_tasks,
        )
        sidecar = Sidecar(request["counts"], request["placement"], settings, step)
        asyncio.run(sidecar.run(os.getppid()))
    except Exception as error:
        _answer({"error": [type(error).__name__, str(error), vars(error)]})
    logging.shutdown()
    os._exit(0)  # whoever reads our answer may be gone: nothing to tell


if __name__ == "__main__":
    main()
