"""Placement: assign task types to ranks, from the number of tasks of each type and the node of each rank."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tf4slurm.cluster import Task
from tf4slurm.errors import PlacementError
from tf4slurm.roles import SCRIPT_TASK_TYPES, TASK_TYPES

PACK = "pack"
SPREAD = "spread"


def place_tasks(counts: Mapping[str, int], placement: str, nodes_by_rank: Sequence[str]) -> tuple[Task, ...]:
    """Assign a task to every rank. Return the tasks in rank order.

    Args:
        counts: Number of tasks of each type, such as {"chief": 1, "ps": 1, "worker": 2}. Their sum is the number of
            ranks.
        placement: "pack" assigns the task types to the ranks in the order of `TASK_TYPES`. "spread" gives rank 0 to the
            chief and distributes the ps evenly over the nodes, beginning with the node that has most free ranks. Then
            it packs the other types. A list, such as "ps,worker,worker,chief", has the task type of each rank.
        nodes_by_rank: The node of each rank. Only "spread" uses it.

    Raises:
        PlacementError: The list of task types contradicts the counts, or has an unknown type.
    """
    if placement == PACK:
        roles = [role for role in TASK_TYPES for _ in range(counts.get(role, 0))]
    elif placement == SPREAD:
        roles = _spread(counts, nodes_by_rank)
    else:
        roles = parse_roles(placement)
        if Counter(roles) != Counter(counts):
            raise PlacementError(
                f"The placement {placement!r} lists {sum_text(Counter(roles))}, but the job has {sum_text(counts)}. "
                "Change the placement, or the numbers of tasks."
            )
    indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return tuple(Task(role, next(indices[role])) for role in roles)


def count_roles(tasks: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Return the number of tasks of each type in `SCRIPT_TASK_TYPES`, 0 included.

    Args:
        tasks: The type of each task, or the number of tasks of each type.

    Raises:
        PlacementError: `tasks` has another type.
    """
    counts = tasks if isinstance(tasks, Mapping) else Counter(tasks)
    unknown = sorted(set(counts) - set(SCRIPT_TASK_TYPES))
    if unknown:
        text = f"{unknown[0]!r} is not a role here: expected one of {', '.join(SCRIPT_TASK_TYPES)} for each rank."
        raise PlacementError(text)
    return {role: counts.get(role, 0) for role in SCRIPT_TASK_TYPES}


def check_step(counts: Mapping[str, int], placement: str, num_tasks: int) -> None:
    """Check that a Slurm step of `num_tasks` tasks can have these tasks. `counts`, `placement`: as in `place_tasks`.

    Raises:
        PlacementError: It cannot, or the list of task types contradicts the counts.
    """
    if sum(counts.values()) != num_tasks:
        raise PlacementError(
            f"{sum(counts.values())} roles were given, but the step has {num_tasks} tasks. Give one role for each "
            f"rank, or ask srun for --ntasks={sum(counts.values())}."
        )
    place_tasks(counts, placement, [""] * num_tasks)


def parse_roles(text: str) -> list[str]:
    """Parse a list of task types such as "ps,worker,worker".

    Raises:
        PlacementError: An item is not a task type.
    """
    roles = text.split(",")
    for role in roles:
        if role not in TASK_TYPES:
            raise PlacementError(
                f'{role!r} is neither a role nor a placement: expected "{PACK}", "{SPREAD}" or a list with one of '
                f"{', '.join(TASK_TYPES)} for each rank."
            )
    return roles


def _spread(counts: Mapping[str, int], nodes_by_rank: Sequence[str]) -> list[str]:
    roles = [""] * len(nodes_by_rank)
    free: dict[str, list[int]] = {}
    for rank in reversed(range(len(nodes_by_rank))):
        free.setdefault(nodes_by_rank[rank], []).append(rank)  # pop() then returns the lowest rank
    for _ in range(counts.get("chief", 0)):
        roles[free[nodes_by_rank[roles.index("")]].pop()] = "chief"
    order = {node: number for number, node in enumerate(dict.fromkeys(nodes_by_rank))}
    heap = [(0, -len(ranks), order[node], node) for node, ranks in free.items() if ranks]
    heapq.heapify(heap)
    for _ in range(counts.get("ps", 0)):
        taken, _, number, node = heapq.heappop(heap)
        roles[free[node].pop()] = "ps"
        if free[node]:
            heapq.heappush(heap, (taken + 1, -len(free[node]), number, node))
    rest = iter([role for role in TASK_TYPES if role not in ("chief", "ps") for _ in range(counts.get(role, 0))])
    return [role or next(rest) for role in roles]


def fill_counts(counts: Mapping[str, int | None], available: int | None) -> dict[str, int]:
    """Return the number of tasks of each type. Check their sum against the number of tasks that Slurm provides.

    Args:
        counts: Number of tasks of each type. None for "worker" means all remaining tasks of `available`.
        available: Number of tasks of the Slurm allocation or step. None outside of Slurm.

    Raises:
        PlacementError: The sum differs from `available`, or the workers are None and `available` leaves none for them.
    """
    found = {role: count or 0 for role, count in counts.items()}
    if counts["worker"] is None:
        others = sum(found.values())
        if available is None or available <= others:
            there = "there is no Slurm allocation" if available is None else f"Slurm gives {available} tasks"
            raise PlacementError(
                f"The number of workers is not known: {sum_text(found) or 'no other task'}, and {there}. "
                "Give --workers N."
            )
        found["worker"] = available - others
    total = sum(found.values())
    if available is not None and total != available:
        change = "lower a count" if total > available else "raise a count"
        if total == available + found["chief"]:
            change += ", or give --no-chief if worker 0 leads in the script"
        raise PlacementError(
            f"{sum_text(found)} {'needs' if total == 1 else 'need'} {total} tasks, but Slurm gives {available}. "
            f"Ask Slurm for --ntasks={total} or {change}."
        )
    return found


def sum_text(counts: Mapping[str, int]) -> str:
    """Return the numbers of tasks of each type as text, such as "1 chief + 1 ps + 2 worker"."""
    return " + ".join(f"{counts[role]} {role}" for role in TASK_TYPES if counts.get(role))
