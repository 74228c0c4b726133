"""The agent of one task: the process that connects the task's script to the launcher.

The agent registers the task with the launcher, brings the script to the state that the launcher desires, and reports
the state that it observes. The agent never imports TensorFlow, so it cannot hang in TensorFlow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tf4slurm.agent.child import OwnedChild, TaskProcess
from tf4slurm.agent.rendezvous import Rendezvous, read_identity, spec_from_environ
from tf4slurm.cluster import Cluster
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.control.messages import JOINING_RANK
from tf4slurm.errors import (
    EXIT_TASK_LOST,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    exit_code_of,
)
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.slurm.slurmstepd import find_slurmstepd, is_slurmstepd_stopped
from tf4slurm.system.output import LineWriter
from tf4slurm.system.program import run_program

logger = logging.getLogger(__name__)

_CONFIRM_SECONDS, _SCRIPT_CONFIRM_SECONDS = 2.0, 10.0  # for the launcher to confirm that this task has terminated
_ORPHAN_SECONDS = 2.0  # from SIGTERM to SIGKILL, if the launcher is lost


class Agent:
    """Registers a task, and keeps the task's process in the state that the launcher desires.

    `process` is the agent's child process, or the script that started the agent as its sidecar.

    Attributes:
        is_end_confirmed: The launcher has received that this task has terminated, because its process has ended.
    """

    def __init__(self, rendezvous: Rendezvous, process: TaskProcess) -> None:
        self._rendezvous = rendezvous
        self._client = rendezvous.client
        self._process = process
        self._error: RendezvousError | None = None
        self._slurmstepd = find_slurmstepd()
        self.is_end_confirmed = False

    @property
    def was_terminated(self) -> bool:
        """Whether this task could take part in the job and its last reported state is "terminated"."""
        return self._client.observed.state == "terminated" and self._rendezvous.failure is None

    @property
    def has_lost_launcher(self) -> bool:
        return self._error is not None and not isinstance(self._error, RendezvousClosedError)

    @property
    def failure(self) -> Exception | None:
        """The reason why this task did not take part, lost the launcher or had to terminate. None if none is known."""
        desired = self._client.desired
        if self._rendezvous.failure is not None or self._error is not None:
            return self._rendezvous.failure or self._error
        if desired.terminate:
            kind = RendezvousTimeoutError if desired.has_timed_out else RendezvousError
            return kind(desired.terminate_reason)
        return None

    async def run(self) -> int:
        """Run the task until the launcher terminates it or is lost, or until the guard or script above this agent ends.

        Returns:
            The exit code for this process, by the first case that applies:

            * The launcher was lost after the cluster had formed, or the guard above this agent was lost: 7.
            * The task could not take part in the job: the exit code of the error.
            * The launcher has sent an exit code to a joined worker: this code.
            * The child failed: the child's exit code, or 128 + N after signal N.
            * Otherwise, for example after the child was terminated: 0.
        """
        await self._process.open()
        member = asyncio.create_task(self._client.run())
        following = asyncio.create_task(self._follow())
        orphaned = asyncio.create_task(self._process.wait_until_orphaned())
        try:
            await asyncio.wait({member, following, orphaned}, return_when=asyncio.FIRST_COMPLETED)
            if orphaned.done():
                following.cancel()  # it must not begin another attempt, in which this process has no part
                if self._client.observed.state == "terminated":
                    await asyncio.wait({member}, timeout=_SCRIPT_CONFIRM_SECONDS)
                    self.is_end_confirmed = member.done() and member.exception() is None
                return orphaned.result()
            if following.done():
                following.result()
                await asyncio.wait({member}, timeout=_CONFIRM_SECONDS)
            else:
                member.result()
            return self._exit_code()
        except RendezvousError as error:
            if not self._process.prints_errors:
                logger.error("%s: %s", self._name, error)
            self._error = error
            if self.has_lost_launcher and self._client.cluster is not None:
                await self._process.on_launcher_loss()
            if self._client.cluster is not None:
                return EXIT_TASK_LOST
            return getattr(self._rendezvous.failure, "exit_code", error.exit_code)
        finally:
            for task in (orphaned, following, member):
                task.cancel()
            await self._process.end(_ORPHAN_SECONDS)
            self._process.channel.close()
            await self._process.kill_descendants()
            if self.has_lost_launcher and self._rendezvous.cluster is not None:
                await self._process.write_last_state(self._rendezvous.cluster)

    async def _follow(self) -> None:
        """Start, restart and end the process as the launcher desires, until the launcher terminates this task."""
        while True:
            cluster = await self._rendezvous.wait_for_cluster()
            if cluster is not None:
                await self._follow_attempt(cluster)
            desired = self._client.desired
            await self._process.end(self._rendezvous.spec.kill_wait_seconds)
            if desired.terminate:
                if is_slurmstepd_stopped(self._slurmstepd):
                    self._client.update(killed_by="slurmstepd")
                self._client.update(state="terminated")
                return
            await self._process.kill_descendants()  # a descendant may hold the port or a GPU
            self._process.channel.disconnect()
            await self._rendezvous.begin_attempt(desired.attempt)

    async def _follow_attempt(self, cluster: Cluster) -> None:
        attempt, start_count = self._client.observed.attempt, self._client.observed.start_count
        while (desired := self._client.desired).attempt == attempt and not desired.terminate:
            if desired.start_count > start_count:
                start_count += 1
                self._process.channel.disconnect()
                self._process.start(cluster, attempt, start_count)
            self._process.channel.send(desired)
            self._process.request_stop()
            await self._client.wait_for_change()

    def _exit_code(self) -> int:
        if self._rendezvous.failure is not None:
            return getattr(self._rendezvous.failure, "exit_code", 1)
        desired = self._client.desired
        joined_code = 0 if desired.rank is None else desired.exit_code
        return joined_code or exit_code_of(self._client.observed.returncode or 0)

    @property
    def _name(self) -> str:
        rank, cluster = self._rendezvous.rank, self._rendezvous.cluster
        if cluster is not None:
            return str(cluster.member(rank).task)
        return "this worker" if rank == JOINING_RANK else f"rank {rank}"


def run_agent(command: Sequence[str], environ: Mapping[str, str], launcher_id: int | None = None) -> int:
    """Run the agent of a task that a launcher or srun has started. Return the exit code for this process.

    Args:
        command: The child's command.
        environ: The environment variables of this process, with those that the launcher sets for its agents.
        launcher_id: Process id of the launcher if the launcher is the parent process, else None. If the launcher has
            ended before this agent has registered, the agent fails at once.

    Raises:
        SlurmEnvironmentError: The variables do not determine the task.
    """
    identity = read_identity(environ)
    endpoint = ControlEndpoint.from_environ(
        environ, identity.launch_address if isinstance(identity, SlurmStep) else None
    )
    spec, path = spec_from_environ(command, environ)
    writer = LineWriter(sys.stdout)

    def find_service() -> ControlEndpoint | None:
        is_registered = rendezvous.client.service_address is not None
        if launcher_id is not None and not is_registered and os.getppid() != launcher_id:
            raise RendezvousConnectionError(f"The launcher, process {launcher_id}, has ended. See its output.")
        return endpoint

    try:
        rendezvous = Rendezvous(identity, spec, find_service)
        child = OwnedChild(rendezvous, environ, RunDirectory(path), writer)
        return asyncio.run(Agent(rendezvous, child).run())
    finally:
        logging.shutdown()
        writer.close()


def main() -> NoReturn:
    """Run the agent in a process that srun started. The arguments of this process are the child's command."""
    run_program(lambda environ: run_agent(sys.argv[1:], environ))
