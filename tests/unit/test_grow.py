"""`tf4slurm grow` and `shrink`. Slurm's programs are fakes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.growing_job import GrowingJob
from tf4slurm import api
from tf4slurm.errors import JobStateError, OptionError, RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import StatusFile, WorkerArray


def test_grow_keeps_earlier_arrays(growing_job: GrowingJob) -> None:
    growing_job.run.add_worker_arrays(WorkerArray("4700"))
    assert api.grow(growing_job.known, 2) == "4712"
    assert (growing_job.arrays, growing_job.cancelled) == (["4700", "4712"], [])
    assert "#SBATCH --array=0-1" in (growing_job.directory / "script").read_text()


@pytest.mark.parametrize(
    ("queue", "result"),
    [([], "COMPLETED"), ([("4711", "COMPLETED")], ""), ([("4711", "PENDING")], "REQUEUED")],
    ids=["ended", "ended without a result", "requeued"],
)
def test_job_that_ends_during_the_submission_gets_no_workers(
    growing_job: GrowingJob, queue: list[tuple[str, str]], result: str
) -> None:
    growing_job.set_queue(*queue)
    if result:
        growing_job.end(result)
        path, text = growing_job.run.path / "result.json", (growing_job.run.path / "result.json").read_text()
        path.unlink()
        growing_job.fake("sbatch", f"cat > script; cat > {path} <<'END'\n{text}END\necho 4712")
    with pytest.raises(JobStateError, match="new workers are cancelled"):
        api.grow(growing_job.known, 1)
    assert (growing_job.was_submitted, growing_job.arrays, growing_job.cancelled) == (True, ["4712"], ["4712"])


def test_array_that_cannot_be_recorded_is_cancelled(growing_job: GrowingJob) -> None:
    path = growing_job.run.path / "worker_arrays.jsonl"
    growing_job.fake("sbatch", f"rm {path}; mkdir {path}; echo 4712")
    with pytest.raises(RunDirectoryError, match=r"worker_arrays\.jsonl"):
        api.grow(growing_job.known, 1)
    assert growing_job.cancelled == ["4712"]


@pytest.mark.parametrize("accepts", [False, True])
def test_grow_says_that_it_waits_for_the_chief(
    growing_job: GrowingJob, caplog: pytest.LogCaptureFixture, accepts: bool
) -> None:
    growing_job.run.write(StatusFile(time=time.time(), accepts_workers=accepts))
    assert api.grow(growing_job.known, 1) == "4712"
    assert ("the chief of train-4711 has made no strategy yet" in caplog.text) != accepts


# Options and settings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 2}, "'nodes' is not an option of tf4slurm grow"),
        ({"epilogue": "true"}, "'epilogue' is not an option of tf4slurm grow"),
        ({"array": "0-3"}, "'array' is not an option of tf4slurm grow"),
        ({"partitoin": "x"}, "Did you mean 'partition'"),
        *(
            ({option: (name,)}, rf"--{option.replace('_', '-')} [\w-]+ is not possible")
            for option in ("sbatch", "no_sbatch")
            for name in ("array", "arra=0-3", "--nodes=2", "N=2", "n=2", "job-name=x", "wrap=true", "test-only", "wait")
        ),
    ],
)
def test_options_that_grow_sets_itself_are_refused(growing_job: GrowingJob, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        api.grow_script(growing_job.known, 1, **options)


def test_other_options_of_sbatch_are_kept(growing_job: GrowingJob) -> None:
    script = api.grow_script(
        growing_job.known, 1, sbatch=("nice=100", "wait-all-nodes=1"), no_sbatch=("mem",), mem="1G"
    )
    assert "#SBATCH --nice=100\n#SBATCH --wait-all-nodes=1\n" in script
    assert "--mem" not in script


def test_settings_are_read_if_a_site_is_chosen(growing_job: GrowingJob) -> None:
    growing_job.write_job(options={"gpus_per_worker": 2})
    Path("tf4slurm.toml").write_text('partition = "low"\ngpu-flag = "gres"\ngpu-type = "a100"\nnodes = 4')
    assert "--partition" not in api.grow_script(growing_job.known, 1)
    script = api.grow_script(growing_job.known, 1, site=None, account="me")
    for line in ("partition=low", "account=me", "gres=gpu:a100:2"):
        assert f"#SBATCH --{line}\n" in script
    assert "--nodes" not in script


# All runs of a job


def test_shrink_finds_the_workers_of_an_earlier_run_of_a_requeued_job(growing_job: GrowingJob) -> None:
    growing_job.run.add_worker_arrays(WorkerArray("4712"))
    RunDirectory.create(growing_job.directory, "train-4711").add_worker_arrays(WorkerArray("4720"))
    growing_job.set_queue(("4712_0", "RUNNING"), ("4720_0", "RUNNING"))
    assert api.shrink(growing_job.known, 2) == ("4712_0", "4720_0")
    assert " 4712,4720 " in Path("asked").read_text()
    assert growing_job.cancelled == ["4712_0", "4720_0"]
