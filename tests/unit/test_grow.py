"""`tf4slurm grow` records the jobs of Slurm that it submits, and `shrink` finds them. Slurm's programs are fakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tf4slurm.batch_spec import BatchSpec
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import GuestFile
from tf4slurm.submission import guests


def test_worker_that_starts_during_the_submission_does_not_remove_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path, "train-4711")
    job = KnownJob("4711", "train-4711", str(tmp_path))
    job_ids = iter(("4712", "4713"))

    def submit(*_: object) -> str:
        assert directory.has_guests()  # else the worker that starts now would write the file
        return next(job_ids)

    monkeypatch.setattr(guests, "make_guest_spec", lambda *_: BatchSpec(("true",), single=True))
    monkeypatch.setattr(guests, "submit_script", submit)
    assert [guests.grow(job, 1, {}, {}) for _ in range(2)] == ["4712", "4713"]
    assert directory.read(GuestFile) == GuestFile(("4712", "4713"))


def test_shrink_finds_the_workers_of_an_earlier_run_of_a_requeued_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id in ("4712", "4720"):
        RunDirectory.create(tmp_path, "train-4711").write(GuestFile((job_id,)))
    programs = {
        "squeue": 'echo "$6" > asked; for job in 4712 4720; do echo "${job}_0|RUNNING|None|1|1:00|N/A|n1"; done',
        "scancel": 'echo "$@" >> cancelled',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert guests.shrink(KnownJob("4711", "train-4711", str(tmp_path)), 2) == ("4712_0", "4720_0")
    assert Path("asked").read_text() == "4712,4720\n"
    assert Path("cancelled").read_text().split() == ["4712_0", "4720_0"]
