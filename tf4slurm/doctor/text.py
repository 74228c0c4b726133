"""Findings as people read them: on a terminal, or as a report to paste into an issue."""

from __future__ import annotations

import getpass
import os
import platform
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence

from tf4slurm import __version__
from tf4slurm.doctor.finding import Finding, Level
from tf4slurm.slurm.nodelist import fold_nodelist

_WIDTH = 110
_INDENT = "      "
_END = r"(?![\w-]|\.\w)"  # of a name in a path


def describe(findings: Sequence[Finding], paint: Callable[[Level, str], str]) -> list[str]:
    """Return the lines of all findings, each with its level, painted, where it was found and what to do."""
    return [line for finding in findings for line in _describe_one(finding, paint)]


def conclude(findings: Sequence[Finding], next_step: str) -> str:
    """Return the last line: how many failed, and what to type next."""
    failures = sum(finding.level == "fail" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    if failures:
        return (
            f"{_count(failures, 'failure')}, {_count(warnings, 'warning')}. To ask for help: tf4slurm doctor --report"
        )
    return f"no failure, {_count(warnings, 'warning')}. {next_step}"


def report(findings: Sequence[Finding]) -> str:
    """Return plain text for an issue: versions and findings, without the user's name or home directory."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    head = [
        f"tf4slurm {__version__}, Python {platform.python_version()}, {system}",
        time.strftime("%Y-%m-%d %H:%M"),
        "",
    ]
    return hide_user("\n".join([*head, *describe(findings, lambda _, text: text)]))


def hide_user(text: str) -> str:
    """Replace this user's home directory by "~", and the name in other paths by "USER"."""
    home = os.path.expanduser("~").rstrip("/")
    if home:
        text = re.sub(re.escape(home) + _END, "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in containers
        return text
    return re.sub(f"(?<=/){re.escape(user)}{_END}", "USER", text)


def _describe_one(finding: Finding, paint: Callable[[Level, str], str]) -> Iterable[str]:
    text = f"{finding.topic}: {finding.text}"
    if finding.detail:
        text += f" ({finding.detail})"
    if finding.nodes:
        text += f" [on {fold_nodelist(finding.nodes)}]"
    first, *rest = textwrap.wrap(text, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False)
    yield paint(finding.level, f"{finding.level:<4}") + f"  {first}"
    yield from (f"{_INDENT}{line}" for line in rest)
    if finding.todo:
        todo = textwrap.wrap(f"-> {finding.todo}", _WIDTH - 8, break_long_words=False, break_on_hyphens=False)
        yield from (f"{_INDENT}{'' if number == 0 else '   '}{line}" for number, line in enumerate(todo))


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
