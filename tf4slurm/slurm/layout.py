"""Compute the layout of a step: the node of each rank.

The environment of an ordinary step determines the layout, unless the distribution is "arbitrary". In a heterogeneous
step SLURM_DISTRIBUTION describes only the component that srun handled last: on Slurm 22.05 the tasks of b have the same
environment in `srun -N2 -n4 -m cyclic a : -N1 -n2 b` with and without `-m cyclic`. The layout of a component is certain
in two cases only: the component has one node, or it has two nodes and this task runs on one of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from tf4slurm.errors import LayoutError, PlacementError

Component = Mapping[str, int]
"""Number of tasks by node name, in Slurm's order of nodes: a component of a heterogeneous step, or a whole step."""


def deal_ranks(component: Component, distribution: str | None, plane_size: int | None) -> tuple[str, ...]:
    """Return the node of each rank of a component, for a distribution of srun's option -m.

    Args:
        component: Number of tasks by node name, in Slurm's order of nodes.
        distribution: "block" (also None), "cyclic" or "plane". Suffixes such as ":cyclic" do not affect nodes.
        plane_size: Number of consecutive ranks on one node; only for plane.

    Raises:
        LayoutError: The distribution is another one, such as "arbitrary", or "plane" without `plane_size`.
    """
    method = (distribution or "block").partition(",")[0].partition(":")[0]
    if method == "block":
        return _deal_rounds(component, max(component.values()))
    if method == "cyclic":
        return _deal_rounds(component, 1)
    if method == "plane" and plane_size:
        return _deal_rounds(component, plane_size)
    raise _undetermined(f"the distribution is {distribution!r}")


def split_components(step: Component, groups: Iterable[Collection[str]]) -> list[Component]:
    """Split a heterogeneous step into its components.

    Args:
        step: Number of tasks by node name, of the whole step.
        groups: The nodes of each component of the heterogeneous job. Those without a node of the step are left out of
            the result.

    Raises:
        LayoutError: A node of the step is in no group or in several.
    """
    components = [{node: count for node, count in step.items() if node in group} for group in map(frozenset, groups)]
    if sorted(itertools.chain.from_iterable(components)) != sorted(step):
        raise _undetermined("its nodes are not each in one group of the heterogeneous job")
    return [component for component in components if component]


def join_components(components: Sequence[Component], own_node: str, own_ranks: Collection[int]) -> tuple[str, ...]:
    """Return the node of each rank of a heterogeneous step.

    Args:
        components: The components of the step, in the order of their ranks.
        own_node: The node of this task.
        own_ranks: The ranks on this node.

    Raises:
        LayoutError: A component has three or more nodes, or two nodes of which none is `own_node`. Its layout is then
            uncertain.
    """
    ranks: list[str] = []
    for component in components:
        if len(component) == 1:
            ranks += deal_ranks(component, None, None)
        elif len(component) == 2 and own_node in component:
            (other,) = component.keys() - {own_node}
            own_range = range(len(ranks), len(ranks) + sum(component.values()))
            ranks += [own_node if rank in own_ranks else other for rank in own_range]
        else:
            reason = f"a component of the heterogeneous step has {len(component)} nodes, and any distribution"
            raise _undetermined(reason)
    return tuple(ranks)


def rename_nodes(nodes_by_rank: Sequence[str], nodes: Sequence[str], counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return a layout with other names for the nodes, such as "n1-ib" for "n1".

    Args:
        nodes: Each node of the layout once, in Slurm's order.
        counts: Number of tasks by new name, one new name per node. Either each new name starts with its node's name,
            or the new names are sorted and the nth name belongs to the nth node.

    Raises:
        LayoutError: The new names do not determine their nodes.
        PlacementError: The layout contradicts `counts`.
    """
    hosts, known = list(counts), frozenset(nodes)
    prefixes = [next((host[:end] for end in range(len(host), 0, -1) if host[:end] in known), None) for host in hosts]
    if not any(prefixes) and len(hosts) == len(nodes) and hosts == sorted(hosts):
        names = dict(zip(nodes, hosts, strict=True))
    elif len(hosts) == len(nodes) and set(prefixes) == known:
        names = {prefix: host for prefix, host in zip(prefixes, hosts, strict=True) if prefix is not None}
    else:
        raise LayoutError(
            f"The node of each host is unknown: the hosts {shorten(hosts)} are not the nodes {shorten(nodes)}. "
            "Give one name per node that starts with the node's name."
        )
    found = tuple(names[node] for node in nodes_by_rank)
    if Counter(found) != Counter(counts):
        raise PlacementError(
            f"Slurm placed {dict(Counter(found))} tasks on the nodes, but {dict(counts)} was given. Omit it."
        )
    return found


def shorten(items: Sequence[object]) -> str:
    """Return a text with the first eight items, separated by commas, and "…" if there are more."""
    return ", ".join(map(str, items[:8])) + (", …" if len(items) > 8 else "")


def _deal_rounds(component: Component, size: int) -> tuple[str, ...]:
    ranks: list[str] = []
    left = list(component.items())
    while left:
        for node, count in left:
            ranks += [node] * min(size, count)
        left = [(node, count - size) for node, count in left if count > size]
    return tuple(ranks)


def _undetermined(reason: str) -> LayoutError:
    return LayoutError(
        f"The environment does not determine the node of each rank: {reason}. Make Slurm's command sattach available "
        "on the nodes, or let the tasks exchange their addresses."
    )
