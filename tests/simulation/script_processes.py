"""Merge the states of the processes of one script: a stand-in with the interface of the agent's own class."""

from __future__ import annotations

import dataclasses

from tf4slurm.control.messages import ScriptState


class ScriptProcesses:
    """The states of the processes of a script, which `merged` into one state."""

    def __init__(self) -> None:
        self._states: dict[int, ScriptState] = {}
        self._ended: list[ScriptState] = []

    def update(self, process: int, state: ScriptState) -> ScriptState:
        self._states[process] = state
        return self._merge()

    def end(self, process: int) -> ScriptState:
        state = self._states.pop(process, None)
        if state is not None:
            shards = tuple(dataclasses.replace(each, capacity=0) for each in state.shards)
            self._ended.append(dataclasses.replace(state, barrier=None, stop_signal=None, shards=shards))
        return self._merge()

    def clear(self) -> None:
        self._states.clear()
        self._ended.clear()

    def _merge(self) -> ScriptState:
        live, every = list(self._states.values()), [*self._ended, *self._states.values()]
        handling = [state for state in live if state.handles_stop] or [s for s in every if s.handles_stop]
        completions = [state.completion for state in every if state.completion is not None]
        strategy = next((s for s in reversed(every) if s.workers is not None or s.workers_error), ScriptState())
        return ScriptState(
            step=max((state.step for state in every if state.step is not None), default=None),
            handles_stop=any(state.handles_stop for state in every),
            has_saved=bool(handling) and all(state.has_saved for state in handling),
            completion="failed" if "failed" in completions else completions[0] if completions else None,
            barrier=next((state.barrier for state in live if state.barrier is not None), None),
            stop_signal=next((state.stop_signal for state in live if state.stop_signal is not None), None),
            shards=tuple(request for state in every for request in state.shards),
            workers=strategy.workers,
            workers_error=strategy.workers_error,
            unusable_workers=strategy.unusable_workers,
        )
