"""Environments of real steps, recorded on Slurm 22.05 and 26.05, with the node of each rank as printed by `srun -l`.

`common` are the variables that all tasks of a step share. Batch scripts and interactive shells are included, without
a rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).parent / "data" / "slurm-captures"


@dataclass(frozen=True)
class Capture:
    """One step: the command that made it, the environment of each task by rank, and the node of each rank."""

    name: str
    layout: str
    environs: tuple[dict[str, str], ...]
    nodes_by_rank: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _load(content: dict[str, Any], name: str) -> Capture:
    tasks, truth = content["tasks"], content["ground_truth"]
    environs = {task["rank"]: {**content["common"], **task["env"]} for task in tasks}
    ranks = range(len(tasks))
    return Capture(name, content["layout"], tuple(environs[r] for r in ranks), tuple(truth[str(r)] for r in ranks))


_CONTENTS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(_DIRECTORY.glob("*.json"))}
_STEPS = {name for name, content in _CONTENTS.items() if content["tasks"][0]["rank"] is not None}

CAPTURES = tuple(_load(_CONTENTS[name], name) for name in sorted(_STEPS))
OUTSIDE_OF_STEPS: dict[str, dict[str, str]] = {
    name: content["common"] for name, content in _CONTENTS.items() if name not in _STEPS
}
"""The environments of batch scripts and interactive shells."""


def capture_of(name: str) -> Capture:
    return next(capture for capture in CAPTURES if capture.name == name)
