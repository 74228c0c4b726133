"""docs/troubleshooting/: each message is really produced, and each producer has its message on a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.troubleshooting.commands import COMMANDS
from tests.troubleshooting.jobs import JOBS
from tests.troubleshooting.page import Entry, read_entries
from tests.troubleshooting.scripts import SCRIPTS
from tests.troubleshooting.slurm import SLURM
from tests.troubleshooting.workplace import Table, Workplace

TABLE: Table = {**COMMANDS, **JOBS, **SCRIPTS, **SLURM}


def entry_of(words: str) -> Entry:
    """Return the entry whose message contains these words."""
    (found,) = [entry for entry in read_entries() if words in entry.message]
    return found


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The output of each mistake in a training script, with Keras as it is installed."""
    environ = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.troubleshooting.mistakes", str(tmp_path_factory.mktemp("mistakes"))],
        cwd=Path(__file__).parents[2],
        env=environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    parts = re.split(r"^=== (\w+)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=[pytest.mark.long] * made.is_long) for words, made in TABLE.items()]
)
def test_message_of_the_page_is_shown_after_the_mistake(
    words: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    output = TABLE[words].produce(Workplace(tmp_path, request))
    assert entry_of(words).is_in(output), f"{entry_of(words).message!r} is not in:\n{output[-3000:]}"


def test_each_entry_has_a_producer_and_each_producer_an_entry() -> None:
    messages = [entry.message for entry in read_entries()]
    assert len(messages) >= 40
    assert [message for message in messages if not any(words in message for words in TABLE)] == []
    assert len(messages) == len(TABLE) == len({entry_of(words).message for words in TABLE})


def test_each_entry_has_a_remedy_of_few_lines() -> None:
    for entry in read_entries():
        assert 1 <= len(entry.text.splitlines()) <= 5, entry.message
