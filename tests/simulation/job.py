"""One simulated job: its launcher, spawner, agents and hosts, the faults of its plan, and what truly happens."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections import Counter
from typing import Any

from tests.simulation.agent import AgentProcess
from tests.simulation.network import Host, Network, SimulatedService
from tests.simulation.plan import Fault, Plan, ScriptPlan
from tests.simulation.script import Arrival, Script, ScriptProcess
from tests.simulation.world import Process, World
from tf4slurm.agent.rendezvous import JoiningWorker, LocalTask
from tf4slurm.cluster import Address, Task
from tf4slurm.control.clock import JobClock
from tf4slurm.control.credentials import ControlEndpoint, Credentials, ServiceCredentials
from tf4slurm.control.messages import JOINING_RANK, decode_cluster
from tf4slurm.control.records import Outcome
from tf4slurm.control.rules import StopRequest, stop_request_of
from tf4slurm.control.service import max_gap_seconds
from tf4slurm.control.shard_position import ShardPosition
from tf4slurm.control.state import JobState
from tf4slurm.errors import EXIT_PREFLIGHT, EXIT_TASK_LOST, describe_end

MAX_SECONDS = 600.0
"""Virtual seconds after which a job must have ended, its suspensions aside."""
_SHARED = Credentials("", "token")
_AFTER_END_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Violation:
    """An invariant that did not hold in a run."""

    seed: int
    invariant: str
    text: str


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """A time in which messages or a process did not move; `rank` is None for the launcher or the whole job."""

    kind: str
    begin: float
    end: float
    ranks: frozenset[int]


class Job:
    """A simulated job. `run` runs it to its end and returns the violations.

    Attributes:
        chance: The random numbers of the run, other than those of the plan.
        history: What truly happened: (time, kind, rank or None, text).
        events: The events that the launcher has recorded: (time, kind, task, text).
    """

    latest: Job | None = None

    def __init__(self, plan: Plan, checks: dict[str, list[Any]]) -> None:
        Job.latest = self
        self.plan = plan
        self.world = World()
        self.chance = random.Random(plan.seed + 1_000_003)
        self.history: list[tuple[float, str, int | None, str]] = []
        self.events: list[tuple[float, str, str | None, str]] = []
        self.violations: list[Violation] = []
        self.disturbances: list[Disturbance] = []
        self.killed_agents: dict[int, float] = {}  # by rank, with the time
        self.stops: list[tuple[float, int]] = []  # the time and number of each stop request
        self.own_stops: list[tuple[float, int]] = []  # those of the launcher
        self.stop_agents: dict[int, AgentProcess] = {}  # that got the stop request of this number
        self.stop_scripts: dict[int, Script] = {}
        self.scripts: list[Script] = []
        self.hangs: list[tuple[float, Script]] = []
        self.saved_scripts: set[int] = set()
        self.shard_log: list[tuple[float, str, ScriptProcess, int]] = []
        self.saved_step = 0
        self.saved_position: ShardPosition | None = None
        self.shard_starts: dict[int, ShardPosition | None] = {}  # by attempt
        self.arrivals: list[Arrival] = []
        self.gone_at: dict[int, float] = {}  # by rank: when the launcher has counted its task as lost or terminated
        self.lost_at: dict[int, float] = {}
        self.srun_died_at: float | None = None
        self.launcher_died_at: float | None = None
        self.outcome_at: float | None = None
        self.ended_at = float("inf")
        self.has_ended = False
        self.is_over = False  # the processes are being cleaned up
        self._checks = checks
        self._starts: Counter[tuple[int, Task]] = Counter()
        self.has_chief = plan.spec.chief
        self.hosts = [Host(f"n{number}", f"10.0.0.{number}") for number in range(max(plan.hosts) + 1)]
        self.host_processes: dict[str, list[Process]] = {host.name: [] for host in self.hosts}
        self.network = Network(self._latency)
        if plan.joined_workers:
            self.network.on_cluster = lambda payload: self.check("cluster", decode_cluster(payload)[1])
        self.outside = Process(self.world, "outside")
        self.launcher = Process(self.world, "launcher")
        self.host_processes["n0"].append(self.launcher)
        clock = JobClock(max_gap_seconds(plan.spec), self.launcher.time)
        self.state = JobState(plan.tasks, plan.spec, clock.now(), self._on_event)
        credentials = ServiceCredentials(_SHARED, b"")
        self.service = SimulatedService(self.state, credentials, clock)
        self.service.network, self.service.process, self.service.host = self.network, self.launcher, self.hosts[0]
        self.endpoint = ControlEndpoint((Address("10.0.0.0", 4000),), _SHARED)
        self.agents: list[AgentProcess] = []
        self.joined_workers: dict[int, AgentProcess] = {}
        self.hosts_by_address = {host.address: host for host in self.hosts}

    @property
    def num_other_ports(self) -> int:
        """How many times the cluster has formed again on other ports."""
        return sum(kind == "other_ports" for _, kind, _, _ in self.events)

    # What agents and scripts call

    def draw(self, low: float, high: float) -> float:
        """Return a random number; in a quiet run their mean, so that runs can be compared."""
        return (low + high) / 2 if self.plan.is_quiet else self.chance.uniform(low, high)

    def _latency(self) -> float:
        if self.plan.is_quiet:
            return 0.001
        draw = self.chance.random()
        if draw < 0.9:
            return 0.0003 + 0.003 * draw
        return self.chance.uniform(0.003, 0.03 if draw < 0.99 else 0.12)

    def find_service(self) -> ControlEndpoint | None:
        return self.endpoint

    def script_plan(self, agent: AgentProcess, task: Task) -> ScriptPlan:
        if agent.identity.rank == JOINING_RANK:
            number = next(number for number, worker in self.joined_workers.items() if worker is agent)
            return self.plan.joined_workers[number]
        return self.plan.scripts.get(task) or ScriptPlan()

    def count_start(self, rank: int, task: Task) -> int:
        """Return how many times this task was started before, on any rank."""
        key = (0, task)
        self._starts[key] += 1
        return self._starts[key] - 1

    @property
    def initial_workers(self) -> tuple[int, ...]:
        return tuple(range(self.plan.spec.workers or 0))

    def is_serving(self, address: str) -> bool:
        """Return whether a script that runs at this address has its server."""
        return any(
            script.has_server and not script.has_ended and str(self._address_of(script.agent)) == address
            for script in self.scripts
        )

    @staticmethod
    def _address_of(agent: AgentProcess) -> Address:
        port = agent.rendezvous.held_port
        return Address(agent.host.address, port.port if port is not None else 0)

    def is_silent(self, rank: int) -> bool:
        """Return whether the agent of this rank answers no reachability check."""
        agent = self.agents[rank] if rank < len(self.agents) else None
        return agent is None or agent.is_dead or agent.is_paused

    def record(self, kind: str, rank: int | None, text: str) -> None:
        if not self.is_over:
            self.history.append((self.world.now, kind, rank, text))

    def check(self, moment: str, subject: Any) -> None:
        for name, function in self._checks.get(moment, ()):
            text = function(self, subject)
            if text:
                self.violate(name, text)

    def violate(self, name: str, text: str) -> None:
        self.record("VIOLATION", None, f"{name}: {text}")
        if name not in {violation.invariant for violation in self.violations}:
            self.violations.append(Violation(self.plan.seed, name, text))

    def on_step(self, script: Script, step: int) -> None:
        if script.task.task_type == "chief":
            self.saved_step = max(self.saved_step, step // 2 * 2)

    def on_saved(self, script: Script) -> None:
        self.saved_scripts.add(id(script))
        self.record("has saved", script.rank, str(script))

    def on_position(self, script: Script, position: ShardPosition) -> None:
        self.saved_position = position

    def on_shard(self, process: ScriptProcess, number: int) -> None:
        self.check("shard is taken", (process, number))
        self.shard_log.append((self.world.now, "taken", process, number))

    def on_shard_done(self, process: ScriptProcess, number: int) -> None:
        self.shard_log.append((self.world.now, "done", process, number))

    def on_script_process_end(self, process: ScriptProcess) -> None:
        self.shard_log.append((self.world.now, "ended", process, -1))

    def on_script_end(self, script: Script) -> None:
        """Let the scripts that need a lost server fail a moment later."""
        if script.task.task_type == "ps" and script.cause not in ("told", "agent", "stop"):
            for other in self.scripts:
                seconds = other.plan.fails_after
                if seconds is not None and other.attempt == script.attempt and not other.has_ended:
                    other.main.at(self.world.now + seconds, other.main.end, 1, "exit")

    def on_agent_end(self, agent: AgentProcess) -> None:
        self.host_processes[agent.host.name].remove(agent)
        agent.ended_at = self.world.now
        if (self.has_ended or self.launcher.is_dead) and self.all_gone:
            self.world.stop()
        self.record("agent ends", agent.rank, f"{agent.name}: {agent.returncode}")
        if not agent.host.is_lost:
            self.network.end_of(agent)
        if agent.identity.rank != JOINING_RANK:
            if self.plan.is_local:
                delay = self.draw(0.002, 0.05)
                self.launcher.at(self.world.now + delay, self._on_agent_exit, agent.rank, agent.returncode)
            elif all(other.is_dead and not other.host.is_lost for other in self.agents):  # srun awaits lost hosts
                self.launcher.at(self.world.now + 0.1, self._on_all_exit, 0)

    # The launcher, as `launch.launcher.Launcher` calls the state and the service

    def _on_event(self, kind: str, task: str | None, text: str, **_: Any) -> None:
        self.events.append((self.world.now, kind, task, text))
        self.record(f"event {kind}", None, text)
        if kind == "outcome":
            self.outcome_at = self.world.now
        if kind == "lost":
            self.launcher.call_soon(self._note_lost, text)
        self.check("event", (kind, task, text))

    def _note_lost(self, text: str) -> None:
        for rank in self.present_ranks():
            if rank not in self.lost_at and self.is_gone(rank):
                self.lost_at[rank] = self.world.now

    # The only functions that read the launcher's table of tasks

    def present_ranks(self) -> range:
        return range(len(self.state.tasks.members) + self.state.tasks.num_joined)

    def is_gone(self, rank: int) -> bool:
        """Return whether the launcher counts the task of this rank as lost or terminated."""
        record = self.state.tasks.get(rank)
        return rank in self.present_ranks() and (record is None or record.is_gone)

    def name_of(self, rank: int) -> str:
        """Return the name of a member and its node, as events have it."""
        return str(self.state.tasks.members[rank])

    def _on_agent_exit(self, rank: int, returncode: int) -> None:
        if not self.has_ended:
            self.service.receiver.on_agent_exit(rank, returncode, self.service.clock.now())
            self.service.publish()

    def _on_all_exit(self, returncode: int) -> None:
        if self.has_ended:
            return
        end = f"it {describe_end(returncode)}."
        if self.state.tasks.count("running", "exited", "ready", "registered", "terminated"):
            outcome = Outcome(EXIT_TASK_LOST, f"srun ended before the job did: {end}")
        else:
            outcome = Outcome(EXIT_PREFLIGHT, f"srun could not start the tasks: {end}")
        self.state.on_spawner_exit(outcome, self.service.clock.now())
        self.service.publish()

    def _on_signal(self, name: str) -> None:
        if self.has_ended:
            return
        number = signal.Signals[name]
        request = stop_request_of(number, has_person=self.plan.has_person)
        is_repeated = request is StopRequest.CTRL_C and any(each == number for _, each in self.own_stops)
        if request is StopRequest.NOW or is_repeated:
            self.record("stop without grace", None, name)
        self.stops.append((self.world.now, number))
        self.own_stops.append((self.world.now, number))
        self.state.on_stop(number, f"the launcher received {name}", self.service.clock.now(), request)
        self.service.publish()

    async def _launch(self) -> None:
        await self.service.start()
        for rank, seconds in enumerate(self.plan.start_seconds):
            host = self.hosts[self.plan.hosts[rank]]
            agent = AgentProcess(self, f"agent {rank}", host, LocalTask(rank, host.name))
            self.agents.append(agent)
            self.host_processes[host.name].append(agent)
            if seconds is not None:
                agent.at(self.world.now + seconds, agent.begin)
        await self.service.wait_for_end()
        self.has_ended, self.ended_at = True, self.world.now
        self.record("the job has ended", None, str(self.state.outcome))
        await self.service.close()

    # The run

    def run(self) -> list[Violation]:
        world = self.world
        launching = self.launcher.create_task(self._launch())
        for fault in self.plan.faults:
            self.outside.at(fault.at, self._apply, fault)
        suspended = sum(fault.seconds for fault in self.plan.faults)
        limit = MAX_SECONDS + suspended
        launching.add_done_callback(lambda _: world.stop())
        is_over = world.run(limit)
        if launching.done() and launching.exception() is not None:
            self.violate("no_process_fails", f"the launcher has failed: {launching.exception()!r}")
        if is_over and not self.all_gone:
            world.run(world.now + _AFTER_END_SECONDS + suspended)
        self.check("end", None)
        processes = self._processes()
        for error in [*world.errors, *(failure for process in processes for failure in process.failures)]:
            self.violate("no_process_fails", error)
        self._end_tasks()
        return self.violations

    @property
    def all_gone(self) -> bool:
        return all(agent.is_dead for agent in (*self.agents, *self.joined_workers.values()))

    def _processes(self) -> list[Process]:
        processes: list[Process] = [self.launcher, *self.agents, *self.joined_workers.values()]
        for script in self.scripts:
            processes += script.processes
        return processes

    def _end_tasks(self) -> None:
        """Cancel what still runs, so that no coroutine is destroyed unfinished."""
        left = [process for process in self._processes() if process.has_tasks]
        self.is_over = True
        self.world.clear()
        for _ in range(5):
            for process in left:
                process.end_tasks()
            self.world.run(self.world.now + 10)
        self.world.errors.clear()

    # Faults

    def _apply(self, fault: Fault) -> None:
        if self.has_ended or self.launcher.is_dead:
            return
        self.record("fault", fault.target, f"{fault.kind} {fault.target} {fault.seconds or ''} {fault.detail or ''}")
        getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)

    def _agent(self, fault: Fault) -> AgentProcess | None:
        agent = self.agents[fault.target] if fault.target < len(self.agents) else None
        return None if agent is None or agent.is_dead or agent.child is None else agent

    def _script(self, fault: Fault) -> Script | None:
        agent = self._agent(fault)
        script = agent.child.script if agent is not None and agent.child is not None else None
        return None if script is None or script.has_ended else script

    def _disturb(self, kind: str, seconds: float, ranks: frozenset[int]) -> None:
        self.disturbances.append(Disturbance(kind, self.world.now, self.world.now + seconds, ranks))

    def _script_exits(self, fault: Fault) -> None:
        if (script := self._script(fault)) is not None:
            script.main.end(fault.detail, "exit")

    def _script_hangs(self, fault: Fault) -> None:
        if (script := self._script(fault)) is not None:
            self.hangs.append((self.world.now, script))
            script.main.pause()

    def _script_is_stopped(self, fault: Fault) -> None:
        if (script := self._script(fault)) is not None:
            if script.main.state.handles_stop:
                self.stop_scripts[len(self.stops)] = script
                self.stops.append((self.world.now, signal.Signals[fault.detail]))
            script.main.signal(fault.detail)

    def _agent_is_killed(self, fault: Fault) -> None:
        if (agent := self._agent(fault)) is not None:
            self.killed_agents[agent.rank] = self.world.now
            self._disturb(fault.kind, 2.4, self._all_ranks)
            agent.end(-9)

    @property
    def _all_ranks(self) -> frozenset[int]:
        return frozenset(range(self.plan.spec.num_tasks))

    def _agent_is_stopped(self, fault: Fault) -> None:
        if (agent := self._agent(fault)) is not None:
            self.stop_agents[len(self.stops)] = agent
            self.stops.append((self.world.now, signal.Signals[fault.detail]))
            agent.signal(fault.detail)

    def _agent_is_paused(self, fault: Fault) -> None:
        if (agent := self._agent(fault)) is not None:
            self._disturb(fault.kind, fault.seconds, frozenset({agent.rank}))
            self._pause([agent], fault)

    def _launcher_is_paused(self, fault: Fault) -> None:
        self._disturb(fault.kind, fault.seconds, self._all_ranks)
        self._pause([self.launcher], fault)

    def _job_is_suspended(self, fault: Fault) -> None:
        self._disturb(fault.kind, fault.seconds, self._all_ranks)
        self._pause([process for host in self.hosts for process in self.host_processes[host.name]], fault)

    def _pause(self, processes: list[Any], fault: Fault) -> None:
        for process in processes:
            process.pause()
            skew = self.draw(0, 0.3) if len(processes) > 1 else 0.0
            self.outside.at(self.world.now + fault.seconds + skew, self._resume, process, fault.detail)

    def _resume(self, process: Process, timers_first: bool) -> None:
        self.record("resumes", None, process.name)
        process.resume(timers_first=timers_first)

    def _connection_breaks(self, fault: Fault) -> None:
        agent = self._agent(fault)
        for connection in self.network.connections:
            if connection.client is agent and connection.call.status is None:
                connection.break_now()
        self._disturb(fault.kind, 2.0, self._all_ranks)  # a failure is held while a task is disconnected

    def _ranks_on(self, host: Host) -> frozenset[int]:
        return frozenset(agent.rank for agent in self.agents if agent.host is host)

    def _host_is_lost(self, fault: Fault) -> None:
        host = self.hosts[fault.target]
        if host.is_lost:
            return
        host.is_lost = True
        for agent in self.agents:
            if agent.host is host and not agent.is_dead:
                self.killed_agents[agent.rank] = self.world.now
        for process in list(self.host_processes[host.name]):
            if isinstance(process, AgentProcess):
                process.end(-9)

    def _partition(self, fault: Fault) -> None:
        host, (way, is_reset) = self.hosts[fault.target], fault.detail
        is_launcher_cut = host is self.hosts[0]
        is_all = is_reset or is_launcher_cut
        ranks, seconds = (self._all_ranks if is_all else self._ranks_on(host)), (4.0 if is_reset else 0.5)
        self._disturb(fault.kind, fault.seconds + seconds, ranks)
        host.cuts_in += way in ("both", "in")
        host.cuts_out += way in ("both", "out")
        if is_reset:
            for connection in self.network.connections:
                client = connection.client
                if isinstance(client, AgentProcess) and (is_launcher_cut or client.host is host):
                    connection.break_now()
        self.outside.at(self.world.now + fault.seconds, self._heal, host, way)

    def _heal(self, host: Host, way: str) -> None:
        self.record("heals", None, host.name)
        host.cuts_in -= way in ("both", "in")
        host.cuts_out -= way in ("both", "out")
        self.network.heal()

    def _launcher_is_stopped(self, fault: Fault) -> None:
        self.launcher.at(self.world.now, self._on_signal, fault.detail)

    def _launcher_is_killed(self, fault: Fault) -> None:
        self.launcher_died_at = self.world.now
        self.launcher.kill()
        self.world.stop()
        self.network.end_of(self.launcher)

    def _srun_is_killed(self, fault: Fault) -> None:
        if self.plan.is_local or not self.agents:
            return
        self.srun_died_at = self.srun_died_at or self.world.now
        self.launcher.at(self.world.now + 0.02, self._on_all_exit, -9)
        for agent in self.agents:
            if not agent.is_dead:
                self.outside.at(self.world.now + self.chance.uniform(0, 0.5), agent.end, -9)

    # Joined workers

    def _joined_worker_joins(self, fault: Fault) -> None:
        host = Host(f"g{fault.target}", f"10.0.1.{fault.target}")
        self.hosts_by_address[host.address] = host
        self.host_processes[host.name] = []
        worker = AgentProcess(self, f"joined worker {fault.target}", host, JoiningWorker(host.name))
        self.joined_workers[fault.target] = worker
        self.host_processes[host.name].append(worker)
        worker.begin()

    def _joined_worker_leaves(self, fault: Fault) -> None:
        worker = self.joined_workers.get(fault.target)
        if worker is not None and not worker.is_dead:
            worker.signal("SIGTERM")

    def _joined_worker_is_killed(self, fault: Fault) -> None:
        worker = self.joined_workers.get(fault.target)
        if worker is not None and not worker.is_dead:
            worker.end(-9)
