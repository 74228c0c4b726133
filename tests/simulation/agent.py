"""The agent of a simulated task: the real `Agent`, `Rendezvous` and client, and a child that is a simulated script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.network import Host, SimulatedClient
from tests.simulation.script import Script, ScriptProcess
from tests.simulation.world import Process
from tf4slurm.agent.agent import Agent
from tf4slurm.agent.child import TaskProcess
from tf4slurm.agent.rendezvous import JoiningWorker, LocalTask, Rendezvous
from tf4slurm.agent.script_processes import ScriptProcesses
from tf4slurm.cluster import Address, Cluster
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.control.messages import JOINING_RANK, DesiredState, ScriptState, Usage
from tf4slurm.network.reachability import members_to_check
from tf4slurm.roles import role_of

if TYPE_CHECKING:
    from tests.simulation.job import Job

_CHECK_SECONDS = 5.0
_PROBE_SECONDS = 0.25
_CHANNEL_SECONDS = 0.0005


class _Port:
    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None:
        pass


class SimulatedRendezvous(Rendezvous):
    """A rendezvous on a simulated host."""

    def __init__(self, job: Job, process: AgentProcess, identity: LocalTask | JoiningWorker) -> None:
        self._job, self._process = job, process
        super().__init__(identity, job.plan.spec, job.find_service)
        self._incarnation = process.name

    def _make_client(self, find_endpoint: Callable[[], ControlEndpoint | None], num_tasks: int) -> ControlClient:
        client = SimulatedClient(find_endpoint, self._make_registration, self.spec, num_tasks)
        client.network, client.process, client.host = self._job.network, self._process, self._process.host
        return client

    def _find_host(self, service: Address) -> str:
        return self._process.host.address

    def _hold_port(self) -> Any:
        self.held_port = cast(Any, _Port(self._process.host.next_port()))
        self.listener = cast(Any, self.held_port)
        return self.held_port

    async def _answer_checks(self, listener: Any) -> Any:
        return listener

    async def _find_unreachable(self, cluster: Cluster) -> list[str]:
        """Check other addresses, which takes until a partition ends, at most 5 s."""
        hosts, own = self._job.hosts_by_address, self._process.host
        members = () if isinstance(self.identity, JoiningWorker) else members_to_check(cluster, self.rank)
        deadline = self._process.time() + _CHECK_SECONDS
        await asyncio.sleep(2 * self._job.network.latency())
        faults = []
        for member in members:
            host = hosts[member.address.host]
            while own is not host and (own.is_cut or host.is_cut or self._job.is_silent(member.rank)):
                if self._process.time() >= deadline:
                    faults.append(f"{member.task} does not answer")
                    break
                await asyncio.sleep(0.1)
        return faults


class SimulatedChannel:
    """The agent's end of the script channel."""

    was_used = True

    def __init__(self, process: AgentProcess) -> None:
        self._process = process
        self._desired = DesiredState()
        self.connected: list[ScriptProcess] = []
        self.states = ScriptProcesses()

    def connect(self, script: ScriptProcess) -> None:
        self.connected.append(script)
        self._send(script)

    def send(self, desired: DesiredState) -> None:
        if desired != self._desired:
            self._desired = desired
            for script in self.connected:
                self._send(script)

    def _send(self, script: ScriptProcess) -> None:
        script.at(self._process.time() + _CHANNEL_SECONDS, script.on_desired, self._desired)

    def disconnect(self) -> None:
        self.connected.clear()
        self.states.clear()

    def close(self) -> None:
        self.disconnect()


class SimulatedChild(TaskProcess):
    """A child that behaves as `OwnedChild` does: it is started, reported, asked to stop, and ended."""

    def __init__(self, job: Job, process: AgentProcess, rendezvous: SimulatedRendezvous) -> None:
        super().__init__(rendezvous)
        self._job, self._process = job, process
        self.channel: Any = SimulatedChannel(process)
        self.script: Script | None = None  # while its main process runs
        self.scripts: list[Script] = []  # whose processes may still run
        self._running: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        self._orphaned = asyncio.Event()
        self._was_stopped = False
        self._is_ending = False

    async def open(self) -> None:
        pass

    async def wait_until_orphaned(self) -> int:
        await self._orphaned.wait()
        return 7

    def start(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        self._running = asyncio.create_task(self._run(cluster, attempt, start_count))

    async def _run(self, cluster: Cluster, attempt: int, start_count: int) -> None:
        rank, job = self._rendezvous.rank, self._job
        task = cluster.member(rank).task
        await asyncio.sleep(job.draw(0.001, 0.02))
        self.clean_up()
        self._exited.clear()
        script = self.script = Script(job, self._process, rank, task, attempt, start_count)
        self.scripts.append(script)
        script.begin(self.channel.connect, self.on_script_state, self.on_exit)
        self._client.exited_at = None
        self._client.update(
            state="running",
            start_count=start_count,
            process_id=next(self._process.process_ids),
            returncode=None,
            killed_by=None,
            detail=None,
            tail=(),
            port_failure=None,
            script=ScriptState(),
            usage=Usage(),
            has_server=False,
        )
        self.request_stop()
        probing = asyncio.create_task(self._probe(script, has_chief=cluster.has_chief))
        await self._exited.wait()
        probing.cancel()
        self.script = None
        self._client.exited_at = script.exited_at
        detail = "was stopped" if script.killed_by else "its core was dumped" if script.returncode == -11 else None
        tail = (f"the last line of {task}",) if script.returncode else ()
        self._client.update(
            state="exited",
            returncode=script.returncode,
            killed_by=script.killed_by,
            detail=detail,
            tail=tail,
            port_failure=script.port_failure,
        )

    async def _probe(self, script: Script, *, has_chief: bool) -> None:
        """Report the server when it answers; kill a script that is stopped for too long."""
        limit, stopped = self._rendezvous.spec.unresponsive_seconds, 0.0
        role = role_of(script.task.task_type, has_chief=has_chief)
        is_known = not role.is_in_cluster
        while True:
            pause = limit / 4 if is_known else _PROBE_SECONDS
            await asyncio.sleep(pause)
            if script.has_server and not is_known:
                is_known = True
                self._client.update(has_server=True)
            stopped = stopped + pause if script.main.is_paused else 0.0
            if stopped >= limit:
                script.kill(-9, "liveness_probe")

    def request_stop(self) -> None:
        script = self.script
        if script is None or self._was_stopped or not self._client.desired.stop_reason:
            return
        self._was_stopped = True
        ignores = not role_of(script.task.task_type, has_chief=self._job.has_chief).is_waited_for
        if not ignores and not self._client.observed.script.handles_stop:
            self._job.check("script is signalled", script)
            script.main.signal(self._rendezvous.spec.stop_signal)

    async def end(self, kill_wait_seconds: float) -> None:
        if self._running is not None:
            self._running.cancel()
        script = self.script
        if script is not None and not script.has_ended:
            self._is_ending = script.is_terminated = True
            script.main.signal("SIGTERM")
            try:
                await asyncio.wait_for(self._exited.wait(), kill_wait_seconds)
            except asyncio.TimeoutError:
                script.kill(-9, "stop")
            self._is_ending = False
        self.script = None

    async def kill_descendants(self) -> None:
        await asyncio.sleep(0.002)
        self.kill_remaining()

    def clean_up(self) -> None:
        """Kill what an earlier child has left behind, before the next one starts."""
        self.kill_remaining()

    def kill_remaining(self) -> None:
        """Kill the processes that earlier children have left behind."""
        for script in self.scripts:
            script.kill(-9, "agent")
        self.scripts.clear()

    async def write_last_state(self, cluster: Cluster) -> None:
        pass

    # Calls of the script

    def on_exit(self, script: Script) -> None:
        if script is self.script:
            self._exited.set()

    def on_script_state(self, process: ScriptProcess, state: ScriptState | None) -> None:
        """Handle a message of a process of the script, or with None its end."""
        if process not in self.channel.connected:
            return
        if self._is_ending and state is not None and state.stop_signal == "SIGTERM":
            process.script.kill(-9, "stop")
            return
        states: ScriptProcesses = self.channel.states
        if state is None:
            self.channel.connected.remove(process)
            merged = states.end(process.number)
        else:
            merged = states.update(process.number, state)
        self._client.update_script(merged)


class AgentProcess(Process):
    """The process of an agent, from its start to its end."""

    def __init__(self, job: Job, name: str, host: Host, identity: LocalTask | JoiningWorker) -> None:
        super().__init__(job.world, name)
        self.job, self.host, self.identity = job, host, identity
        self.process_ids = itertools.count(1)
        self.returncode: int | None = None
        self.begun_at, self.ended_at = job.world.now, float("inf")
        self.rendezvous = SimulatedRendezvous(job, self, identity)
        self.client = self.rendezvous.client
        self.child: SimulatedChild | None = None
        self._runner: asyncio.Task[int] | None = None

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def has_registered(self) -> bool:
        return self.client.service_address is not None

    @property
    def scripts(self) -> list[Script]:
        return self.child.scripts if self.child is not None else []

    def begin(self) -> None:
        if self.returncode is None:
            self.child = SimulatedChild(self.job, self, self.rendezvous)
            self._runner = self.create_task(Agent(self.rendezvous, self.child).run())
            self._runner.add_done_callback(self._on_end)

    def _on_end(self, runner: asyncio.Task[int]) -> None:
        if runner.cancelled():
            return
        error = runner.exception()
        if error is not None:
            self.world.errors.append(f"{self.name} has failed: {error!r}")
        self.end(1 if error is not None else runner.result())

    def signal(self, name: Any) -> None:
        """Handle a stop signal to the agent."""
        if not self.has_registered and self.identity.rank == JOINING_RANK:
            self.end(143)
        elif not self.is_dead:
            self.client.update(stop_signal=name)

    def end(self, returncode: int) -> None:
        """End this process, whose guard then ends the processes of its child."""
        if self.returncode is not None:
            return
        self.returncode = returncode
        self.kill()
        for script in self.scripts:
            script.kill(-9, "guard")
        self.job.on_agent_end(self)
