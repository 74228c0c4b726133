"""The invariants of a job: each a function whose first line states it, and which returns what contradicts it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.oracle import MOST_OTHER_PORTS, accepted, disturbed_seconds, pauses, settled_at
from tests.simulation.script import Arrival, Script, ScriptProcess
from tests.simulation.shards import SimulatedShards, done_shards
from tf4slurm.cluster import Cluster
from tf4slurm.roles import SCRIPT_TASK_TYPES, role_of

if TYPE_CHECKING:
    from tests.simulation.job import Job

Check = Callable[["Job", Any], str | None]
CHECKS: dict[str, list[tuple[str, Check]]] = {}
"""The invariants by the moment at which each is checked."""

_SLACK = 0.5
_NEVER = float("inf")
_LEFT_SECONDS = 4.0  # until the launcher counts a worker that has ended as lost
_TASK = re.compile(r"\b[a-z-]+/\d+")


def at(moment: str) -> Callable[[Check], Check]:
    """Check an invariant at each such moment of a run."""

    def add(check: Check) -> Check:
        CHECKS.setdefault(moment, []).append((check.__name__, check))
        return check

    return add


# The end of a job


@at("end")
def job_ends_in_bounded_job_time(job: Job, _: None) -> str | None:
    """A job ends within a bounded time, unless its launcher is killed."""
    if job.has_ended or job.launcher.is_dead:
        return None
    return f"it is in phase {job.state.phase.value} after {job.world.now:.0f} s"


@at("end")
def no_job_ends_without_an_outcome(job: Job, _: None) -> str | None:
    """A job that has ended has an outcome."""
    return "it has none" if job.has_ended and job.state.outcome is None else None


@at("end")
def outcome_is_that_of_the_oracle(job: Job, _: None) -> str | None:
    """Exit code and cause are those of the first event that ends the last attempt, to the stated accuracy."""
    outcome = job.state.outcome
    if outcome is None or job.launcher.is_dead:
        return None
    found = accepted(job)
    for each in found:
        is_cause = each.causes is None or (outcome.cause in each.causes if each.causes else outcome.cause is None)
        if outcome.exit_code in each.exit_codes and is_cause:
            return None
    expected = "; ".join(f"{each.what}: {each.exit_codes} after {each.earliest:.3f} s" for each in found)
    return f"exit code {outcome.exit_code}, cause {outcome.cause}: {outcome.reason!r}; expected: {expected or 'none'}"


@at("end")
def attempts_are_used(job: Job, _: None) -> str | None:
    """A job whose task has failed begins another attempt while one is left."""
    outcome = job.state.outcome
    failed = {script.task for script in job.scripts if script.attempt == job.state.attempt and script.returncode}
    if outcome is None or outcome.is_stop or outcome.exit_code in (0, 6, 7, 8) or outcome.cause not in failed:
        return None
    has_lost = bool(job.lost_at) or any(agent.ended_at < (job.outcome_at or 0.0) for agent in job.agents)
    is_over = has_lost or job.srun_died_at is not None
    if job.state.attempt - job.num_other_ports < job.plan.spec.max_attempts and not is_over:
        return f"it ends in attempt {job.state.attempt} of {job.plan.spec.max_attempts}: {outcome.reason}"
    return None


@at("end")
def other_ports_use_no_attempt(job: Job, _: None) -> str | None:
    """The cluster forms again on other ports at most five times, and each other attempt follows a failure."""
    num_failed = sum(kind == "attempt" for _, kind, _, _ in job.events)
    if job.num_other_ports > MOST_OTHER_PORTS:
        return f"it has done so {job.num_other_ports} times"
    if num_failed >= job.plan.spec.max_attempts or job.state.attempt != 1 + num_failed + job.num_other_ports:
        return (
            f"it is in attempt {job.state.attempt} after {num_failed} failures, {job.num_other_ports} times other ports"
        )
    return None


@at("script starts")
def task_whose_port_is_lost_gets_another(job: Job, started: Script) -> str | None:
    """A task whose server could not listen starts again on another port, which its agent does not hold after "held"."""
    if started.has_joined or job.disturbances:  # a failure is held while a task is disconnected
        return None
    of_attempt = (s for s in job.scripts if s.task == started.task and s.attempt == started.attempt)
    if any(s.port_failure is not None and s.cause == "exit" for s in of_attempt):
        return f"{started} starts on the port that it could not have"
    was_held = any(kind == "other_ports" and "do not hold them" in text for _, kind, _, text in job.events)
    if was_held and not started.agent.client.desired.releases_ports:
        return f"{started} starts on a port that its agent holds"
    return None


@at("end")
def every_process_ends(job: Job, _: None) -> str | None:
    """All agents and scripts end soon after the job or its launcher, also those of lost tasks."""
    if not (job.has_ended or job.launcher.is_dead):
        return None
    left = [agent.name for agent in (*job.agents, *job.joined_workers.values()) if not agent.is_dead and agent.child]
    left += [str(script) for script in job.scripts if script.is_alive]
    return f"still there after {job.world.now:.0f} s: {', '.join(left)}" if left else None


@at("end")
def lost_tasks_end(job: Job, _: None) -> str | None:
    """The agent of a lost task ends as soon as the launcher can reach it, or when it counts the launcher as lost."""
    spec = job.plan.spec
    for rank, time in job.lost_at.items():
        agent = next((agent for agent in (*job.agents, *job.joined_workers.values()) if agent.rank == rank), None)
        limit = settled_at(job, rank, time, spec.kill_wait_seconds + _LEFT_SECONDS)
        if min(job.ended_at, job.launcher_died_at or _NEVER) < limit:
            limit = settled_at(job, rank, time, spec.kill_wait_seconds + _LEFT_SECONDS + spec.launcher_loss_seconds)
        if agent is not None and not agent.host.is_lost and limit < min(agent.ended_at, job.world.now):
            return f"{agent.name}, lost at {time:.1f} s, ends at {agent.ended_at:.1f} s, limit {limit:.1f} s"
    return None


@at("event")
def every_loss_has_a_reason(job: Job, event: tuple[str, str | None, str]) -> str | None:
    """No task is lost, unless its agent was killed, was silent for the heartbeat timeout, or has ended."""
    kind, _, text = event
    if kind != "lost":
        return None
    now = job.world.now
    for agent in job.agents:
        rank = agent.rank
        if not text.startswith(f"{job.name_of(rank)} is lost"):
            continue
        if agent.is_dead:
            if agent.returncode == 7 and rank not in job.killed_agents and not job.launcher_died_at:
                silent = disturbed_seconds(job, rank, agent.ended_at - 16, agent.ended_at)
                if silent < 5:
                    return f"{text} ({agent.name} has given up at {agent.ended_at:.1f} s)"
            continue
        paused = [each for each in job.disturbances if each.kind in ("launcher is paused", "job is suspended")]
        extended = [14 + sum(max(0.0, p.end - max(p.begin, each.end)) for p in paused) for each in job.disturbances]
        recent = [
            each
            for each, seconds in zip(job.disturbances, extended, strict=True)
            if rank in each.ranks and each.begin < now < each.end + seconds
        ]
        kinds = {each.kind for each in recent}
        silent = sum(min(each.end, now) - each.begin for each in recent if each.kind == "agent is paused")
        is_broken = "connection breaks" in kinds and "agent is paused" in kinds
        has_given_up = any(begin < now < end + 14 and end - begin > 7 for begin, end in pauses(job))
        if not (silent > 6 or is_broken or has_given_up or "partition" in kinds):
            return f"{text} ({agent.name} runs)"
    return None


# Tasks


@at("script starts")
def no_two_live_tasks_have_one_role(job: Job, started: Script) -> str | None:
    """A task runs once: processes of its earlier starts, and on other ranks, have ended, or the launcher lost them."""
    for script in job.scripts:
        is_other = script.task == started.task and script is not started and script.is_alive
        if is_other and (script.rank == started.rank or not job.is_gone(script.rank)):
            return f"{started} starts while {script} runs"
    return None


@at("script starts")
def nothing_starts_after_the_outcome(job: Job, started: Script) -> str | None:
    """After the outcome no child starts, once its agent can know of it."""
    if job.outcome_at is None:
        return None
    rank = started.rank
    if started.agent.client.desired.terminate or job.world.now > settled_at(job, rank, job.outcome_at, _SLACK):
        return f"{started} starts at {job.world.now:.3f} s, after the outcome at {job.outcome_at:.3f} s"
    return None


@at("script is signalled")
def scripts_that_handle_stops_get_no_signal(job: Job, script: Script) -> str | None:
    """A script of which a process handles stop requests gets no stop signal from the agent."""
    for process in script.processes:
        limit = settled_at(job, script.rank, process.handles_stop_since, 0.1)
        if not process.is_dead and limit < job.world.now:
            return f"{script} is signalled, although it handles stops since {process.handles_stop_since:.3f} s"
    return None


@at("event")
def scripts_may_save(job: Job, event: tuple[str, str | None, str]) -> str | None:
    """A stop is decided when all scripts that handle it have saved, or when the grace period is over."""
    outcome = job.state.outcome
    if event[0] != "outcome" or outcome is None or not outcome.is_stop:
        return None
    began_at = next((time for time, kind, _, _ in reversed(job.events) if kind == "stopping"), None)
    if began_at is None or any(kind == "stop without grace" for _, kind, _, _ in job.history):
        return None
    is_over = job.world.now - began_at >= job.plan.spec.grace_period_seconds
    if is_over or any(s.has_ended and s.task.task_type == "ps" for s in job.scripts if s.attempt == job.state.attempt):
        return None
    for script in job.scripts:
        role = role_of(script.task.task_type, has_chief=job.has_chief)
        is_waited_for = role.is_waited_for and not role.is_wait_bounded and not script.has_joined
        if is_waited_for and not script.has_ended and id(script) not in job.saved_scripts:
            return f"{script} has not saved {job.world.now - began_at:.3f} s after the stop request"
    return None


@at("desired state")
def training_is_over_only_when_it_is(job: Job, process: ScriptProcess) -> str | None:
    """Servers are told that training is over only when every task that trains has ended or signalled completion."""
    desired = process.desired
    if not desired.is_training_over or desired.terminate or desired.attempt != process.script.attempt:
        return None
    of_attempt = [script for script in job.scripts if script.attempt == desired.attempt]
    completed = {script.task for script in of_attempt if script.has_completed}  # also if it is then restarted
    for script in of_attempt:
        trains = script.task.task_type in ("chief", "worker") and not script.has_joined
        has_ended = script.has_ended or script.task in completed or job.is_gone(script.rank)
        if trains and not has_ended:
            return f"{process} is told so, but {script} trains"
    return None


# Barriers


@at("barrier ends")
def barrier_passes_when_all_have_arrived(job: Job, mine: Arrival) -> str | None:
    """A barrier passes only if every task that it waits for has arrived."""
    if mine.error != "":
        return None
    for task in _expected(job, mine):
        if not any(_overlaps(job, mine, other) for other in _arrivals(job, mine, task)):
            return f"{mine.script} has passed {mine.arrival.name!r} without {task}"
    return None


@at("barrier ends")
def broken_barrier_names_tasks_that_did_not_arrive(job: Job, mine: Arrival) -> str | None:
    """A broken barrier names only tasks that it waits for and that are not there."""
    if not mine.error:
        return None
    names = set(_TASK.findall(mine.error))
    expected = {str(task): task for task in _expected(job, mine)}
    if unexpected := names - expected.keys():
        return f"{mine.arrival.name!r} names {sorted(unexpected)}: {mine.error}"
    if "is not for" in mine.error:
        return f"{mine.script} is refused: {mine.error}" if str(mine.script.task) in expected else None
    now = job.world.now
    if disturbed_seconds(job, mine.script.rank, mine.since, now):  # the answer is late
        return None
    hanging = {script for _, script in job.hangs}  # they do not see that an earlier barrier of the name has ended
    for name in sorted(names):
        for other in _arrivals(job, mine, expected[name]):
            rank = other.script.rank
            if other.script in hanging or disturbed_seconds(job, rank, other.since, now):
                continue
            if other.until >= now > settled_at(job, rank, other.since, _SLACK) and not job.is_gone(rank):
                return f"{name} waits since {other.since:.3f} s, but: {mine.error}"
    return None


@at("barrier ends")
def barrier_timeout_is_job_time(job: Job, mine: Arrival) -> str | None:
    """A barrier times out only after its timeout in job time, which leaves out pauses of the launcher."""
    if not mine.error or "in time" not in mine.error:
        return None
    others = [a for a in job.arrivals if a.arrival.name == mine.arrival.name and _overlaps(job, mine, a)]
    since, now = min(other.since for other in (mine, *others)), job.world.now
    passed = now - since - _paused_seconds(job, since, now)
    if passed < mine.arrival.timeout_seconds - _SLACK:
        return f"{mine.arrival.name!r} broke after {passed:.1f} s of job time: {mine.error}"
    return None


@at("barrier ends")
def barrier_ends(job: Job, mine: Arrival) -> str | None:
    """Each call of a barrier gets an answer soon after its timeout, unless its agent cannot reach the launcher."""
    if mine.error is not None or job.launcher.is_dead or job.is_gone(mine.script.rank) or job.has_ended:
        return None
    limit = settled_at(job, mine.script.rank, mine.since, mine.arrival.timeout_seconds + 1)
    return f"{mine.script} got none at {mine.arrival.name!r}" if limit < job.world.now else None


def _paused_seconds(job: Job, begin: float, end: float) -> float:
    """Return for how long the launcher was paused, without the part of each pause that counts as job time."""
    total, last = 0.0, begin
    for each in sorted(job.disturbances, key=lambda each: each.begin):
        if each.kind in ("launcher is paused", "job is suspended"):
            pause = min(each.end, end) - max(each.begin, last) - job.plan.spec.heartbeat_interval_seconds
            total += max(pause, 0.0)
            last = max(last, each.end)
    return total


def _expected(job: Job, mine: Arrival) -> list[Any]:
    roles = mine.arrival.roles or SCRIPT_TASK_TYPES
    return [task for task in job.plan.tasks if task.task_type in roles]


def _arrivals(job: Job, mine: Arrival, task: Any) -> list[Arrival]:
    attempt, name = mine.script.attempt, mine.arrival.name
    return [a for a in job.arrivals if a.script.task == task and a.script.attempt == attempt and a.arrival.name == name]


def _overlaps(job: Job, mine: Arrival, other: Arrival) -> bool:
    rank = other.script.rank
    is_unnoticed = rank in job.killed_agents and job.lost_at.get(rank, _NEVER) >= mine.since
    return is_unnoticed or settled_at(job, rank, other.until, _SLACK) >= mine.since


# Data shards


@at("shard is taken")
def shard_has_one_live_holder(job: Job, taken: tuple[ScriptProcess, int]) -> str | None:
    """A shard is leased again only if its earlier holder has ended, was lost, or was in an earlier attempt."""
    process, number = taken
    for _, kind, other, shard in job.shard_log:
        is_same = kind == "taken" and shard == number and other.script.attempt == process.script.attempt
        if is_same and not (other.is_dead or other.script.has_ended or job.is_gone(other.script.rank)):
            return f"{process} gets shard {number} of {other}"
    return None


@at("shards are over")
def all_shards_are_done(job: Job, shards: SimulatedShards) -> str | None:
    """When the launcher says that all shards are done, each was, in this attempt or before its position."""
    attempt = shards.process.script.attempt
    done = {n for _, kind, p, n in job.shard_log if kind == "done" and p.script.attempt == attempt}
    size, epochs = job.plan.shards
    missing = set(range(size * epochs)) - done - done_shards(job.shard_starts.get(attempt))
    return f"shards {sorted(missing)} were not done" if missing else None


@at("shards are refused")
def documented_recipe_is_not_refused(job: Job, refused: tuple[ScriptProcess, str]) -> str | None:
    """A process that starts from the last saved position gets shards, also if it starts late or again."""
    return f"{refused[0]}: {refused[1]}"


# Sizes


@at("cluster")
def clusters_have_present_workers_only(job: Job, cluster: Cluster) -> str | None:
    """A cluster contains no joined worker that has left before another one in it has joined."""
    ranks = {member.rank for member in cluster.members[job.plan.spec.num_tasks :]}
    joined_workers = [agent for agent in job.joined_workers.values() if agent.rank in ranks]
    for left in joined_workers:
        for joined in joined_workers:
            if settled_at(job, 0, left.ended_at, _LEFT_SECONDS) < joined.begun_at:
                return f"{joined.name} has joined after {left.name} has left, and both are in one cluster"
    return None


@at("end")
def messages_are_bounded(job: Job, _: None) -> str | None:
    """The size of messages is bounded by the number of tasks and of present workers."""
    limit = 1000 + 250 * (job.plan.spec.num_tasks + len(job.joined_workers)) + 100 * job.plan.shards[0]
    size = job.network.largest_message
    return f"a message has {size} bytes" if size > limit else None
