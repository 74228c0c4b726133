"""Placement: assign roles to ranks, from the number of tasks of each role and the node of each rank."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from tf4slurm.cluster import Task
from tf4slurm.errors import PlacementError
from tf4slurm.roles import TASK_TYPES

PACK = "pack"
SPREAD = "spread"


def place_tasks(counts: Mapping[str, int], placement: str, nodes_by_rank: Sequence[str]) -> tuple[Task, ...]:
    """Assign a task to every rank; return the tasks in rank order.

    Args:
        counts: Number of tasks of each role, such as {"chief": 1, "ps": 1, "worker": 2}; one task for each rank.
        placement: "pack" assigns the roles to the ranks in the order of `TASK_TYPES`. "spread" first distributes the
            ps evenly over the nodes, beginning with the node that has most free ranks, then packs the rest. A list,
            such as "ps,worker,worker,chief", contains the role of each rank.
        nodes_by_rank: The node of each rank.

    Raises:
        PlacementError: The list of roles contradicts the counts.
    """
    if placement == PACK:
        return _number([role for role in TASK_TYPES for _ in range(counts.get(role, 0))])
    if placement == SPREAD:
        return _number(_spread(counts, nodes_by_rank))
    roles = parse_roles(placement)
    if {role: roles.count(role) for role in TASK_TYPES} != {role: counts.get(role, 0) for role in TASK_TYPES}:
        raise PlacementError(
            f"The placement {placement!r} lists {_sum_text(Counter(roles))}, but the job has {_sum_text(counts)}. "
            "Change the placement, or the numbers of tasks."
        )
    return _number(roles)


def parse_roles(text: str) -> list[str]:
    """Parse a list of roles such as "ps,worker,worker".

    Raises:
        PlacementError: An item is not a role.
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


def _number(roles: Sequence[str]) -> tuple[Task, ...]:
    """Number the tasks of each role in rank order."""
    seen: Counter[str] = Counter()
    tasks = []
    for role in roles:
        tasks.append(Task(role, seen[role]))
        seen[role] += 1
    return tuple(tasks)


def fill_counts(
    chiefs: int, ps: int, workers: int | None, evaluators: int, available: int | None, data_workers: int = 0
) -> dict[str, int]:
    """Return the number of tasks of each role; check their sum against the number of tasks that Slurm provides.

    Args:
        workers: Number of workers; None for all remaining tasks of `available`.
        available: Number of tasks of the allocation or step; None outside Slurm.
        data_workers: Number of workers of a data service (default 0); if positive, a dispatcher is added.

    Returns:
        A dictionary such as {"chief": 1, "ps": 1, "worker": 2, "evaluator": 0}.

    Raises:
        PlacementError: The sum differs from `available`, or the number of workers is unknown or would be 0.
    """
    others = {"chief": chiefs, "ps": ps, "evaluator": evaluators}
    if data_workers:
        others.update({"data-dispatcher": 1, "data-worker": data_workers})
    count = sum(others.values())
    if workers is None:
        if available is None or available <= count:
            there = "there is no Slurm allocation" if available is None else f"Slurm gives {available} tasks"
            raise PlacementError(
                f"The number of workers is not known: {_sum_text(others) or 'no other task'}, and {there}. "
                "Give --workers N."
            )
        workers = available - count
    found = {**others, "worker": workers}
    counts = {role: found[role] for role in TASK_TYPES if role in found}
    total = count + workers
    if available is not None and total != available:
        change = "lower a count" if total > available else "raise a count"
        if total == available + chiefs:
            change += ", or give --no-chief if worker 0 leads in the script"
        raise PlacementError(
            f"{_sum_text(counts)} {'needs' if total == 1 else 'need'} {total} tasks, but Slurm gives {available}. "
            f"Ask Slurm for --ntasks={total} or {change}."
        )
    return counts


def _sum_text(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{counts[role]} {role}" for role in TASK_TYPES if counts.get(role))
