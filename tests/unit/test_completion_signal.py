"""The completion signal is sent once, at exit at the latest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tf4slurm.completion_signal import CompletionSignal, get_completion_signal

SCRIPT = """
import os, sys
from tf4slurm.completion_signal import CompletionSignal
signal = CompletionSignal(lambda failed: print("failed" if failed else "done", flush=True))
signal.send_at_exit()
signal.send_at_exit()
"""


def test_only_the_first_signal_is_sent() -> None:
    sent: list[bool] = []
    signal = CompletionSignal(sent.append)
    signal.send(failed=True)
    signal.send()
    assert sent == [True]


def test_signals_of_one_name_are_sent_once() -> None:
    sent: list[bool] = []
    get_completion_signal("of this test", sent.append).send()
    get_completion_signal("of this test", sent.append).send()
    assert sent == [False]


@pytest.mark.parametrize(
    ("end", "sent", "code"),
    [
        ("", "done\n", 0),
        ("raise KeyError", "failed\n", 1),
        ("signal.send(failed=True)", "failed\n", 0),
        ("sys.exit(3)", "done\n", 3),
        ("os._exit(0)", "", 0),
        ("if os.fork() == 0: sys.exit()\nos.wait()", "done\n", 0),
    ],
)
def test_signal_is_sent_at_exit(end: str, sent: str, code: int) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=30)
    assert (result.stdout, result.returncode) == (sent, code)
    assert ("KeyError" in result.stderr) == (end == "raise KeyError")
