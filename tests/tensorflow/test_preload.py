"""Jobs whose processes are forked from one that has imported TensorFlow: training, restarts, attempts, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.jobs import Job, end_processes
from tests.processes import child_of, wait_until
from tf4slurm.preload.client import Preloader
from tf4slurm.system.child_process import Child, ForkRequest

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

TRAINING = Path(__file__).with_name("training.py")
ROLES = ("--ps", "1", "--workers", "2")


def is_forked(process_id: int) -> bool:
    """Return whether the parent of a process is a fork of a preloader."""
    parent = psutil.Process(process_id).parent()
    return parent is not None and any(word.endswith("preload/program.py") for word in parent.cmdline())


def start(job: Job, steps: int, *options: str) -> None:
    command = (sys.executable, str(TRAINING), str(job.directory / "checkpoints"), str(steps), "500")
    job.start(*ROLES, "--preload", "always", *options, command=command)


def test_training_goes_on_after_a_killed_worker_and_resumes_after_a_killed_ps(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        start(job, 20_000, "--max-attempts", "2")
        checkpoints = tmp_path / "checkpoints"
        assert wait_until(lambda: len(list(checkpoints.glob("*.index"))) > 1, 120), job.stderr
        tasks = ("chief/0", "ps/0", "worker/0", "worker/1")
        first = {task: child_of(task) for task in tasks}
        assert all(map(is_forked, first.values()))
        os.kill(first["worker/0"], signal.SIGKILL)
        job.wait_for_event("restarting", "worker/0")
        assert wait_until(lambda: child_of_or_none("worker/0") not in (None, first["worker/0"]), 60)
        second = child_of("worker/0")
        assert is_forked(second)
        os.kill(first["ps/0"], signal.SIGKILL)
        assert job.wait(120) == 0, job.stderr
        assert "not preloaded" not in job.stderr
        lines = job.stdout.splitlines()
        restored = [line.split() for line in lines if " restored " in line]
        assert [words[3] == "None" for words in restored] == [True, False]
        (done,) = [line for line in lines if "done {" in line]
        result = json.loads(done.partition("done ")[2])
        assert result["weight"] >= result["step"] >= 20_000  # a checkpoint may have later weights than its counter
        starts = [event["text"] for event in job.events if event["kind"] == "started"]
        assert len(starts) == 9
        assert all(text.endswith(", with TensorFlow preloaded)") for text in starts)
        assert all(task["is_forked"] for task in job.result["tasks"])


def child_of_or_none(task: str) -> int | None:
    try:
        return child_of(task)
    except ValueError:  # none, or two for a moment
        return None


def test_reason_is_told_if_a_script_cannot_be_preloaded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('starting')\nimport tensorflow\n")
    with Job(tmp_path) as job:
        job.start("--ps", "0", "--workers", "0", "--preload", "always", command=(sys.executable, str(script)))
        assert job.wait(120) == 0, job.stderr
        why = "TensorFlow is not preloaded, because line 1 of train.py calls a function"
        assert f"rank 0: {why}" in job.stdout + job.stderr
        (task,) = job.result["tasks"]
        assert (task["is_forked"], task["not_forked"]) == (False, "line 1 of train.py calls a function")


FORKS, AT_ONCE, KILLED_EACH = 2_000, 6, 10
COMPUTES = """
import tensorflow as tf
import sys, time

@tf.function
def multiply(matrix):
    return tf.reduce_sum(tf.matmul(matrix, matrix))

total = float(multiply(tf.ones([64, 64])))
print("computed", flush=True)
if sys.argv[1:] == ["waits"]:
    time.sleep(300)
assert total == 64.0**3
"""


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_two_thousand_forks_under_load_end_and_leave_no_process(tmp_path: Path) -> None:
    """Six at a time, beside two processes that use both cores. Each tenth is killed while it waits."""
    script = tmp_path / "train.py"
    script.write_text(COMPUTES)
    command = [sys.executable, str(script)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"], text=True) for _ in range(2)]
    preloader = Preloader(command, environ, has_own_group=False)
    results: Counter[int] = Counter()

    async def run(number: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            printed, has_computed = bytearray(), asyncio.Event()
            loop = asyncio.get_running_loop()

            def on_output(data: bytes) -> None:
                printed.extend(data)
                if b"computed\n" in printed:
                    loop.call_soon_threadsafe(has_computed.set)

            is_killed = number % KILLED_EACH == 0
            arguments = ["waits"] if is_killed else []
            fork = ForkRequest(preloader.address, 120.0)
            child = await Child.start([*command, *arguments], environ, on_output, fork=fork)
            assert child.is_forked, child.not_forked
            if is_killed:
                await asyncio.wait_for(has_computed.wait(), 120)
                child.signal(signal.SIGKILL)
            results[await asyncio.wait_for(child.wait(), 120)] += 1
            assert printed.endswith(b"computed\n")  # after what TensorFlow says on some processors
            await asyncio.to_thread(child.kill_left_processes)

    async def run_all() -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(run(number, slots) for number in range(FORKS)))

    try:
        asyncio.run(run_all())
        (program,) = [each for each in psutil.Process().children() if each.pid not in {one.pid for one in load}]
        assert wait_until(lambda: program.children() == [], 10)  # no keeper is left, nor a zombie
    finally:
        preloader.close()
        end_processes(load)
    assert results == {0: FORKS - FORKS // KILLED_EACH, -signal.SIGKILL: FORKS // KILLED_EACH}
