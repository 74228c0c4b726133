"""Merge the states of a script's processes into one. `RULES` has one rule for each field of `ScriptState`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tf4slurm.control.messages import ScriptState, ShardRequest
from tf4slurm.scripts.channel import MAX_METRICS

_MAX_ENDED_REQUESTS = 64
_MAX_ENDED_DONE = 8_192  # shards
_STRATEGY = ("workers", "workers_error", "unusable_workers")
_DEFAULT = ScriptState()


@dataclass(frozen=True)
class _Process:
    """One process of a script, or the ended processes of one kind merged into one: all helpers, or all others.

    A helper is a fork of another process of the script, or a process that multiprocessing has started.

    Attributes:
        state: The latest state.
        changed_at: The number of the message that last changed a field of `ScriptState`, by the field's name.
        metrics_at: The number of the message that last changed a metric, by the metric's name.
    """

    state: ScriptState = _DEFAULT
    changed_at: Mapping[str, int] = field(default_factory=dict)
    metrics_at: Mapping[str, int] = field(default_factory=dict)

    def last_change(self, *names: str) -> int:
        return max(self.changed_at.get(name, 0) for name in names)


_Processes = Sequence[_Process]
_Rule = Callable[[_Processes, _Processes], Any]


def _of_furthest(name: str) -> _Rule:
    def choose(live: _Processes, ended: _Processes) -> Any:
        stepped = [each for each in live if each.state.step is not None]
        if stepped:
            return getattr(max(stepped, key=lambda each: each.state.step or 0).state, name)
        stepped = [each for each in ended if each.state.step is not None]
        return getattr(max(stepped, key=lambda each: each.last_change("step")).state, name) if stepped else None

    return choose


def _latest_metrics(live: _Processes, ended: _Processes) -> tuple[tuple[str, float], ...]:
    found: dict[str, tuple[int, float]] = {}
    for each in (*ended, *live):
        for name, value in each.state.metrics:
            at = each.metrics_at[name]
            if name not in found or at >= found[name][0]:
                found[name] = (at, value)
    kept = sorted(found, key=lambda name: found[name][0])[-MAX_METRICS:] if len(found) > MAX_METRICS else found
    return tuple((name, value) for name, (_, value) in found.items() if name in kept)


def _any_handles_stop(live: _Processes, _ended: _Processes) -> bool:
    return any(each.state.handles_stop for each in live)


def _all_have_saved(live: _Processes, ended: _Processes) -> bool:
    waited = all(each.state.has_saved for each in live if each.state.handles_stop)
    return waited and any(each.state.has_saved for each in (*live, *ended))


def _completion(live: _Processes, ended: _Processes) -> str | None:
    found = {each.state.completion for each in (*live, *ended) if not each.state.is_helper} - {None}
    if not found and all(each.state.is_helper for each in live):
        found = {each.state.completion for each in (*live, *ended)}
    return "failed" if "failed" in found else "done" if "done" in found else None


def _first_barrier(live: _Processes, _ended: _Processes) -> Any:
    waiting = [each for each in live if each.state.barrier is not None]
    return min(waiting, key=lambda each: each.last_change("barrier")).state.barrier if waiting else None


def _latest_stop_signal(live: _Processes, _ended: _Processes) -> str | None:
    stopped = [each for each in live if each.state.stop_signal is not None]
    return max(stopped, key=lambda each: each.last_change("stop_signal")).state.stop_signal if stopped else None


def _shards(live: _Processes, ended: _Processes) -> tuple[ShardRequest, ...]:
    given_back = [
        dataclasses.replace(request, capacity=0, start=None)
        for each in ended
        for request in each.state.shards
        if request.done
    ][-_MAX_ENDED_REQUESTS:]
    while sum(len(request.done) for request in given_back) > _MAX_ENDED_DONE:
        del given_back[0]
    return (*given_back, *_without_repeated_starts(request for each in live for request in each.state.shards))


def _without_repeated_starts(requests: Iterable[ShardRequest]) -> Iterable[ShardRequest]:
    """Yield the shard requests, without repetitions of the same `start`.

    `start`, the position from which to continue, may be long. If several processes send the same one, only the first
    request keeps it.
    """
    seen = set()
    for request in requests:
        key = (request.name, request.size, request.epochs, request.fingerprint, request.start)
        yield dataclasses.replace(request, start=None) if request.start is not None and key in seen else request
        seen.add(key)


def _of_strategy(name: str) -> _Rule:
    def choose(live: _Processes, ended: _Processes) -> Any:
        for processes in (live, ended):
            found = [each for each in processes if each.state.workers is not None or each.state.workers_error]
            if found:
                return getattr(max(found, key=lambda each: each.last_change(*_STRATEGY)).state, name)
        return getattr(_DEFAULT, name)

    return choose


def _latest(name: str) -> _Rule:
    def choose(live: _Processes, ended: _Processes) -> Any:
        for processes in (live, ended):
            found = [each for each in processes if getattr(each.state, name)]
            if found:
                return getattr(max(found, key=lambda each: each.last_change(name)).state, name)
        return getattr(_DEFAULT, name)

    return choose


def _all_helpers(live: _Processes, ended: _Processes) -> bool:
    return bool(live or ended) and all(each.state.is_helper for each in (*live, *ended))


RULES: Mapping[str, tuple[_Rule, str]] = {
    "step": (
        _of_furthest("step"),
        "The highest step of live processes. If none has a step, that of the last that ended.",
    ),
    "steps_per_second": (_of_furthest("steps_per_second"), "That of the same process."),
    "metrics": (_latest_metrics, "The last value of each name that any process has reported."),
    "handles_stop": (_any_handles_stop, "Whether a live process handles stop requests."),
    "has_saved": (_all_have_saved, "Whether a process has saved, and all live processes that handle the stop have."),
    "completion": (
        _completion,
        '"failed" if a process that is no helper has sent it, else "done". Signals of helpers count only if no other '
        "process lives or has sent one.",
    ),
    "barrier": (_first_barrier, "That of the live process that has waited longest. Others follow one by one."),
    "stop_signal": (_latest_stop_signal, "The last one that a live process has received."),
    "shards": (_shards, "Those of all live processes. An ended process gives its shards back, except those done."),
    "workers": (_of_strategy("workers"), "That of the process that last reported workers, a live one if possible."),
    "workers_error": (_of_strategy("workers_error"), "That of the same process."),
    "unusable_workers": (_of_strategy("unusable_workers"), "That of the same process."),
    "ps_bytes": (_latest("ps_bytes"), "That of the process that last reported them, a live one if possible."),
    "checkpoint": (_latest("checkpoint"), "That of the process that last reported it, a live one if possible."),
    "is_helper": (_all_helpers, "Whether all processes are helpers."),
}
"""How to merge each field of `ScriptState`, by its name: a function of the live and the ended processes, and its
description."""


class ScriptProcesses:
    """The processes of a script, and one state that is merged from their states by `RULES`.

    Any hashable key identifies a process.
    """

    def __init__(self) -> None:
        self._live: dict[Hashable, _Process] = {}
        self._ended: dict[bool, _Process] = {}  # by `is_helper`; all processes of a kind are merged into one
        self._num_messages = 0

    def __contains__(self, process: Hashable) -> bool:
        """Return whether the process is live: `update` was called for it, and neither `end` nor `clear` since."""
        return process in self._live

    def update(self, process: Hashable, state: ScriptState) -> ScriptState:
        """Set the state of a live process, which may be new. Return the merged state of all processes."""
        self._num_messages += 1
        before = self._live.get(process, _Process())
        old, new = vars(before.state), vars(state)
        metrics = set(before.state.metrics)
        self._live[process] = _Process(
            state,
            {**before.changed_at, **{name: self._num_messages for name in new if new[name] != old[name]}},
            {**before.metrics_at, **{name: self._num_messages for name, _ in set(state.metrics) - metrics}},
        )
        return self._merged()

    def end(self, process: Hashable) -> ScriptState:
        """Mark a process as ended. Return the merged state of all processes, including ended ones."""
        process_state = self._live.pop(process, None)
        if process_state is not None:
            kind = process_state.state.is_helper
            earlier = self._ended.get(kind)
            ended = [process_state] if earlier is None else [earlier, process_state]
            self._ended[kind] = _Process(
                _merge([], ended),
                {name: max(each.last_change(name) for each in ended) for name in RULES},
                _latest_numbers(each.metrics_at for each in ended),
            )
        return self._merged()

    def clear(self) -> None:
        """Forget all processes, because another script starts."""
        self._live.clear()
        self._ended.clear()

    def _merged(self) -> ScriptState:
        return _merge(list(self._live.values()), list(self._ended.values()))


def _merge(live: _Processes, ended: _Processes) -> ScriptState:
    return ScriptState(**{name: rule(live, ended) for name, (rule, _) in RULES.items()})


def _latest_numbers(numbers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for each in numbers:
        result.update({name: max(number, result.get(name, 0)) for name, number in each.items()})
    return result
