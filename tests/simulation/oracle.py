"""The oracle: how a job may end, from the true order of what happened, independent of the rules.

Each event that ends an attempt has a time before which the launcher cannot know it, and one after which it must. An
outcome is right if no other event must have been known before its event could be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.script import Script
from tf4slurm.cluster import Task
from tf4slurm.errors import EXIT_NO_PROGRESS, EXIT_NOT_FORMED, EXIT_PREFLIGHT, EXIT_TASK_LOST, exit_code_of
from tf4slurm.roles import role_of

if TYPE_CHECKING:
    from tests.simulation.job import Job

MOST_OTHER_PORTS = 5
REPORT_SECONDS = 0.15
"""The accuracy of the order of causes: the longest time from an exit until the launcher has its report."""
_NEVER = float("inf")
_TICK_SECONDS = 0.4
_OWN_ENDS = ("exit", "signal", "saved", "liveness_probe")


class Candidate(NamedTuple):
    """A way in which the job may have ended. `causes` is None if any task, or none, may be named."""

    exit_codes: tuple[int, ...]
    causes: frozenset[Task] | None
    earliest: float
    latest: float
    what: str


_RESTARTED = ("worker", "joined worker", "evaluator", "data server")


def candidates(job: Job) -> list[Candidate]:
    """Return all ways in which the last attempt may have ended the job."""
    found = [*_failures(job), *_losses(job)]
    if job.state.attempt > 1:
        found += [c._replace(exit_codes=(EXIT_NO_PROGRESS,), latest=_NEVER) for c in found]
    return [*found, *_completions(job), *_stops(job), *_others(job)]


def accepted(job: Job) -> list[Candidate]:
    outcome_at = job.outcome_at if job.outcome_at is not None else _NEVER
    found = [candidate for candidate in candidates(job) if candidate.earliest <= outcome_at]
    first = min((candidate.latest for candidate in found), default=_NEVER)
    return [candidate for candidate in found if candidate.earliest <= first]


def settled_at(job: Job, rank: int, time: float, seconds: float) -> float:
    """Return the time `seconds` later, plus the disturbances of this rank in between."""
    end = time + seconds
    for each in sorted(job.disturbances, key=lambda each: each.begin):
        if rank in each.ranks and each.begin < end and each.end > time - 0.5:
            end += each.end - max(each.begin, time - 0.5) + 0.7
    return end


def disturbed_seconds(job: Job, rank: int, begin: float, end: float) -> float:
    """Return for how long this rank was disturbed in a time."""
    parts = (min(each.end, end) - max(each.begin, begin) for each in job.disturbances if rank in each.ranks)
    return sum(part for part in parts if part > 0)


def _scripts_of_last_attempt(job: Job) -> list[Script]:
    return [script for script in job.scripts if script.attempt == job.state.attempt and not script.has_joined]


def _failures(job: Job) -> list[Candidate]:
    """The exits with which a script ends the attempt."""
    ended = [s for s in _scripts_of_last_attempt(job) if s.has_ended and s.cause in _OWN_ENDS]
    stopped_at = min((stop[0] for stop in job.stops), default=_NEVER)
    certain = (time for number, (time, _) in enumerate(job.stops) if not _may_be_lost(job, number))
    stopping_at = min((settled_at(job, 0, time, REPORT_SECONDS) for time in certain), default=_NEVER)
    early = [s for s in ended if s.task.task_type == "ps" and s.returncode == 0]
    found = []
    for script in ended:
        role = role_of(script.task.task_type, has_chief=job.has_chief)
        is_restarted = role.name in _RESTARTED and script.start_count <= job.plan.spec.max_worker_restarts
        if script.port_failure is not None:
            if not _is_last_port_failure(job, script):
                if job.disturbances or job.killed_agents:  # another failure may be held: then this one counts, too
                    causes = frozenset({script.task})
                    found.append(Candidate((1,), causes, script.ended_at, _NEVER, f"{script}: its port"))
                continue
            is_restarted = False
        is_decisive = bool(script.returncode) and not role.is_wait_bounded
        is_consequence = any(_is_known_to_break(job, rank, script.ended_at) for rank in job.killed_agents)
        if is_restarted or is_consequence or script.ended_at > stopping_at or not (is_decisive or script in early):
            continue
        if script.ended_at > _known_to_be_trained_at(job):
            continue  # only evaluators are not done, so that nothing repeats the training
        code = exit_code_of(script.returncode or 0)
        if script.killed_by == "liveness_probe":
            code = EXIT_TASK_LOST
        # A failure is held while any task is disconnected, and a stop request in this time wins.
        latest = max(settled_at(job, rank, script.ended_at, REPORT_SECONDS) for rank in range(len(job.agents)))
        if script.ended_at > min(_trained_at(job), stopped_at):
            latest = _NEVER  # it is a failure only if the launcher does not know the earlier event yet
        if script.agent.ended_at < settled_at(job, script.rank, script.ended_at, REPORT_SECONDS):
            latest = _NEVER  # the launcher may never know the exit
        if script in early:
            seconds = job.plan.spec.finish_timeout_seconds + _TICK_SECONDS + REPORT_SECONDS
            latest = settled_at(job, script.rank, script.ended_at, seconds)
            found.append(Candidate((EXIT_TASK_LOST,), frozenset({script.task}), script.ended_at, latest, str(script)))
            continue
        before = [s for s in early if s.ended_at < settled_at(job, s.rank, script.ended_at, REPORT_SECONDS)]
        known = [s for s in before if settled_at(job, s.rank, s.ended_at, REPORT_SECONDS) < script.ended_at]
        if not known:
            found.append(Candidate((code,), frozenset({script.task}), script.ended_at, latest, str(script)))
        for other in before:
            causes = frozenset({other.task})
            found.append(Candidate((EXIT_TASK_LOST,), causes, script.ended_at, latest, f"{script} after {other}"))
    return found


def _is_last_port_failure(job: Job, script: Script) -> bool:
    """Return whether the failure of a server to listen fails the attempt, so that the cluster does not form again."""
    is_released = script.port_failure == "held" and script.agent.client.desired.releases_ports
    return is_released or job.num_other_ports >= MOST_OTHER_PORTS


def _is_known_to_break(job: Job, rank: int, time: float) -> bool:
    """Return whether an agent's end, which ends the job, is known at a time: later failures are consequences."""
    agent = job.agents[rank]
    killed_at = job.killed_agents[rank]
    if job.plan.spec.spares or agent.host.is_lost or not agent.has_registered or _has_finished(job, rank):
        return False
    if killed_at < (job.srun_died_at or 0.0) < killed_at + job.plan.spec.reconnect_seconds + _TICK_SECONDS:
        return False  # a failure that is held then is the outcome
    return not _others_disturbed(job, rank, killed_at) and killed_at + REPORT_SECONDS < time


def _has_finished(job: Job, rank: int) -> bool:
    """Return whether a script of this rank has ended by itself, so that the job may not need the task any more."""
    return any(script.rank == rank and script.cause in _OWN_ENDS for script in _scripts_of_last_attempt(job))


def _others_disturbed(job: Job, rank: int, time: float) -> bool:
    near = (each for each in job.disturbances if each.begin < time + 5 and each.end > time - 5)
    return any(each.kind != "agent is killed" for each in near)


def _losses(job: Job) -> list[Candidate]:
    """The agents that were lost, or could seem to be."""
    spec, found = job.plan.spec, []
    for agent in job.agents:
        rank = agent.rank
        names = {script.task for script in job.scripts if script.rank == rank} | {job.plan.tasks[rank]}
        is_known = not spec.spares and spec.placement != "spread"
        causes = frozenset(names) if is_known else None
        early = {s.task for s in job.scripts if s.task.task_type == "ps" and s.returncode == 0}
        if causes is not None:
            causes |= early
        if rank in job.killed_agents:
            time = job.killed_agents[rank]
            seconds = spec.task_loss_seconds if agent.host.is_lost else spec.reconnect_seconds
            seconds = 0.1 if job.plan.is_local else seconds + 2 * _TICK_SECONDS + REPORT_SECONDS
            is_certain = not spec.spares and agent.has_registered and not _has_finished(job, rank)
            is_certain = is_certain and time < _trained_at(job)
            latest = settled_at(job, rank, time, seconds) if is_certain else _NEVER
            found.append(Candidate((EXIT_TASK_LOST,), causes, time, latest, f"{agent.name} was killed"))
        elif agent.ended_at < (job.outcome_at or _NEVER):
            found.append(Candidate((EXIT_TASK_LOST,), causes, agent.ended_at - 3, _NEVER, f"{agent.name} has ended"))
        begins = [each.begin for each in job.disturbances if rank in each.ranks and each.kind != "job is suspended"]
        if begins:
            found.append(Candidate((EXIT_TASK_LOST,), causes, min(begins), _NEVER, f"{agent.name} was disturbed"))
    return found


def _trained_at(job: Job) -> float:
    """Return when all tasks that the job waits for had exited with 0, but evaluators."""
    return min((candidate.earliest for candidate in _completions(job)), default=_NEVER)


def _known_to_be_trained_at(job: Job) -> float:
    """Return when the launcher certainly knows that."""
    done, time = _trained(job), _trained_at(job)
    return max((settled_at(job, script.rank, time, REPORT_SECONDS) for script in done), default=_NEVER)


def _trained(job: Job) -> list[Script]:
    """Return the scripts of all tasks that the job waits for but evaluators, if all have exited with 0."""
    done: list[Script] = []
    for task in job.plan.tasks:
        role = role_of(task.task_type, has_chief=job.has_chief)
        if role.is_waited_for and not role.is_wait_bounded:
            ends = [s for s in _scripts_of_last_attempt(job) if s.task == task and s.has_ended and s.returncode == 0]
            if not ends:
                return []
            done.append(ends[-1])
    return done


def _completions(job: Job) -> list[Candidate]:
    """The exits of the tasks that the job waits for, all with 0."""
    done = _trained(job)
    if not done:
        return []
    time = max(script.ended_at for script in done)
    seconds = REPORT_SECONDS + (job.plan.spec.finish_timeout_seconds + _TICK_SECONDS if job.plan.spec.evaluators else 0)
    latest = max(settled_at(job, script.rank, time, seconds) for script in done)
    return [Candidate((0,), frozenset(), time, latest, "all have exited with 0")]


def _stops(job: Job) -> list[Candidate]:
    found = []
    firsts = [
        settled_at(job, _rank_of_stop(job, number), time, REPORT_SECONDS) for number, (time, _) in enumerate(job.stops)
    ]
    for number, (time, signal_number) in enumerate(job.stops):
        if any(first < time for first in firsts[:number] if not _may_be_lost(job, firsts.index(first))):
            continue
        grace = job.plan.spec.grace_period_seconds + _TICK_SECONDS + REPORT_SECONDS
        latest = settled_at(job, _rank_of_stop(job, number), time, grace)
        latest = _NEVER if _may_be_lost(job, number) else latest
        found.append(Candidate((128 + signal_number,), frozenset(), time, latest, "a stop request"))
    return found


def _rank_of_stop(job: Job, number: int) -> int:
    """Return the rank whose agent or script got a stop request; 0 for the launcher."""
    script, agent = job.stop_scripts.get(number), job.stop_agents.get(number)
    return script.rank if script is not None else agent.rank if agent is not None else 0


def _may_be_lost(job: Job, number: int) -> bool:
    """Return whether the process that got a stop request may have ended before the launcher learned of it."""
    time = job.stops[number][0]
    script, agent = job.stop_scripts.get(number), job.stop_agents.get(number)
    agent = script.agent if script is not None else agent
    if agent is None:
        return False
    if any(hanging is script for _, hanging in job.hangs):
        return True
    if script is not None and _is_over(job, script, time):
        return True
    ended_at = min(agent.ended_at, script.ended_at if script is not None and script.has_ended else _NEVER)
    return ended_at < settled_at(job, agent.rank, time, REPORT_SECONDS + 0.5) or agent.rank in job.lost_at


def _is_over(job: Job, script: Script, time: float) -> bool:
    """Return whether the attempt of a script was over at a time. The agent then ends it, and drops what it reports."""
    return any(kind == "rendezvous" and script.started_at < at <= time for at, kind, _, _ in job.events)


def _others(job: Job) -> list[Candidate]:
    found = []
    if job.srun_died_at is not None:
        time = job.srun_died_at
        codes = (EXIT_TASK_LOST, EXIT_PREFLIGHT)
        found.append(Candidate(codes, frozenset(), time, settled_at(job, 0, time, 0.2), "srun was killed"))
    elif not job.plan.is_local and job.agents and all(agent.is_dead for agent in job.agents):
        time = max(agent.ended_at for agent in job.agents)
        if time < (job.outcome_at or _NEVER):
            codes = (EXIT_TASK_LOST, EXIT_PREFLIGHT)
            found.append(Candidate(codes, frozenset(), time, _NEVER, "all agents have ended"))
    for begin, end in pauses(job):
        if end - begin > 7:
            found.append(Candidate((EXIT_TASK_LOST,), frozenset(), begin, _NEVER, "the launcher was paused"))
    late = [each.begin for each in job.disturbances]
    late += job.killed_agents.values()
    if None in job.plan.start_seconds or late:
        time = 0.0 if None in job.plan.start_seconds else min(late)
        found.append(Candidate((EXIT_NOT_FORMED,), None, time, _NEVER, "the cluster may not form"))
    return found


def pauses(job: Job) -> list[tuple[float, float]]:
    """Return begin and end of each pause of the launcher; overlapping ones are one."""
    merged: list[tuple[float, float]] = []
    for each in sorted(job.disturbances, key=lambda each: each.begin):
        if each.kind in ("launcher is paused", "job is suspended"):
            begin, end = merged.pop() if merged and each.begin <= merged[-1][1] else (each.begin, each.end)
            merged.append((begin, max(end, each.end)))
    return merged
