"""What a report shows, and what it must not."""

from __future__ import annotations

import pytest

from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.text import conclude, describe, hide_user, report


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    monkeypatch.setenv("LOGNAME", "ana")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ana/venv/bin/python", "~/venv/bin/python"),
        ("in /home/ana.", "in ~."),
        ("/home/ana.old /home/ana-2", "/home/ana.old /home/ana-2"),
        ("/home/anabel/x", "/home/anabel/x"),
        ("/scratch/ana/runs and /ana", "/scratch/USER/runs and /USER"),
        ("banana", "banana"),
    ],
)
def test_the_users_name_is_not_shown(someone: None, text: str, shown: str) -> None:
    assert hide_user(text) == shown


def test_a_report_has_the_versions_and_no_name(someone: None) -> None:
    text = report([Finding("warn", "python", "Python 3.11, /home/ana/bin/python", "Do this.", nodes=("n1", "n2"))])
    assert text.startswith("tf4slurm 0.")
    assert "warn  python: Python 3.11, ~/bin/python [on n[1-2]]" in text
    assert "-> Do this." in text
    assert "ana" not in text


def test_long_lines_are_broken_and_indented() -> None:
    lines = describe([Finding("fail", "slurm", "word " * 60, "do " * 60)], lambda _, text: text)
    assert all(len(line) <= 110 for line in lines)
    assert all(line.startswith(" " * 6) for line in lines[1:])


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        (["ok"], "no failure, no warnings. Next: x"),
        (["ok", "warn"], "no failure, 1 warning. Next: x"),
        (["fail", "fail"], "2 failures, no warnings. To ask for help: tf4slurm doctor --report"),
    ],
)
def test_the_last_line(levels: list[str], text: str) -> None:
    assert conclude([Finding(level, "a", "b") for level in levels], "Next: x") == text  # type: ignore[arg-type]
