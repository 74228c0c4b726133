"""Commands that run nothing: refused before a job starts, or named in a warning at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tf4slurm
from tests.jobs import TF4SLURM, Job
from tf4slurm.errors import CommandError
from tf4slurm.spec.batch_spec import BatchSpec

ALONE = ("--ps", "0", "--workers", "0")
REPORTS = "import tf4slurm; tf4slurm.report(step=1)"


@pytest.mark.parametrize("verb", [("run", "--local"), ("submit", "--load-env", "true"), ("submit",)], ids=" ".join)
@pytest.mark.parametrize("command", [("python", "-"), ("bash",)], ids=" ".join)
def test_program_on_standard_input_is_refused(tmp_path: Path, verb: tuple[str, ...], command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [TF4SLURM, *verb, "--site", "none", "--workers", "1", "--", *command],
        input="print('hello')",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == CommandError.exit_code, done.stderr
    assert "reads its program from standard input, which is empty for every task" in done.stderr
    assert not list(tmp_path.iterdir())


def test_program_on_standard_input_is_refused_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="'python -' reads its program from standard input"):
        tf4slurm.submit(BatchSpec(("python", "-"), workers=1))
    with pytest.raises(CommandError, match="'python --epochs' reads"):
        tf4slurm.submit(BatchSpec(("python",), workers=1, array_lines=(("train.py",), ("--epochs",))))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "command", "warns"),
    [
        (ALONE, ("true",), True),
        (("--ps", "1", "--workers", "1"), ("true",), True),
        (ALONE, ("echo", "hello"), False),
        (ALONE, ("sleep", "1.2"), False),
        (ALONE, (sys.executable, "-c", REPORTS), False),
        (ALONE, ("false",), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_job_that_has_probably_run_nothing_warns(
    job: Job, options: tuple[str, ...], command: tuple[str, ...], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if warns:  # a busy machine may need more than a second for a program that does nothing
        (job.directory / "sitecustomize.py").write_text(
            "from tf4slurm.control import watches; watches._QUICK_SECONDS = 60\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(job.directory), prepend=os.pathsep)
    job.start(*options, command=command)
    assert job.wait() == (command == ("false",))
    text = "printed nothing, started no TensorFlow server and reported no step"
    assert any(text in each for each in job.result["warnings"]) is warns
    assert any(event["kind"] == "warning" and text in event["text"] for event in job.events) is warns
    assert (text in job.stderr) is warns
