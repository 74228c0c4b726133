"""`tf4slurm grow` and `shrink` on a real Slurm: workers that join, leave, are preempted, or lose their host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).parents[1] / "local" / "joining_script.py"
_SECONDS = 60


class GrowingJob:
    """A submitted job of one chief, one ps and one worker, whose workers can change."""

    def __init__(self, lab: SlurmLab, directory: Path, *options: str) -> None:
        self.lab, self.directory = lab, directory
        self.children = directory / "children"
        self.children.mkdir()
        command = (sys.executable, str(SCRIPT), str(self.children))
        options = ("-J", "grow", "-t", "5", "-N1", "-n3", "--workers", "1", "--heartbeat-timeout", "60", *options)
        self.id = self.run("submit", *options, "--", *command).stdout.strip()
        self.run_directory = directory / "runs" / f"grow-{self.id}"
        self.wait_for_chief()

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.directory.glob("slurm-*.out"))

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environ = {"XDG_CONFIG_HOME": str(self.directory / "config")}
        return self.lab.run(TF4SLURM, *arguments, cwd=self.directory, env=environ, check=check)

    def wait_for_chief(self) -> None:
        assert wait_until((self.children / "chief-0.pid").exists, _SECONDS), self.output

    def grow(self, *arguments: str) -> str:
        return self.run("grow", self.id, *arguments).stdout.strip()

    def workers(self) -> list[list[int]]:
        path = self.children / "workers.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[list[int]], bool]) -> list[int]:
        assert wait_until(lambda: bool(self.workers()) and condition(self.workers()[-1]), _SECONDS), self.events
        return self.workers()[-1]

    @property
    def events(self) -> list[dict[str, Any]]:
        text = (self.run_directory / "events.jsonl").read_text().rpartition("\n")[0]
        return [json.loads(line) for line in text.splitlines()]

    def kinds(self, task: str) -> list[str]:
        return [event["kind"] for event in self.events if event["task"] == task]

    def node_of(self, task: str) -> str:
        registered = next(
            event["text"] for event in self.events if (event["kind"], event["task"]) == ("registered", task)
        )
        return str(registered).split(" from ")[1].split()[0]

    def finish(self) -> None:
        (self.children / "end").touch()
        assert self.lab.wait_for_job(self.id) == ("COMPLETED", "0:0"), self.output


@pytest.fixture
def growing(lab: SlurmLab, tmp_path: Path) -> GrowingJob:
    return GrowingJob(lab, tmp_path)


def test_workers_join_and_leave_and_end_with_the_job(growing: GrowingJob) -> None:
    array = growing.grow("--workers", "2", "-t", "5")
    growing.wait_for(lambda workers: len(workers) == 3)
    assert wait_until(lambda: "worker/2 (joined)" in growing.run("status", growing.id).stdout, _SECONDS)
    later = growing.grow("--workers", "1", "--sbatch", "begin=now+1hour")
    assert growing.run("shrink", growing.id, "--workers", "1").stdout.split() == [f"{later}_0"]
    (left,) = growing.run("shrink", growing.id, "--workers", "1").stdout.split()
    assert left == f"{array}_1"
    growing.wait_for(lambda workers: len(workers) == 2)
    refused = growing.run("shrink", growing.id, "--workers", "3", check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    growing.grow("--workers", "1", "--sbatch", "begin=now+1hour")
    growing.finish()
    assert growing.lab.wait_for_job(f"{array}_0") == ("COMPLETED", "0:0")
    assert growing.lab.wait_for_job(f"{array}_1")[0] == "CANCELLED"
    assert wait_until(lambda: growing.lab.queue() == [], _SECONDS)
    assert "this worker has ended: Training is done" in (growing.run_directory / f"worker-{array}_0.out").read_text()
    assert [event for event in growing.events if event["kind"] == "lost"] == []


def test_preempted_worker_leaves_without_harm_and_joins_again(growing: GrowingJob) -> None:
    growing.grow("--workers", "1", "-t", "5", "-p", "low", "-x", growing.node_of("chief/0"))
    growing.wait_for(lambda workers: workers == [0, 1])
    options = ("-p", "high", "-w", growing.node_of("worker/1"), "--exclusive", "-o/dev/null", "--wrap", "sleep 1")
    other = growing.lab.run("sbatch", "--parsable", *options)
    growing.wait_for(lambda workers: workers == [0])
    assert wait_until(lambda: growing.kinds("worker/1")[-2:] == ["leaving", "terminated"], _SECONDS), growing.events
    growing.lab.wait_for_job(other.stdout.strip())
    growing.wait_for(lambda workers: workers == [0, 2])
    growing.finish()


def test_lost_host_of_a_worker_does_not_harm_the_job(lab: SlurmLab, tmp_path: Path) -> None:
    growing = GrowingJob(lab, tmp_path, "--heartbeat-timeout", "10")
    growing.grow("--workers", "1", "-t", "5", "-x", growing.node_of("chief/0"))
    growing.wait_for(lambda workers: workers == [0, 1])
    node = growing.node_of("worker/1")
    growing.lab.crash(node)
    try:
        growing.wait_for(lambda workers: workers == [0])
        assert "lost" in growing.kinds("worker/1")
        growing.finish()
    finally:
        growing.lab.boot(node)
        growing.lab.wait_idle(90)


def test_workers_end_with_a_run_that_is_requeued(lab: SlurmLab, tmp_path: Path) -> None:
    growing = GrowingJob(lab, tmp_path, "--requeue", "1")
    array = growing.grow("--workers", "1", "-t", "5")
    growing.wait_for(lambda workers: workers == [0, 1])
    growing.grow("--workers", "1", "--sbatch", "begin=now+1hour")
    (growing.children / "chief-0.pid").unlink()
    lab.run("scancel", "--signal=USR1", "--batch", growing.id)  # the signal that Slurm sends before the time limit
    assert lab.wait_for_job(f"{array}_0") == ("COMPLETED", "0:0")
    assert wait_until(lambda: [line.split()[0] for line in lab.queue()] == [growing.id], _SECONDS), lab.queue()
    lab.release(growing.id)
    growing.wait_for_chief()
    (growing.children / "workers.log").unlink()
    growing.grow("--workers", "1", "-t", "5")
    growing.wait_for(lambda workers: workers == [0, 1])
    growing.finish()


def test_worker_without_the_run_directory_is_refused(growing: GrowingJob, tmp_path: Path) -> None:
    copy = tmp_path / "unshared" / growing.run_directory.name
    shutil.copytree(growing.run_directory, copy, ignore=shutil.ignore_patterns("control.json"))
    job = json.loads((copy / "job.json").read_text())
    job["options"]["start_timeout_seconds"] = 1  # how long `join` waits for control.json
    (copy / "job.json").write_text(json.dumps(job))
    refused = growing.run("join", str(copy), check=False)
    assert refused.returncode == 2
    assert "not shared with this host" in refused.stderr
    growing.finish()


def test_grow_of_an_ended_job_is_refused(growing: GrowingJob) -> None:
    growing.finish()
    refused = growing.run("grow", growing.id, "--workers", "1", check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has ended" in refused.stderr
    assert growing.lab.queue() == []


def test_grow_of_a_job_whose_chief_can_use_no_workers_is_refused(lab: SlurmLab, tmp_path: Path) -> None:
    growing = GrowingJob(lab, tmp_path, "--env", "WORKERS_ERROR=no worker can join")
    status = growing.run_directory / "status.json"
    assert wait_until(lambda: bool(json.loads(status.read_text())["workers_error"]), _SECONDS)
    refused = growing.run("grow", growing.id, "--workers", "1", check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "cannot use more workers: no worker can join" in refused.stderr
    assert len(lab.queue()) == 1
    growing.finish()


def test_worker_that_waits_for_the_chief_has_its_reason_in_status(lab: SlurmLab, tmp_path: Path) -> None:
    growing = GrowingJob(lab, tmp_path, "--env", "WORKERS_LATER=1")
    added = growing.run("grow", growing.id, "--workers", "1", "-t", "5")
    assert f"the chief of grow-{growing.id} has made no strategy yet" in added.stderr
    text = "worker/1 (joined) waits: the script of the chief has made no strategy with tf4slurm.tensorflow yet."
    assert wait_until(lambda: text in growing.run("status", growing.id).stdout, _SECONDS, poll_seconds=0.5)
    (growing.children / "say").touch()
    growing.wait_for(lambda workers: workers == [0, 1])
    assert wait_until(lambda: " waits: " not in growing.run("status", growing.id).stdout, _SECONDS, poll_seconds=0.5)
    growing.finish()
