"""What a process tells once, and at its exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tf4slurm.completion_signal import CompletionSignal, completion_signal

SCRIPT = """
import os, sys
from tf4slurm.completion_signal import CompletionSignal
word = CompletionSignal(lambda failed: print("failed" if failed else "done", flush=True))
word.say_at_exit()
word.say_at_exit()
"""


def test_the_first_word_stands() -> None:
    told: list[bool] = []
    word = CompletionSignal(told.append)
    word.say(failed=True)
    word.say()
    assert told == [True]


def test_a_process_has_one_word_of_a_name() -> None:
    told: list[bool] = []
    completion_signal("of this test", told.append).say()
    completion_signal("of this test", told.append).say()
    assert told == [False]


@pytest.mark.parametrize(
    ("end", "told", "code"),
    [
        ("", "done\n", 0),
        ("raise KeyError", "failed\n", 1),
        ("word.say(failed=True)", "failed\n", 0),
        ("sys.exit(3)", "done\n", 3),
        ("os._exit(0)", "", 0),
        ("if os.fork() == 0: sys.exit()\nos.wait()", "done\n", 0),
    ],
)
def test_it_is_said_at_exit(end: str, told: str, code: int) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=30)
    assert (result.stdout, result.returncode) == (told, code)
    assert ("KeyError" in result.stderr) == (end == "raise KeyError")
