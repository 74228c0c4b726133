"""`tf4slurm grow`, `shrink` and the end of a job that has grown. Slurm's programs are fakes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tf4slurm import __version__, api
from tf4slurm.cli.main import cli
from tf4slurm.cluster import Address
from tf4slurm.control.credentials import ControlEndpoint, create_credentials
from tf4slurm.control.messages import JOINING_RANK, Registration
from tf4slurm.errors import JobStateError, OptionError, RunDirectoryError
from tf4slurm.jobs import worker_jobs
from tf4slurm.jobs.registry import KnownJob
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, ResultFile, StatusFile, WorkerArray
from tf4slurm.joining import join
from tf4slurm.launch import launcher
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.spawners import SrunSpawner
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec.job_spec import JobSpec

QUEUE = "{}|{}|None|1|1:00|N/A|n1"
SPEC = JobSpec(("python", "train.py"), name="train", workers=1)


class GrowingJob:
    """A running job, without processes, in a directory with fakes of Slurm's programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.known = KnownJob("4711", "train-4711", str(directory))
        self.run = RunDirectory.create(directory, "train-4711")
        self.write_job()
        self.fake("sbatch", "cat > script; echo 4712")
        self.fake("scancel", 'echo "$@" >> cancelled')
        self.set_queue(("4711", "RUNNING"))

    def write_job(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "job_id": "4711",
            "counts": {"chief": 1, "ps": 1, "worker": 1},
            "process": Process.of(os.getpid()),
            "versions": {"tf4slurm": __version__},
        }
        self.run.write(JobFile(name="train", **{**values, **changes}))

    def fake(self, name: str, text: str) -> None:
        (self.directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.directory / name).chmod(0o755)

    def set_queue(self, *jobs: tuple[str, str]) -> None:
        """Let squeue print these jobs, each with its state."""
        (self.directory / "queue").write_text("".join(QUEUE.format(*job) + "\n" for job in jobs))
        self.fake("squeue", 'echo "$@" > asked; cat queue')

    def end(self, state: str = "COMPLETED") -> None:
        self.run.write_result(ResultFile(state=state, exit_code=0))

    @property
    def was_submitted(self) -> bool:
        return (self.directory / "script").exists()

    @property
    def cancelled(self) -> list[str]:
        path = self.directory / "cancelled"
        return path.read_text().split() if path.exists() else []

    @property
    def arrays(self) -> list[str]:
        return [array.job_id for array in self.run.read_lines(WorkerArray)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowingJob:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return GrowingJob(tmp_path)


# worker_arrays.jsonl


def test_simultaneous_grows_and_joins_lose_no_array(job: GrowingJob) -> None:
    number = [*range(100)]
    with ThreadPoolExecutor(8) as threads:
        for each in number:
            threads.submit(job.run.add_worker_arrays, WorkerArray(str(each)))
            threads.submit(job.run.add_worker_arrays)  # as `join` does
    assert sorted(map(int, job.arrays)) == number
    assert (job.run.path / "worker_arrays.jsonl").stat().st_mode & 0o777 == 0o600


def test_grow_keeps_earlier_arrays(job: GrowingJob) -> None:
    job.run.add_worker_arrays(WorkerArray("4700"))
    assert api.grow(job.known, 2) == "4712"
    assert (job.arrays, job.cancelled) == (["4700", "4712"], [])
    assert "#SBATCH --array=0-1" in (job.directory / "script").read_text()


# Refusals


@pytest.mark.parametrize(
    ("queue", "result"),
    [([], "COMPLETED"), ([("4711", "COMPLETED")], ""), ([("4711", "PENDING")], "REQUEUED")],
    ids=["ended", "ended without a result", "requeued"],
)
def test_job_that_ends_during_the_submission_gets_no_workers(
    job: GrowingJob, queue: list[tuple[str, str]], result: str
) -> None:
    job.set_queue(*queue)
    if result:
        job.end(result)
        path, text = job.run.path / "result.json", (job.run.path / "result.json").read_text()
        path.unlink()
        job.fake("sbatch", f"cat > script; cat > {path} <<'END'\n{text}END\necho 4712")
    with pytest.raises(JobStateError, match="new workers are cancelled"):
        api.grow(job.known, 1)
    assert (job.was_submitted, job.arrays, job.cancelled) == (True, ["4712"], ["4712"])


def test_array_that_cannot_be_recorded_is_cancelled(job: GrowingJob) -> None:
    path = job.run.path / "worker_arrays.jsonl"
    job.fake("sbatch", f"rm {path}; mkdir {path}; echo 4712")
    with pytest.raises(RunDirectoryError, match=r"worker_arrays\.jsonl"):
        api.grow(job.known, 1)
    assert job.cancelled == ["4712"]


def old_status(job: GrowingJob) -> None:
    job.write_job(process=Process("another", 1, 1))
    job.run.write(StatusFile(time=time.time() - 60, heartbeat_timeout_seconds=3.0))
    job.set_queue()


REFUSALS: dict[str, tuple[Callable[[GrowingJob], object], str]] = {
    "ended": (lambda job: job.end("FAILED"), r"has ended \(FAILED\)"),
    "requeued": (lambda job: job.end("REQUEUED"), "was requeued and does not run yet"),
    "killed on this host": (lambda job: job.write_job(process=Process(os.uname().nodename, 1, 1)), r"ended \(LOST\)"),
    "killed elsewhere": (old_status, r"has ended \(LOST\)"),
    "another version": (
        lambda job: job.write_job(versions={"tf4slurm": "0.0.9"}),
        rf"runs tf4slurm 0\.0\.9, this is {__version__}\. Start (grow|join) with the job's Python",
    ),
    "no chief": (lambda job: job.write_job(counts={"worker": 2}), "has 2 worker: only a job with a chief and ps"),
    "no elastic strategy": (lambda job: job.run.write(StatusFile(workers_error="Keras")), "more workers: Keras"),
}


@pytest.mark.parametrize(("change", "text"), REFUSALS.values(), ids=REFUSALS)
def test_job_that_can_use_no_workers_is_refused(
    job: GrowingJob, change: Callable[[GrowingJob], object], text: str
) -> None:
    change(job)
    with pytest.raises(JobStateError, match=text):
        api.grow(job.known, 1)
    with pytest.raises(JobStateError, match=text):
        join.join_job(job.known, {})
    assert (job.was_submitted, job.run.has_worker_arrays()) == (False, False)


@pytest.mark.parametrize("content", [None, "{"])
def test_unreadable_job_file_is_named(job: GrowingJob, content: str | None) -> None:
    path = job.run.path / "job.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    for call in (lambda: api.grow(job.known, 1), lambda: join.join_job(job.known, {})):
        with pytest.raises(RunDirectoryError, match=r"job\.json' is missing or cannot be read"):
            call()


def test_local_job_is_joined_on_its_host_only(job: GrowingJob) -> None:
    job.write_job(job_id=None, process=Process("other", 1, 1))
    with pytest.raises(JobStateError, match=r"is a local job on other\. Run tf4slurm join there"):
        join.join_job(KnownJob(None, "train-4711", job.known.runs_directory), {})


def test_job_that_ends_before_it_invites_workers_is_named(job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.joining.join.time.sleep", lambda _: job.end())
    with pytest.raises(JobStateError, match=r"has ended \(COMPLETED\)"):
        join.join_job(job.known, {})
    assert (job.run.has_worker_arrays(), job.arrays) == (True, [])


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
def test_options_that_grow_sets_itself_are_refused(job: GrowingJob, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        api.grow_script(job.known, 1, **options)


def test_other_options_of_sbatch_are_kept(job: GrowingJob) -> None:
    script = api.grow_script(job.known, 1, sbatch=("nice=100", "wait-all-nodes=1"), no_sbatch=("mem",), mem="1G")
    assert "#SBATCH --nice=100\n#SBATCH --wait-all-nodes=1\n" in script
    assert "--mem" not in script


def test_settings_are_read_if_a_site_is_chosen(job: GrowingJob) -> None:
    job.write_job(options={"gpus_per_worker": 2})
    Path("tf4slurm.toml").write_text('partition = "low"\ngpu-flag = "gres"\ngpu-type = "a100"\nnodes = 4')
    assert "--partition" not in api.grow_script(job.known, 1)
    script = api.grow_script(job.known, 1, site=None, account="me")
    for line in ("partition=low", "account=me", "gres=gpu:a100:2"):
        assert f"#SBATCH --{line}\n" in script
    assert "--nodes" not in script


# All runs of a job


def test_shrink_finds_the_workers_of_an_earlier_run_of_a_requeued_job(job: GrowingJob) -> None:
    job.run.add_worker_arrays(WorkerArray("4712"))
    RunDirectory.create(job.directory, "train-4711").add_worker_arrays(WorkerArray("4720"))
    job.set_queue(("4712_0", "RUNNING"), ("4720_0", "RUNNING"))
    assert api.shrink(job.known, 2) == ("4712_0", "4720_0")
    assert " 4712,4720 " in Path("asked").read_text()
    assert job.cancelled == ["4712_0", "4720_0"]


def test_end_of_a_job_cancels_the_pending_workers_of_all_runs(job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_jobs, "_QUEUE_POLL_SECONDS", 0.01)
    job.run.add_worker_arrays(WorkerArray("4712"))
    RunDirectory.create(job.directory, "train-4711").add_worker_arrays(WorkerArray("4720"))
    job.set_queue(("4712_0", "PENDING"), ("4720_0", "RUNNING"))
    job.fake("scancel", 'echo "$@" >> cancelled; : > queue')
    worker_jobs.end_worker_jobs(job.known)
    assert job.cancelled == ["4712_0"]


def test_workers_that_do_not_end_with_the_job_are_cancelled(job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_jobs, "_END_SECONDS", 0)
    job.run.add_worker_arrays(WorkerArray("4712"))
    job.set_queue(("4712_0", "RUNNING"))
    worker_jobs.end_worker_jobs(job.known)
    assert job.cancelled == ["4712_0"]


def test_failure_of_squeue_is_a_warning(job: GrowingJob, caplog: pytest.LogCaptureFixture) -> None:
    job.run.add_worker_arrays(WorkerArray("4712"))
    job.fake("squeue", "exit 1")
    worker_jobs.end_worker_jobs(job.known)
    assert "are not cancelled" in caplog.text


# The launcher


def make_launcher(job: GrowingJob, job_id: str | None = "4711") -> Launcher:
    spawner = SrunSpawner(SPEC, SlurmAllocation("4711", SPEC.num_tasks, None), {})
    return Launcher(SPEC, spawner, job.run, TerminalOutput(), job_id=job_id)


def test_launcher_ends_the_workers_of_all_runs(job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[KnownJob] = []
    monkeypatch.setattr(launcher, "end_worker_jobs", found.append)
    job.run = RunDirectory.create(job.directory, "train-4711")
    for job_id in ("4711", None):
        asyncio.run(make_launcher(job, job_id)._end_worker_jobs())
    assert found == [job.known]


def test_launcher_waits_a_bounded_time_for_slurm(job: GrowingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_END_JOBS_SECONDS", 0.05)
    may_end, ended = threading.Event(), threading.Event()

    def end_worker_jobs(_: KnownJob) -> None:
        may_end.wait(120)
        ended.set()

    monkeypatch.setattr(launcher, "end_worker_jobs", end_worker_jobs)
    asyncio.run(make_launcher(job)._end_worker_jobs())
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_control_file_is_written_again_after_an_error(
    job: GrowingJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "_PUBLISH_POLL_SECONDS", 0.01)
    calls: list[object] = []

    def write(*_: object) -> None:
        calls.append(None)
        if len(calls) < 3:
            raise RunDirectoryError("The disk is full.", path="control.json")

    monkeypatch.setattr(launcher, "write_control", write)
    job.run.add_worker_arrays()
    endpoint = ControlEndpoint((Address("n1", 1),), create_credentials().shared)
    asyncio.run(asyncio.wait_for(make_launcher(job)._publish_control(endpoint), 60))
    assert (len(calls), caplog.text.count("The disk is full.")) == (3, 1)


def test_joined_worker_is_not_an_agent_of_the_step(job: GrowingJob) -> None:
    found = make_launcher(job)
    for rank in (JOINING_RANK, 0):
        registration = Registration(rank, "n1", "10.0.0.1", 4000, f"agent-{rank}", __version__)
        record = found._service.receiver.on_registration(registration, time.monotonic())
        record.is_connected = True
        assert found.leaves_step_running == (rank == 0)


def test_help_has_the_default_of_grow() -> None:
    text = CliRunner().invoke(cli, ["grow", "--help"], obj={}).stdout
    assert "worker-%A_%a.out" in text
    assert "slurm-<id>.out" not in text
