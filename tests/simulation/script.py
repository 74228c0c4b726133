"""Simulated scripts: one to three processes that train, wait at barriers, take shards, save, and exit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.plan import ScriptPlan
from tests.simulation.shards import SimulatedShards
from tests.simulation.world import Process
from tf4slurm.cluster import Task
from tf4slurm.control.messages import JOINING_RANK, BarrierArrival, DesiredState, PortFailure, ScriptState

if TYPE_CHECKING:
    from tests.simulation.agent import AgentProcess
    from tests.simulation.job import Job

_CHANNEL_SECONDS = 0.0005
_POLL_SECONDS = 0.2
_WAIT_SECONDS = 20.0
_ENDLESS = 10_000.0


@dataclasses.dataclass
class Arrival:
    """A call of a barrier. `error` is its result: None while it waits, or if the launcher does not answer."""

    script: Script
    arrival: BarrierArrival
    since: float
    left_at: float = float("inf")
    error: str | None = None

    @property
    def until(self) -> float:
        """The time when the call ended, by its result or with its script."""
        return min(self.left_at, self.script.ended_at if self.script.has_ended else float("inf"))


class Script:
    """One start of the child of a task: its main process and its helpers.

    Attributes:
        killed_by: What has killed it; None if it has exited by itself.
        cause: Why it has ended, for the history: "exit", or who killed it.
        port_failure: Why its server could not listen, as its agent reports it.
    """

    def __init__(self, job: Job, agent: AgentProcess, rank: int, task: Task, attempt: int, start_count: int) -> None:
        self.job, self.agent = job, agent
        self.rank, self.task, self.attempt, self.start_count = rank, task, attempt, start_count
        self.plan: ScriptPlan = job.script_plan(agent, task)
        self.started_at = job.world.now
        self.ended_at = 0.0
        self.returncode: int | None = None
        self.killed_by: Any = None
        self.cause = ""
        self.port_failure: PortFailure | None = None
        self.has_server = False
        self.has_completed = False
        self.is_terminated = False
        self.number = job.count_start(rank, task)
        self.main = ScriptProcess(self, 0)
        self.processes = [self.main]
        self._on_exit: Callable[[Script], None] = lambda _: None

    def __str__(self) -> str:
        return f"{self.task} (rank {self.rank}, attempt {self.attempt}, start {self.start_count})"

    @property
    def report_seconds(self) -> float:
        """Seconds until the agent learns of the exit."""
        return self.job.draw(0.0003, 0.005)

    @property
    def has_joined(self) -> bool:
        return self.agent.identity.rank == JOINING_RANK

    @property
    def has_ended(self) -> bool:
        return self.main.is_dead

    @property
    def is_alive(self) -> bool:
        return any(not process.is_dead for process in self.processes)

    def begin(
        self,
        connect: Callable[[ScriptProcess], None],
        on_state: Callable[[ScriptProcess, ScriptState | None], None],
        on_exit: Callable[[Script], None],
    ) -> None:
        self.connect, self.on_state, self._on_exit = connect, on_state, on_exit
        self.job.record("script starts", self.rank, str(self))
        self.job.check("script starts", self)
        self.job.scripts.append(self)
        self.main.create_task(self.main.run())

    def find_port_failure(self) -> PortFailure | None:
        """Return why the server of this start cannot listen."""
        if self.number >= len(self.plan.port_faults):
            return None
        fault = self.plan.port_faults[self.number]
        if fault == "taken":
            return "taken"
        return "held" if fault == "own" or not self.agent.client.desired.releases_ports else None

    def fork(self, seconds: float) -> None:
        """Start a helper, such as a data loader, with its own connection to the agent."""
        helper = ScriptProcess(self, len(self.processes))
        self.processes.append(helper)
        helper.create_task(helper.run_helper(seconds))

    def kill(self, returncode: int, killed_by: str) -> None:
        """Kill all processes."""
        for process in self.processes:
            if not process.is_dead:
                if process is self.main:
                    self.killed_by = killed_by if killed_by in ("liveness_probe", "stop") else None
                process.end(returncode, killed_by)

    def on_main_end(self, returncode: int, cause: str) -> None:
        job = self.job
        if job.is_over:
            return
        self.returncode, self.ended_at = returncode, job.world.now
        self.cause = "terminated" if self.is_terminated else cause
        job.record("script ends", self.rank, f"{self}: {returncode} ({self.cause})")
        job.on_script_end(self)
        seconds = self.report_seconds
        self.exited_at = job.world.now + (seconds if seconds > 0.1 else 0.0)
        self.agent.at(job.world.now + seconds, self._on_exit, self)
        for process in self.processes[1:]:
            if not self.plan.helper_stays and not process.is_dead:
                process.at(job.world.now + 0.01, process.end, 0, "exit")


class ScriptProcess(Process):
    """A process of a script: what a script's own code and `ScriptChannel` do."""

    def __init__(self, script: Script, number: int) -> None:
        job = script.job
        super().__init__(job.world, f"{script} process {number}")
        self.script, self.job, self.plan = script, job, script.plan
        self.number = number
        self.state = ScriptState()
        self.desired = DesiredState()
        self.handles_stop_since = float("inf")
        self._is_saving = False
        self._changed = asyncio.Event()
        job.host_processes[script.agent.host.name].append(self)

    # The script channel

    def connect(self) -> None:
        agent = self.script.agent
        agent.at(self.time() + _CHANNEL_SECONDS, self.script.connect, self)

    def on_desired(self, desired: DesiredState) -> None:
        self.desired = desired
        self.job.check("desired state", self)
        self._changed.set()
        if desired.stop_reason and self.plan.stop == "saves" and self.number == 0 and self.state.handles_stop:
            self._begin_save()

    def send(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)
        if self.state.handles_stop:
            self.handles_stop_since = min(self.handles_stop_since, self.time())
        agent = self.script.agent
        agent.at(self.time() + _CHANNEL_SECONDS, self.script.on_state, self, self.state)

    async def wait_until(self, condition: Callable[[], bool], seconds: float = _ENDLESS) -> bool:
        """Wait for the desired state; a pause does not shorten the time."""
        left = seconds
        while not condition():
            if left <= 0:
                return False
            self._changed.clear()
            since, pause = self.time(), min(left, _WAIT_SECONDS)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)
            left -= min(self.time() - since, pause)
        return True

    # Its end

    def end(self, returncode: int, cause: str) -> None:
        if self.is_dead:
            return
        self.kill()
        processes = self.job.host_processes[self.script.agent.host.name]
        processes[:] = [process for process in processes if process is not self]
        self.script.agent.at(self.time() + _CHANNEL_SECONDS, self.script.on_state, self, None)
        self.job.on_script_process_end(self)
        if self.number == 0:
            self.script.on_main_end(returncode, cause)

    async def exit(self, returncode: int, cause: str = "exit") -> None:
        """End this process; this does not return."""
        self.end(returncode, cause)
        await asyncio.sleep(_ENDLESS)

    def signal(self, name: str) -> None:
        self.at(self.time(), self._on_signal, name)

    def _on_signal(self, name: str) -> None:
        if self.state.handles_stop:
            self.send(stop_signal=name)
        elif self.plan.term == "dies":
            self.end(-15, "signal")
        elif self.plan.term == "saves":
            self.call_later(self.plan.save_seconds, self.end, 0, "signal")

    # What its code does

    async def run(self) -> None:
        script, plan, job = self.script, self.plan, self.job
        if plan.stop == "polls":
            self.connect()
            self.send(handles_stop=True)
        await asyncio.sleep(plan.import_seconds)
        if plan.stop != "polls":
            self.connect()
        script.port_failure = script.find_port_failure()
        if script.port_failure is not None:
            await self.exit(1)
        script.has_server = True
        if plan.stop == "saves":
            self.send(handles_stop=True)
            if self.desired.stop_reason:
                self._begin_save()
        if script.task.task_type == "chief" and job.plan.is_elastic:
            self.send(workers=job.initial_workers)
            self.create_task(self._use_workers())
        if plan.helpers:
            self.send(metrics=(("started", 1.0),))  # a process that never reports is not known to live
        for seconds in plan.helpers:
            script.fork(seconds)
        if script.number < len(plan.returncodes):
            returncode = plan.returncodes[script.number]
            assert returncode is not None
            self.call_later(plan.failure_seconds[script.number], self.end, returncode, "exit")
        shards = SimulatedShards(self) if plan.takes_shards and job.plan.shards[0] else None
        if shards is not None:
            await self._take_shards(shards)
        elif plan.steps:
            await self._train()
        else:
            await self._serve()

    async def _train(self) -> None:
        first = self.job.saved_step if self.script.task.task_type == "chief" else 0
        for step in range(first, first + self.plan.steps):
            await self._call_barriers(step - first)
            await asyncio.sleep(self.plan.step_seconds)
            self.send(step=step + 1)
            self.job.on_step(self.script, step + 1)
            if self.plan.stop == "polls" and self.desired.stop_reason:
                await self._save_and_exit()
        await self._finish()

    async def _serve(self) -> None:
        """Serve until the end: a ps, a worker of a coordinator, an evaluator, a data server."""
        if self.script.task.task_type == "evaluator":
            await self._call_barriers(None)
            await self.wait_until(lambda: self.desired.is_finishing)
            await asyncio.sleep(self.plan.save_seconds)
            await self.exit(0)
        await self._call_barriers(None)
        if self.plan.ends_with_training:
            await self.wait_until(lambda: self.desired.is_training_over)
            await asyncio.sleep(0.05)
            await self.exit(0, "told")
        step = 0
        while self.plan.stop != "none":
            await asyncio.sleep(0.7)
            step += 1
            if step % 4 == 0:
                self.send(step=step)
            if self.plan.stop == "polls" and self.desired.stop_reason:
                await self._save_and_exit()
        await asyncio.sleep(_ENDLESS)

    async def _finish(self) -> None:
        if self.plan.signals_completion:
            self.script.has_completed = True
            self.send(completion="done")
            await asyncio.sleep(0.1)
        if self.state.has_saved or self._is_saving:
            await self.wait_until(lambda: not self._is_saving)
        await self.exit(0)

    async def _call_barriers(self, step: int | None) -> None:
        """Call the barriers of this step, or without a step all of them, one after the other."""
        for barrier, at in zip(self.job.plan.barriers, self.plan.barriers, strict=False):
            is_called = at >= 0 if step is None else at == step
            if is_called and (not barrier.roles or self.script.task.task_type in barrier.roles):
                token = f"{self.name} {barrier.name} {self.time()}"
                arrival = BarrierArrival(barrier.name, token, barrier.timeout_seconds, barrier.roles)
                arrived = Arrival(self.script, arrival, self.time())
                self.job.arrivals.append(arrived)
                self.job.record("arrives", self.script.rank, f"{self.script} at {barrier.name}")
                self.send(barrier=arrival)
                has_ended = await self.wait_until(
                    lambda token=token: self.desired.released_barrier == token,  # type: ignore[misc]
                    barrier.timeout_seconds + 10,
                )
                arrived.error = self.desired.barrier_error if has_ended else None
                self.job.record("barrier ends", self.script.rank, f"{self.script} at {barrier.name}: {arrived.error!r}")
                self.job.check("barrier ends", arrived)
                arrived.left_at = self.time()
                self.send(barrier=None)

    async def _save_and_exit(self) -> None:
        await asyncio.sleep(self.plan.save_seconds)
        self.job.on_saved(self.script)
        await self.exit(0, "saved")

    def _begin_save(self) -> None:
        if not self._is_saving and not self.state.has_saved:
            self._is_saving = True
            self.call_later(self.plan.save_seconds, self._end_save)

    def _end_save(self) -> None:
        self._is_saving = False
        self.job.on_saved(self.script)
        self.send(has_saved=True)
        self._changed.set()

    async def _use_workers(self) -> None:
        """Use the workers that the launcher names, once they serve: a ClusterCoordinator."""
        while True:
            await self.wait_until(lambda: bool(self.desired.workers))
            await asyncio.sleep(0.3)
            used = tuple(sorted(index for index, address in self.desired.workers if self.job.is_serving(address)))
            if used != self.state.workers:
                self.send(workers=used)

    async def _take_shards(self, shards: SimulatedShards) -> None:
        await shards.run()
        await self._finish()

    async def run_helper(self, seconds: float) -> None:
        """Report steps as a data loader does, and exit before, with or after the main process."""
        self.connect()
        self.send(step=0, is_helper=True)
        left = seconds
        while left > 0:
            await asyncio.sleep(min(2.0, left))
            left -= 2.0
            self.send(metrics=(("loaded", left),))
        if not self.plan.helper_stays:
            await self.exit(0)
        await asyncio.sleep(_ENDLESS)
