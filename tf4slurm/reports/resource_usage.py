"""What the tasks of each role used, and what the job had been given: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf4slurm.reports.curves import Curves, known, mean, over_tasks


@dataclass(frozen=True)
class TaskNeeds:
    """What one task used: means are over the time of training; None where nothing was measured.

    Attributes:
        cores: Processor seconds per second, mean.
        memory_bytes: The most that was seen at once.
        sent_bytes, received_bytes: Over its port, in all.
        steps: Steps per second that it reported itself, mean.
    """

    name: str
    cores: float | None
    memory_bytes: float
    sent_bytes: float
    received_bytes: float
    steps: float | None

    @property
    def role(self) -> str:
        return self.name.partition("/")[0]

    @property
    def bytes_moved(self) -> float:
        return self.sent_bytes + self.received_bytes


@dataclass(frozen=True)
class JobNeeds:
    """What all used together, and what Slurm had given (None without Slurm).

    Attributes:
        cores: Mean of the sum over tasks; `memory_bytes` is the highest sum.
        samples: How many of them there were while the job trained.
        idle_end_seconds: From the last step that was reported to the end of training; None without steps.
    """

    tasks: tuple[TaskNeeds, ...]
    cores: float | None
    memory_bytes: float
    given_cpus: int | None
    given_memory_bytes: int | None
    seconds: float
    samples: int
    idle_end_seconds: float | None = None

    def of_role(self, role: str) -> list[TaskNeeds]:
        return [task for task in self.tasks if task.role == role]

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(task.role for task in self.tasks))


def make_needs(
    names: Sequence[str], curves: Curves, grant: Mapping[str, Any], training: tuple[float, float], seconds: float
) -> JobNeeds:
    """Sum up the curves. `grant` is slurm.json or empty; `training` is from when to when the job trained."""
    inside = [number for number, at in enumerate(curves.seconds) if training[0] <= at <= training[1]]

    def while_training(column: Sequence[float | None]) -> float | None:
        return mean([column[number] for number in inside])

    tasks = tuple(
        TaskNeeds(
            name=name,
            cores=while_training(curves.cores[rank]),
            memory_bytes=curves.peaks[rank],
            sent_bytes=curves.totals[rank][0],
            received_bytes=curves.totals[rank][1],
            steps=while_training(curves.steps[rank]),
        )
        for rank, name in enumerate(names)
    )
    stepping = [at for at, rates in zip(curves.seconds, zip(*curves.steps, strict=True), strict=False) if any(rates)]
    stepped_at = max(stepping, default=None)
    return JobNeeds(
        tasks=tasks,
        cores=while_training(over_tasks(curves.cores, sum)) if curves.cores else None,
        memory_bytes=max(known(over_tasks(curves.memory, sum)), default=0.0),
        given_cpus=_count(grant.get("cpus")),
        given_memory_bytes=_count(grant.get("memory_bytes")),
        seconds=seconds,
        samples=len(inside),
        idle_end_seconds=None if stepped_at is None else max(0.0, training[1] - stepped_at),
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
