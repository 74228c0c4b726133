"""Which rank has which role. Pure: counts in, tasks out."""

from __future__ import annotations

from collections.abc import Mapping

from tf4slurm.cluster import Task
from tf4slurm.errors import PlacementError
from tf4slurm.roles import TASK_TYPES


def place_tasks(counts: Mapping[str, int]) -> tuple[Task, ...]:
    """Give every task a rank: `result[rank]` is the task of that rank, role by role in the order of `TASK_TYPES`.

    Args:
        counts: Number of tasks of each role, such as {"chief": 1, "ps": 1, "worker": 2}.
    """
    return tuple(Task(task_type, index) for task_type in TASK_TYPES for index in range(counts.get(task_type, 0)))


def fill_counts(chiefs: int, ps: int, workers: int | None, evaluators: int, available: int | None) -> dict[str, int]:
    """Return the number of tasks of each role, held against the number of tasks that Slurm gives.

    Args:
        workers: None asks for as many as remain of `available`.
        available: Number of tasks of the allocation or step; None where it is not limited (a laptop).

    Raises:
        PlacementError: More or fewer roles than tasks, or workers unknown and nothing to derive them from.
    """
    others = chiefs + ps + evaluators
    if workers is None:
        if available is None or available <= others:
            there = "there is no Slurm allocation" if available is None else f"Slurm gives {available} tasks"
            raise PlacementError(
                f"The number of workers is not known: {_sum_text(chiefs, ps, 0, evaluators) or 'no other task'}, and "
                f"{there}. Give --workers N.",
                requested=others + 1,
                available=available or 0,
            )
        workers = available - others
    total = others + workers
    if available is not None and total != available:
        change = "lower a count" if total > available else "raise a count"
        raise PlacementError(
            f"{_sum_text(chiefs, ps, workers, evaluators)} {'needs' if total == 1 else 'need'} {total} tasks, but "
            f"Slurm gives {available}. Ask Slurm for --ntasks={total} or {change}.",
            requested=total,
            available=available,
        )
    return {"chief": chiefs, "ps": ps, "worker": workers, "evaluator": evaluators}


def _sum_text(chiefs: int, ps: int, workers: int, evaluators: int) -> str:
    parts = ((chiefs, "chief"), (ps, "ps"), (workers, "worker"), (evaluators, "evaluator"))
    return " + ".join(f"{count} {name}" for count, name in parts if count)
