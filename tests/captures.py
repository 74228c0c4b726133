"""Environments of real steps, recorded on Slurm 22.05, each with the truth that `srun -l` told.

`common` are the variables that all tasks of a step share. Batch scripts are there too; they have no rank.
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


def _load(path: Path) -> Capture | None:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tasks = content["tasks"]
    if tasks[0]["rank"] is None:
        return None
    truth = content["ground_truth"]
    environs = {task["rank"]: {**content["common"], **task["env"]} for task in tasks}
    ranks = range(len(tasks))
    return Capture(path.stem, content["layout"], tuple(environs[r] for r in ranks), tuple(truth[str(r)] for r in ranks))


CAPTURES = tuple(capture for path in sorted(_DIRECTORY.glob("*.json")) if (capture := _load(path)))


def capture_of(name: str) -> Capture:
    return next(capture for capture in CAPTURES if capture.name == name)
