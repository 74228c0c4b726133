"""A finding: what was looked at, how it is, and what to do; and how the findings of many nodes become one list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tf4slurm.errors import EXIT_PREFLIGHT

Level = Literal["ok", "warn", "fail"]
_LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "fail" ends a job or keeps it from starting; "warn" does in some cases, which the text names.
        topic: One word for it, such as "python".
        text: How it is, in one line without a full stop, the same on all nodes where it is the same.
        todo: What to do, in a sentence; empty where there is nothing to do.
        detail: What differs from node to node and means nothing by that, such as addresses.
        nodes: The nodes it was found on; empty if on all that were looked at, or of the whole cluster.
    """

    level: Level
    topic: str
    text: str
    todo: str = ""
    detail: str = ""
    nodes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": list(self.nodes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Finding:
        """Read what `to_json` made.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        if value["level"] not in _LEVELS:
            raise ValueError(f"{value['level']!r} is no level")
        texts = {name: str(value[name]) for name in ("topic", "text", "todo", "detail")}
        return cls(value["level"], **texts, nodes=tuple(map(str, value["nodes"])))


def merge_nodes(by_node: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all nodes, each once: with the nodes it was found on, unless that is all of them.

    The order is that of the first node that has it; findings of one topic stand together.
    """
    nodes_of: dict[Finding, list[str]] = {}
    details: dict[Finding, list[str]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            plain = replace(finding, detail="", nodes=())
            nodes_of.setdefault(plain, []).append(node)
            details.setdefault(plain, []).append(f"{node}: {finding.detail}" if finding.detail else "")
    topics = list(dict.fromkeys(finding.topic for finding in nodes_of))
    merged = []
    for finding in sorted(nodes_of, key=lambda finding: topics.index(finding.topic)):
        nodes = () if len(nodes_of[finding]) == len(by_node) else tuple(nodes_of[finding])
        merged.append(replace(finding, nodes=nodes, detail="; ".join(filter(None, details[finding]))))
    return merged


def exit_code_of(findings: Iterable[Finding]) -> int:
    """Return 3 if one of them is a failure, else 0."""
    return EXIT_PREFLIGHT if any(finding.level == "fail" for finding in findings) else 0
