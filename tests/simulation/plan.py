"""The plan of one simulated job: its tasks and hosts, what its scripts do, and which faults meet it, from a seed.

A change of this file changes the meaning of every seed.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tf4slurm.cluster import Task
from tf4slurm.placement import place_tasks
from tf4slurm.spec.job_spec import JobSpec

StopMode = Literal["none", "polls", "saves"]
PortFault = Literal["taken", "held", "own"]
FAILURES = (1, 1, 2, 3, 77, -6, -9, -11)
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
REPEATED_SIGNALS = ("SIGINT", "SIGINT", "SIGTERM", "SIGQUIT")


@dataclass(frozen=True)
class ScriptPlan:
    """What the script of one task does.

    Attributes:
        import_seconds: Time until its TensorFlow server runs.
        steps, step_seconds: The training steps after which it exits; a server has none and does not exit.
        returncodes: The exit codes of its first start, the second, and so on; None for one that trains to the end.
        failure_seconds: How long after its server's start each failing start exits.
        stop: How it handles stop requests: not, by `should_stop`, or by `on_stop`.
        save_seconds: Time to save after a stop request.
        term: What SIGTERM does to a script that does not handle it.
        barriers: At which step it calls each barrier of the job; -1 for none.
        helpers: Seconds from import to the end of each further process; they also report steps.
        helper_stays: Whether the helpers outlive the main process.
        signals_completion: Whether it sends the completion signal before it exits.
        ends_with_training: Whether a server exits when training is over.
        fails_after: Seconds after the loss of a ps until it fails; None if it does not notice.
        takes_shards: Whether it takes data shards.
        port_faults: Why the server of its first start cannot listen, the second, and so on: another program has the
            port, the agent holds it, or the script wants a port of its own that is in use.
    """

    import_seconds: float = 0.5
    steps: int = 0
    step_seconds: float = 0.5
    returncodes: tuple[int | None, ...] = ()
    failure_seconds: tuple[float, ...] = ()
    stop: StopMode = "none"
    save_seconds: float = 0.5
    term: Literal["dies", "saves", "ignores"] = "dies"
    barriers: tuple[int, ...] = ()
    helpers: tuple[float, ...] = ()
    helper_stays: bool = False
    signals_completion: bool = False
    ends_with_training: bool = False
    fails_after: float | None = None
    takes_shards: bool = False
    port_faults: tuple[PortFault, ...] = ()


@dataclass(frozen=True)
class BarrierPlan:
    name: str
    roles: tuple[str, ...]
    timeout_seconds: float


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, to which rank, host or joined worker, when, and for how long or with which number.

    A partition of host 0, where the launcher runs, cuts it off from all other hosts.
    """

    kind: str
    at: float
    target: int = 0
    seconds: float = 0.0
    detail: Any = None


@dataclass(frozen=True)
class Plan:
    """One simulated job.

    Attributes:
        hosts: The number of the host of each rank; the launcher is on host 0, perhaps alone.
        start_seconds: When each agent starts; None for one that never does.
        is_quiet: The network has a constant latency, for runs that are compared.
    """

    seed: int
    spec: JobSpec
    is_local: bool
    hosts: tuple[int, ...]
    start_seconds: tuple[float | None, ...]
    scripts: dict[Task, ScriptPlan]
    barriers: tuple[BarrierPlan, ...] = ()
    is_elastic: bool = False
    shards: tuple[int, int] = (0, 0)
    saves_positions: bool = False
    joined_workers: tuple[ScriptPlan, ...] = ()
    faults: tuple[Fault, ...] = field(default=())
    is_quiet: bool = False

    @property
    def has_person(self) -> bool:
        """Whether SIGINT to the launcher is a person's Ctrl-C, and not a request of `tf4slurm cancel`."""
        return self.is_local

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(place_tasks(self.spec.counts, self.spec.placement, [""] * self.spec.num_tasks))


@functools.lru_cache(maxsize=4096)
def make_spec(**options: Any) -> JobSpec:
    """Return a spec; creating one takes longer than a part of the simulation."""
    return JobSpec(
        ("train",),
        heartbeat_interval_seconds=2.0,
        heartbeat_timeout_seconds=10.0,
        start_timeout_seconds=15.0,
        kill_wait_seconds=2.0,
        finish_timeout_seconds=8.0,
        data_python="python3",
        **options,
    )


def make_plan(seed: int) -> Plan:
    """Return the plan of this seed."""
    chance = random.Random(seed)
    has_chief = chance.random() < 0.75
    num_ps, num_workers = chance.choice((1, 1, 2)), chance.randint(int(not has_chief), 3)
    spares = chance.choice((0, 0, 1, 2))
    spec = make_spec(
        chief=has_chief,
        ps=num_ps,
        workers=num_workers,
        evaluators=int(chance.random() < 0.15),
        data_workers=int(chance.random() < 0.1),
        spares=spares,
        max_attempts=chance.choice((2, 3)) if spares else chance.choice((1, 1, 2, 3)),
        max_worker_restarts=chance.choice((0, 1, 3)),
        grace_period_seconds=chance.choice((0.0, 3.0, 6.0)),
        placement=chance.choice(("pack", "pack", "spread")) if not spares or chance.random() < 0.5 else "pack",
    )
    is_local = not spares and chance.random() < 0.4
    num_hosts = 1 if is_local else chance.randint(1, 4)
    first = int(not is_local and chance.random() < 0.2)
    hosts = tuple(first + min(rank * num_hosts // spec.num_tasks, num_hosts - 1) for rank in range(spec.num_tasks))
    plan = Plan(seed, spec, is_local, hosts, (), {})
    is_elastic = has_chief and chance.random() < 0.4
    barriers = _barriers(chance, plan.tasks) if chance.random() < 0.35 else ()
    shards = (chance.randint(2, 12), chance.choice((1, 1, 2))) if chance.random() < 0.3 else (0, 0)
    scripts = {task: _script(chance, task, len(barriers), has_chief=has_chief) for task in plan.tasks}
    if shards[0]:
        scripts = {task: _with_shards(script, task) for task, script in scripts.items()}
    joined_workers: tuple[ScriptPlan, ...] = ()
    if has_chief and is_elastic and chance.random() < 0.4:
        joined_workers = tuple(
            _script(chance, Task("worker", 0), 0, has_chief=True) for _ in range(chance.randint(1, 3))
        )
        if chance.random() < 0.5:  # it trains until the last joined worker has joined
            scripts[Task("chief", 0)] = dataclasses.replace(scripts[Task("chief", 0)], steps=20)
    starts = tuple(
        None if chance.random() < 0.005 else round(chance.uniform(0.05, 0.6), 3) for _ in range(spec.num_tasks)
    )
    _add_port_faults(random.Random(seed + 3_000_017), scripts)
    return Plan(
        seed,
        spec,
        is_local,
        hosts,
        starts,
        scripts,
        barriers,
        is_elastic,
        shards,
        chance.random() < 0.5,
        joined_workers,
        _faults(chance, spec, hosts, len(joined_workers), is_local=is_local),
    )


def make_compared_plans(seed: int) -> tuple[Plan, Plan]:
    """Return two plans without failures that differ only by a pause of the launcher or of the whole job."""
    plan, chance = make_plan(seed), random.Random(seed + 2_000_003)
    scripts = {
        task: dataclasses.replace(script, returncodes=(), failure_seconds=(), port_faults=())
        for task, script in plan.scripts.items()
    }
    starts = tuple(seconds or 0.1 for seconds in plan.start_seconds)
    quiet = dataclasses.replace(
        plan, scripts=scripts, start_seconds=starts, joined_workers=(), faults=(), is_quiet=True
    )
    at, timers_first = round(chance.uniform(0.0, 6.0), 3), chance.random() < 0.5
    fault = Fault("job is suspended", at, 0, round(chance.uniform(1, 200), 3), timers_first)
    if chance.random() < 0.3:
        fault = Fault("launcher is paused", at, 0, round(chance.uniform(1, 7), 3), timers_first)
    return quiet, dataclasses.replace(quiet, faults=(fault,))


def _barriers(chance: random.Random, tasks: Sequence[Task]) -> tuple[BarrierPlan, ...]:
    types = sorted({task.task_type for task in tasks} & {"chief", "worker", "ps", "evaluator"})
    result = []
    for number in range(chance.randint(1, 2)):
        roles = () if chance.random() < 0.5 else tuple(chance.sample(types, chance.randint(1, len(types))))
        result.append(BarrierPlan(f"barrier {number}", roles, chance.choice((3.0, 6.0, 12.0))))
    return tuple(result)


def _script(chance: random.Random, task: Task, num_barriers: int, *, has_chief: bool) -> ScriptPlan:
    kind = task.task_type
    trains = kind in ("chief", "worker")
    steps = chance.randint(3, 10) if kind == "chief" or (trains and not has_chief) else 0
    if kind == "worker" and has_chief and chance.random() < 0.4:
        steps = chance.randint(2, 10)
    returncodes: list[int | None] = []
    while len(returncodes) < 3 and chance.random() < (0.12 if kind != "worker" else 0.2):
        returncodes.append(chance.choice(FAILURES) if chance.random() < 0.95 else 0)
    runs_script = kind in ("chief", "worker", "ps", "evaluator")
    return ScriptPlan(
        import_seconds=round(chance.uniform(0.1, 1.5), 3),
        steps=steps,
        step_seconds=round(chance.uniform(0.2, 1.0), 3),
        returncodes=tuple(returncodes),
        failure_seconds=tuple(round(chance.uniform(0.0, 6.0), 3) for _ in returncodes),
        stop=chance.choice(("none", "polls", "saves")) if trains else "none",
        save_seconds=round(chance.choice((0.1, 0.5, 2.0, 10.0)), 3),
        term=chance.choice(("dies", "dies", "saves", "ignores")),
        barriers=tuple(-1 if chance.random() < 0.1 else chance.randint(0, 3) for _ in range(num_barriers))
        if runs_script
        else (),
        helpers=tuple(round(chance.uniform(0.2, 8.0), 3) for _ in range(chance.choice((0, 0, 0, 1, 2))))
        if trains
        else (),
        helper_stays=chance.random() < 0.3,
        signals_completion=trains and chance.random() < 0.5,
        ends_with_training=kind == "ps" and chance.random() < 0.5,
        fails_after=round(chance.uniform(0.05, 3.0), 3) if trains and chance.random() < 0.6 else None,
    )


def _add_port_faults(chance: random.Random, scripts: dict[Task, ScriptPlan]) -> None:
    """Let the server of a task in the cluster fail to listen, in a tenth of the jobs."""
    if chance.random() < 0.1:
        task = chance.choice([task for task in scripts if task.task_type in ("chief", "ps", "worker")])
        fault: PortFault = chance.choice(("taken", "taken", "held", "own"))
        count = chance.choice((1, 2, 20)) if fault == "taken" else 20
        scripts[task] = dataclasses.replace(scripts[task], port_faults=(fault,) * count)


def _with_shards(script: ScriptPlan, task: Task) -> ScriptPlan:
    return dataclasses.replace(script, takes_shards=task.task_type == "worker")


def _faults(
    chance: random.Random, spec: JobSpec, hosts: Sequence[int], num_joined: int, *, is_local: bool
) -> tuple[Fault, ...]:
    faults = [Fault("joined worker joins", round(chance.uniform(0.5, 10.0), 3), number) for number in range(num_joined)]
    for number in range(num_joined):
        if chance.random() < 0.7:
            kind = chance.choice(("joined worker leaves", "joined worker leaves", "joined worker is killed"))
            faults.append(Fault(kind, round(chance.uniform(2.0, 12.0), 3), number))
    others = [host for host in dict.fromkeys(hosts) if host]
    while len(faults) < 6 and chance.random() < 0.65:
        kind = chance.choice(_LOCAL_KINDS if is_local else _KINDS)
        at, rank = round(chance.uniform(0.0, 9.0), 3), chance.randrange(spec.num_tasks)
        host = chance.choice(others) if others else 0
        short = round(chance.choice((0.3, 1.0, 3.0, 6.0)) * chance.uniform(0.7, 1.3), 3)
        long = round(chance.choice((1.0, 5.0, 9.0, 12.0, 30.0)) * chance.uniform(0.8, 1.2), 3)
        if kind in ("host is lost", "partition") and not others:
            continue
        match kind:
            case "script exits":
                fault = Fault(kind, at, rank, detail=chance.choice((*FAILURES, 0)))
            case "partition":
                way = chance.choice(("both", "in", "out"))
                cut = 0 if 0 not in hosts and chance.random() < 0.5 else host
                fault = Fault(kind, at, cut, long, (way, chance.random() < 0.3))
            case "host is lost":
                fault = Fault(kind, at, host)
            case "launcher is paused" | "agent is paused":
                fault = Fault(kind, at, rank, chance.choice((short, long)), chance.random() < 0.5)
            case "job is suspended":
                fault = Fault(kind, at, rank, chance.choice((short, long, 100.0)), chance.random() < 0.5)
            case "launcher is stopped" | "agent is stopped" | "script is stopped":
                fault = Fault(kind, at, rank, detail=chance.choice(STOP_SIGNALS))
                if chance.random() < 0.3:
                    again = round(at + chance.uniform(0, 3), 3)
                    faults.append(Fault("launcher is stopped", again, 0, 0.0, chance.choice(REPEATED_SIGNALS)))
            case _:
                fault = Fault(kind, at, rank)
        faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at))


_LOCAL_KINDS = (
    *["script exits"] * 4,
    "agent is killed",
    "connection breaks",
    "launcher is paused",
    "agent is paused",
    "job is suspended",
    "job is suspended",
    "launcher is stopped",
    "agent is stopped",
    "script is stopped",
    "script hangs",
    "launcher is killed",
)
_KINDS = (
    *_LOCAL_KINDS,
    "host is lost",
    "host is lost",
    "partition",
    "partition",
    "connection breaks",
    "srun is killed",
)
