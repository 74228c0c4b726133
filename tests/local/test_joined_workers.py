"""`tf4slurm join` beside a job on this host: workers that join, leave, fail, are killed, or are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM, Job, end_processes
from tests.processes import wait_until
from tests.servers import free_ports

SCRIPT = Path(__file__).with_name("joining_script.py")
_END_SECONDS = 60


class GrowingJob:
    """A job with one ps and two workers, and processes that join it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *options: str, roles: tuple[str, ...] = ("--ps", "1", "--workers", "2")) -> None:
        self.job.start(*roles, *options, command=[sys.executable, str(SCRIPT), str(self.job.children)])
        assert wait_until((self.job.children / "chief-0.pid").exists, 60), self.job.stderr

    def join(self, name: str | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [TF4SLURM, "join", name or str(self.job.run_directory)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def workers(self) -> list[list[int]]:
        path = self.job.children / "workers.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, *workers: int) -> None:
        assert wait_until(lambda: self.workers()[-1:] == [list(workers)], 60), (self.workers(), self.job.events)

    def child(self, index: int) -> int:
        return int((self.job.children / f"worker-{index}.pid").read_text())

    def end(self) -> int:
        (self.job.children / "end").touch()
        return self.job.wait()


def _exists(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


@pytest.fixture
def growing(job: Job) -> Iterator[GrowingJob]:
    found = GrowingJob(job)
    yield found
    end_processes(found.processes)


def test_worker_joins_and_ends_with_the_job(growing: GrowingJob) -> None:
    growing.start()
    worker = growing.join()
    growing.wait_for(0, 1, 2)
    assert growing.end() == 0
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert worker.returncode == 0, text
    assert "this worker has ended: Training is done" in text
    assert wait_until(lambda: not _exists(growing.child(2)), 60)
    tasks = {task["task"]: task for task in growing.job.result["tasks"]}
    assert list(tasks) == ["chief/0", "ps/0", "worker/0", "worker/1", "worker/2"]
    assert [name for name, task in tasks.items() if task["has_joined"]] == ["worker/2"]
    assert not (growing.job.run_directory / "control.json").exists()
    assert (growing.job.run_directory / "logs" / "worker-2.1.log").exists()


def test_worker_leaves_after_sigterm_when_the_chief_releases_it(growing: GrowingJob) -> None:
    growing.start()
    worker = growing.join()
    growing.wait_for(0, 1, 2)
    growing.job.wait_for_event("joined", "worker/2")
    (growing.job.children / "hold").touch()
    worker.send_signal(signal.SIGTERM)
    growing.job.wait_for_event("leaving", "worker/2")
    assert worker.poll() is None
    os.kill(growing.child(2), 0)
    (growing.job.children / "hold").unlink()
    growing.wait_for(0, 1)
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert (worker.returncode, "it leaves" in text) == (0, True), text
    assert wait_until(lambda: not _exists(growing.child(2)), 60)
    assert growing.end() == 0


def test_worker_leaves_when_its_terminal_is_closed(growing: GrowingJob) -> None:
    growing.start()
    worker = growing.join()
    growing.wait_for(0, 1, 2)
    os.killpg(worker.pid, signal.SIGHUP)
    growing.wait_for(0, 1)
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert (worker.returncode, "it leaves" in text) == (0, True), text
    assert growing.end() == 0


@pytest.mark.parametrize("what", ["process", "child", "agent"])
def test_killed_worker_costs_the_job_nothing(growing: GrowingJob, what: str) -> None:
    growing.start("--max-worker-restarts", "0")
    worker = growing.join()
    growing.wait_for(0, 1, 2)
    child = growing.child(2)
    agent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"process": worker.pid, "child": child, "agent": agent}[what], signal.SIGKILL)
    growing.wait_for(0, 1)
    worker.communicate(timeout=_END_SECONDS)
    assert worker.returncode != 0
    assert wait_until(lambda: not _exists(child), 60)
    assert growing.end() == 0
    assert growing.job.result["attempts"] == 1


def test_two_workers_join_in_another_attempt_again(growing: GrowingJob) -> None:
    growing.start("--max-attempts", "2")
    growing.join()
    growing.join()
    growing.wait_for(0, 1, 2, 3)
    os.kill(int((growing.job.children / "ps-0.pid").read_text()), signal.SIGKILL)
    assert wait_until(lambda: growing.workers().count([0, 1, 2, 3]) >= 2, 60), growing.workers()
    assert growing.end() == 0
    assert [worker.wait(_END_SECONDS) for worker in growing.processes] == [0, 0]
    assert growing.job.result["attempts"] == 2


def test_worker_ends_when_the_launcher_is_killed(growing: GrowingJob) -> None:
    growing.start("--heartbeat-timeout", "10")
    worker = growing.join()
    growing.wait_for(0, 1, 2)
    assert growing.job.process is not None
    growing.job.process.kill()
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert worker.returncode == 7, text
    assert wait_until(lambda: not _exists(growing.child(2)), 60)
    assert (growing.job.run_directory / "control.json").exists()
    late = growing.join()
    _, text = late.communicate(timeout=_END_SECONDS)
    assert (late.returncode, "has ended (LOST)" in text) == (2, True), text


def test_worker_is_refused_by_a_job_whose_script_cannot_use_it(
    growing: GrowingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS_ERROR", "TensorFlow 9.9 is not supported")
    growing.start()
    growing.job.wait_for_event("first_step", "chief/0")
    worker = growing.join()
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert worker.returncode != 0
    assert "TensorFlow 9.9 is not supported" in text
    assert growing.end() == 0
    assert len(growing.job.result["tasks"]) == 4


def test_worker_cannot_join_a_job_without_ps(growing: GrowingJob) -> None:
    growing.job.start("--ps", "0", "--workers", "2", "--no-chief")
    growing.job.wait_for_child("worker-0")
    worker = growing.join()
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert worker.returncode == 2
    assert "only a job with a chief and ps can use more workers" in text
    growing.job.end_child("worker-0")
    growing.job.end_child("worker-1")
    assert growing.job.wait() == 0


def test_worker_without_a_free_port_is_refused(growing: GrowingJob) -> None:
    first = free_ports(5)
    growing.start("--ports", f"{first}-{first + 4}")  # four tasks and the control service
    worker = growing.join()
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert (worker.returncode, "None of the 5 ports" in text) == (3, True), text
    assert growing.end() == 0
    assert len(growing.job.result["tasks"]) == 4


def test_worker_cannot_join_an_isolated_job(growing: GrowingJob) -> None:
    growing.start("--isolated")
    worker = growing.join()
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert worker.returncode == 2
    assert "start it without --isolated" in text
    assert growing.end() == 0


def test_worker_cannot_join_an_ended_job(growing: GrowingJob) -> None:
    growing.start()
    assert growing.end() == 0
    worker = growing.join()
    _, text = worker.communicate(timeout=_END_SECONDS)
    assert (worker.returncode, "has ended" in text) == (2, True), text


@pytest.mark.parametrize("verb", [("join",), ("grow", "--workers", "1")])
def test_job_whose_files_another_user_could_have_written_is_refused(growing: GrowingJob, verb: tuple[str, ...]) -> None:
    growing.start()
    path = growing.job.run_directory / "job.json"
    assert wait_until(lambda: len(json.loads(path.read_text())["versions"]) > 1, 60), "the launcher writes it again"
    path.chmod(0o666)
    command = [TF4SLURM, verb[0], str(growing.job.run_directory), *verb[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_END_SECONDS)
    assert (done.returncode, "TF4SLURM_TRUST" in done.stderr) == (3, True), done
    assert growing.end() == 0
    assert len(growing.job.result["tasks"]) == 4


def test_grow_of_a_local_job_is_refused(growing: GrowingJob) -> None:
    growing.start()
    done = subprocess.run(
        [TF4SLURM, "grow", str(growing.job.run_directory), "--workers", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a local job" in done.stderr
    assert "tf4slurm join" in done.stderr
    assert growing.end() == 0
