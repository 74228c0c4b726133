"""The command `tf4slurm` and its verbs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tf4slurm import api
from tf4slurm.cli import main


def test_file_in_the_current_directory_does_not_hide_a_standard_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    command = [sys.executable, "-m", "tf4slurm", "config", "show", "--site", "none"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("verb", main._VERBS)
def test_every_verb_has_a_help_text(verb: str) -> None:
    done = CliRunner().invoke(main.cli, [verb, "--help"], obj={})
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: cli {verb}")
    assert "\nExamples:\n  " in done.output


def test_ctrl_c_ends_a_verb_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(limit: int | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "list_jobs", interrupt)
    assert CliRunner().invoke(main.cli, ["list"], obj={}).exit_code == 130
