"""Sentences for errors of the system, at the edge of every program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf4slurm.system.program import explain

HINT = "TF4SLURM_LOG=DEBUG shows where."


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), f"'/a/b' cannot be used: Permission denied. {HINT}"),
        (OSError(9, "Bad file descriptor", 7), f"'7' cannot be used: Bad file descriptor. {HINT}"),
        (OSError(5, "Input/output error"), f"OSError: [Errno 5] Input/output error. {HINT}"),
        (ValueError("no number"), f"ValueError: no number. {HINT}"),
    ],
)
def test_error_becomes_a_sentence(error: OSError | ValueError, sentence: str) -> None:
    assert explain(error) == sentence


def test_error_of_the_encoding_names_a_locale() -> None:
    with pytest.raises(UnicodeError) as caught:
        b"\xff".decode("utf-8")
    assert "export LC_ALL=C.UTF-8" in explain(caught.value)


def test_removed_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    sentence = "The working directory does not exist any more. Change to an existing one with cd."
    assert explain(FileNotFoundError(2, "No such file or directory")) == sentence
