"""Merge the findings of several nodes, and format findings for a terminal or an issue."""

from __future__ import annotations

import getpass
import os
import platform
import re
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tf4slurm import __version__
from tf4slurm.errors import EXIT_PREFLIGHT
from tf4slurm.slurm.nodelist import fold_nodelist
from tf4slurm.system.directories import home_directory

Level = Literal["ok", "warn", "fail"]
_WIDTH = 110
_INDENT = " " * 6
_END_OF_NAME = r"(?![\w-]|\.\w)"  # end of a file name in a path


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: "fail" for a problem with which no job works, "warn" for one that affects some jobs, else "ok".
        topic: Short name of the check, such as "python".
        text: The result in one line without a full stop. Equal results of several nodes have the same text.
        advice: Recommended action in one or two sentences, or empty.
        detail: Facts that differ from node to node, such as addresses.
        nodes: The nodes with this result. Empty if all checked nodes have it, or if it is not about a node.
    """

    level: Level
    topic: str
    text: str
    advice: str = ""
    detail: str = ""
    nodes: Sequence[str] = ()


def warn_unless(is_ok: bool, topic: str, text: str, *, problem: str, advice: str) -> Finding:
    """Return an "ok" finding with `text` if `is_ok`, else a "warn" finding with `text + problem` and `advice`."""
    return Finding("ok", topic, text) if is_ok else Finding("warn", topic, text + problem, advice)


def merge_nodes(by_node: Mapping[str, Iterable[Finding]]) -> list[Finding]:
    """Merge findings of different nodes into one finding if they are equal except for `detail`.

    The `detail` of the merged finding has the details of all its nodes. Its `nodes` are empty if all nodes of `by_node`
    have it. Findings of the same topic follow each other in the result.
    """
    details: defaultdict[Finding, dict[str, str]] = defaultdict(dict)  # by node
    for node, findings in by_node.items():
        for finding in findings:
            details[replace(finding, detail="", nodes=())][node] = finding.detail
    topics = list(dict.fromkeys(finding.topic for finding in details))
    return [
        replace(
            finding,
            nodes=() if details[finding].keys() == by_node.keys() else tuple(details[finding]),
            detail="; ".join(f"{node}: {detail}" for node, detail in details[finding].items() if detail),
        )
        for finding in sorted(details, key=lambda finding: topics.index(finding.topic))
    ]


def exit_code_of_findings(findings: Iterable[Finding]) -> int:
    """Return 3 if a finding has the level "fail", else 0."""
    return EXIT_PREFLIGHT if any(finding.level == "fail" for finding in findings) else 0


def format_findings(findings: Iterable[Finding], colour: Callable[[Level, str], str]) -> list[str]:
    """Return the lines that show findings on a terminal. `colour(level, text)` returns the text in a level's colour."""
    lines = []
    for finding in findings:
        detail = f" ({finding.detail})" if finding.detail else ""
        nodes = f" [on {fold_nodelist(finding.nodes)}]" if finding.nodes else ""
        first, *rest = _wrap(f"{finding.topic}: {finding.text}{detail}{nodes}", _INDENT)
        lines += [colour(finding.level, f"{finding.level:<6}") + first.removeprefix(_INDENT), *rest]
        if finding.advice:
            lines += _wrap(f"-> {finding.advice}", _INDENT + "   ")
    return lines


def summarize(findings: Sequence[Finding], next_step: str) -> str:
    """Return the last line of the terminal output: the numbers of failures and warnings, and what to do next.

    Without failures, what to do next is the text `next_step`.
    """
    warnings = _count(findings, "warn", "warning")
    if exit_code_of_findings(findings):
        return f"{_count(findings, 'fail', 'failure')}, {warnings}. To ask for help: tf4slurm doctor --report"
    return f"no failure, {warnings}. {next_step}"


def format_report(findings: Iterable[Finding]) -> str:
    """Return the text that `tf4slurm doctor --report` prints: versions and findings, without the user's name."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    head = [f"tf4slurm {__version__}, Python {platform.python_version()}, {system}", time.strftime("%Y-%m-%d %H:%M")]
    return hide_user("\n".join([*head, "", *format_findings(findings, lambda _, text: text)]))


def hide_user(text: str) -> str:
    """Return the text with "~" for this user's home directory, and "USER" for the user's name in other paths."""
    home = str(home_directory(os.environ) or "").rstrip("/")
    if home:
        text = re.sub(re.escape(home) + _END_OF_NAME, "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry in the password database, as in containers
        return text
    return re.sub(f"(?<=/){re.escape(user)}{_END_OF_NAME}", "USER", text)


def _wrap(text: str, next_indent: str) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, _INDENT, next_indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _count(findings: Iterable[Finding], level: Level, noun: str) -> str:
    number = sum(finding.level == level for finding in findings)
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
