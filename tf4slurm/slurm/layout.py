"""Which node has which rank of a step: pure functions of what a task's environment says about the layout.

Of an ordinary step the environment says enough, except when its distribution is "arbitrary". Of a heterogeneous step
it does not: SLURM_DISTRIBUTION is the one of whichever component srun came to last, so two steps with different maps
show some tasks the same environment (seen on 22.05: `srun -N2 -n4 -m cyclic a : -N1 -n2 b` and the same without -m, in
the eyes of b). Certain is only where a component has a single node, or where a task sees its own ranks on one of two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tf4slurm.errors import LayoutError, PlacementError


@dataclass(frozen=True)
class Component:
    """One component of a heterogeneous step; an ordinary step is one of them.

    Attributes:
        tasks_per_node: As many counts as there are nodes.
    """

    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]


def deal_ranks(component: Component, distribution: str | None, plane_size: int | None) -> tuple[str, ...]:
    """Return one node name per rank, in the way in which Slurm hands ranks out.

    Args:
        distribution: As in SLURM_DISTRIBUTION: "block", "cyclic", "plane", each with suffixes such as ",nopack" or
            ":cyclic", which say nothing about nodes; None, where srun sets none, is block.
        plane_size: Ranks in a row on one node; only for plane.

    Raises:
        LayoutError: The distribution is another one, such as "arbitrary", or plane without a size.
    """
    method = (distribution or "block").partition(",")[0].partition(":")[0]
    if method == "block":
        counts = zip(component.nodes, component.tasks_per_node, strict=True)
        return tuple(itertools.chain.from_iterable(itertools.repeat(node, count) for node, count in counts))
    if method == "cyclic":
        return _deal_rounds(component, 1)
    if method == "plane" and plane_size:
        return _deal_rounds(component, plane_size)
    raise _cannot_tell(distribution, f"the distribution {distribution!r} is not told by the environment")


def split_components(component: Component, groups: Sequence[Collection[str]]) -> tuple[Component, ...]:
    """Split a step into its components by the node names of the job's groups; groups without a node in it have none.

    Raises:
        LayoutError: A node is in no group or in several.
    """
    counts = dict(zip(component.nodes, component.tasks_per_node, strict=True))
    members = [tuple(node for node in component.nodes if node in group) for group in map(frozenset, groups)]
    if sorted(itertools.chain.from_iterable(members)) != sorted(component.nodes):
        raise _cannot_tell(None, "its nodes are not each in one group of the heterogeneous job")
    return tuple(Component(nodes, tuple(counts[node] for node in nodes)) for nodes in members if nodes)


def join_components(components: Sequence[Component], own_node: str, own_ranks: Collection[int]) -> tuple[str, ...]:
    """Return one node name per rank of a heterogeneous step, of which a task knows its node and the ranks there.

    Raises:
        LayoutError: There is more than one map with which this agrees.
    """
    ranks: list[str] = []
    for component in components:
        if len(component.nodes) == 1:
            ranks += deal_ranks(component, None, None)
        elif len(component.nodes) == 2 and own_node in component.nodes:
            (other,) = set(component.nodes) - {own_node}
            here = range(len(ranks), len(ranks) + sum(component.tasks_per_node))
            ranks += [own_node if rank in own_ranks else other for rank in here]
        else:
            reason = f"a component of the heterogeneous step has {len(component.nodes)} nodes, and any distribution"
            raise _cannot_tell(None, reason)
    return tuple(ranks)


def check_own_place(
    nodes_by_rank: Sequence[str],
    *,
    num_tasks: int,
    rank: int,
    local_rank: int,
    node: str,
    node_ranks: Sequence[int],
    distribution: str | None = None,
) -> None:
    """Refuse a map that contradicts what a task knows of itself.

    Args:
        node_ranks: All ranks on the task's node (SLURM_GTIDS), by local rank.

    Raises:
        LayoutError: It names the rank and what differs.
    """
    mapped = [other for other, name in enumerate(nodes_by_rank) if name == node]
    if len(nodes_by_rank) != num_tasks or rank >= num_tasks:
        difference = f"Slurm says that the step has {num_tasks} tasks, but the map has {len(nodes_by_rank)}"
    elif nodes_by_rank[rank] != node:
        difference = f"its node is {node!r}, but the map puts it on {nodes_by_rank[rank]!r}"
    elif mapped != list(node_ranks):
        difference = f"Slurm says that {node!r} has the ranks {_short(node_ranks)}, but the map says {_short(mapped)}"
    elif mapped.index(rank) != local_rank:
        difference = f"it is task {local_rank} of {node!r}, but task {mapped.index(rank)} in the map"
    else:
        return
    raise LayoutError(
        f"The map of the step contradicts rank {rank}: {difference}. Slurm has placed the tasks in another way than "
        "it tells them; ask for -m block or -m cyclic.",
        distribution=distribution,
        reason=f"rank {rank}: {difference}",
    )


def rename_nodes(nodes_by_rank: Sequence[str], nodes: Sequence[str], counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return a layout in the names that somebody else has for the nodes, such as "n1-ib" for "n1".

    Args:
        nodes: Each node of the layout once, in Slurm's order.
        counts: The number of tasks on each host, by the names wanted. These begin with the nodes' own, in any order; or
            else they are in the order of `nodes`, which must also be the alphabet's.

    Raises:
        LayoutError: Which host is which node cannot be told.
        PlacementError: These are not the numbers of tasks that Slurm placed.
    """
    hosts, known = list(counts), frozenset(nodes)
    begins = [next((host[:end] for end in range(len(host), 0, -1) if host[:end] in known), None) for host in hosts]
    if not any(begins) and len(hosts) == len(nodes) and hosts == sorted(hosts):
        names = dict(zip(nodes, hosts, strict=True))
    elif len(hosts) == len(nodes) and set(begins) == known:
        names = {begin: host for begin, host in zip(begins, hosts, strict=True) if begin is not None}
    else:
        reason = f"the hosts {_short(hosts)} are not the nodes {_short(nodes)}"
        text = f"Which host has which rank cannot be told: {reason}. Give one name for each node that begins with it."
        raise LayoutError(text, distribution=None, reason=reason)
    found = tuple(names[node] for node in nodes_by_rank)
    if Counter(found) != Counter(counts):
        raise PlacementError(
            f"Slurm placed {dict(Counter(found))} tasks on the nodes, but {dict(counts)} was given. Leave it out: "
            "Slurm knows.",
            requested=sum(counts.values()),
            available=len(found),
        )
    return found


def _deal_rounds(component: Component, size: int) -> tuple[str, ...]:
    """Give each node up to `size` ranks in its turn, until all nodes have what they take."""
    ranks: list[str] = []
    left = list(zip(component.nodes, component.tasks_per_node, strict=True))
    while left:
        for node, count in left:
            ranks += [node] * min(size, count)
        left = [(node, count - size) for node, count in left if count > size]
    return tuple(ranks)


def _cannot_tell(distribution: str | None, reason: str) -> LayoutError:
    return LayoutError(
        f"Which node has which rank cannot be told from the environment: {reason}. Slurm's command sattach knows it: "
        "make it reachable from the nodes, or let the tasks tell each other.",
        distribution=distribution,
        reason=reason,
    )


def _short(ranks: Sequence[object]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
