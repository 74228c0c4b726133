"""Findings of the checks: merge them over nodes, and format them for a terminal or an issue."""

from __future__ import annotations

import getpass
import os
import platform
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tf4slurm import __version__
from tf4slurm.errors import EXIT_PREFLIGHT
from tf4slurm.slurm.nodelist import fold_nodelist

Level = Literal["ok", "warn", "fail"]
_LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")
_WIDTH = 110
_INDENT = " " * 6
_END_OF_NAME = r"(?![\w-]|\.\w)"  # end of a file name in a path


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: "fail" if the problem prevents or ends any job; "warn" if only in the cases that `text` names; else "ok".
        topic: Short name of the check, such as "python".
        text: The result in one line without a full stop. Nodes with the same result have the same text.
        advice: Recommended action in one or two sentences, or empty.
        detail: Facts that differ from node to node, such as addresses.
        nodes: The nodes with this result; empty means all checked nodes, or the whole cluster.
    """

    level: Level
    topic: str
    text: str
    advice: str = ""
    detail: str = ""
    nodes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": list(self.nodes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Finding:
        """Parse the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: `value` is not a result of `to_json`.
        """
        if value["level"] not in _LEVELS:
            raise ValueError(f"{value['level']!r} is not a level")
        texts = {name: str(value[name]) for name in ("topic", "text", "advice", "detail")}
        return cls(value["level"], **texts, nodes=tuple(map(str, value["nodes"])))


def merge_nodes(by_node: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Merge equal findings of several nodes into one, with `nodes` set unless all nodes have the finding.

    Findings of one topic are adjacent; otherwise the first node's order is kept.
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
    """Return 3 if a finding is a failure, else 0."""
    return EXIT_PREFLIGHT if any(finding.level == "fail" for finding in findings) else 0


def format_findings(findings: Iterable[Finding], colour: Callable[[Level, str], str]) -> list[str]:
    """Return the lines that show findings on a terminal; `colour` is applied to the level of each."""
    return [line for finding in findings for line in _format_finding(finding, colour)]


def summarize(findings: Iterable[Finding], next_step: str) -> str:
    """Return the last line on a terminal: the number of failures and warnings, and the command to run next."""
    levels = [finding.level for finding in findings]
    failures, warnings = levels.count("fail"), _count(levels.count("warn"), "warning")
    if failures:
        return f"{_count(failures, 'failure')}, {warnings}. To ask for help: tf4slurm doctor --report"
    return f"no failure, {warnings}. {next_step}"


def format_report(findings: Iterable[Finding]) -> str:
    """Return plain text for an issue: versions and findings, without the user's name and home directory."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    head = [f"tf4slurm {__version__}, Python {platform.python_version()}, {system}", time.strftime("%Y-%m-%d %H:%M")]
    return hide_user("\n".join([*head, "", *format_findings(findings, lambda _, text: text)]))


def hide_user(text: str) -> str:
    """Replace this user's home directory with "~", and the user's name in other paths with "USER"."""
    home = os.path.expanduser("~").rstrip("/")
    if home:
        text = re.sub(re.escape(home) + _END_OF_NAME, "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry in the password database, as in containers
        return text
    return re.sub(f"(?<=/){re.escape(user)}{_END_OF_NAME}", "USER", text)


def _format_finding(finding: Finding, colour: Callable[[Level, str], str]) -> Iterable[str]:
    text = f"{finding.topic}: {finding.text}"
    if finding.detail:
        text += f" ({finding.detail})"
    if finding.nodes:
        text += f" [on {fold_nodelist(finding.nodes)}]"
    first, *rest = _wrap(text, _INDENT)
    yield colour(finding.level, f"{finding.level:<6}") + first.removeprefix(_INDENT)
    yield from rest
    if finding.advice:
        yield from _wrap(f"-> {finding.advice}", _INDENT, "   ")


def _wrap(text: str, indent: str, hanging: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
