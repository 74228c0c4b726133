"""`data_shards` in jobs on this host: lost tasks, another attempt, a stop, other data in one task."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import wait_until, wait_until_gone

SCRIPT = Path(__file__).with_name("shard_script.py")
SHARDS = 60  # of both epochs
TASKS = ("chief-0", "worker-0", "worker-1")
LEASED = 8  # the most shards that the loop of a worker leases together; a chief that saves after each leases one
MOST_REPEATED = 2 * (2 * LEASED + 1)  # in another attempt: those leased at the last save, and as many done since


def start(job: Job, *options: str, seconds: float = 0.02, hold_at: int = 0) -> None:
    """Start the job; with `hold_at`, each task trains its shard of that number until `go`, or until it is killed."""
    command = [sys.executable, str(SCRIPT), str(job.children), str(seconds), "300"]
    job.start("--ps", "1", "--workers", "2", *options, command=["env", f"HOLD_AT={hold_at}", *command])


def go(job: Job) -> None:
    (job.children / "go").touch()


def logged(job: Job, what: str, tasks: tuple[str, ...] = TASKS) -> list[int]:
    paths = [job.children / f"{task}.log" for task in tasks]
    text = "".join(path.read_text() for path in paths if path.exists())
    return [int(number) for number in re.findall(rf"^{what} (\d+)", text, re.MULTILINE)]


def kill(job: Job, task: str) -> None:
    os.kill(logged(job, "process", (task,))[-1], signal.SIGKILL)


def wait_for(job: Job, count: int, what: str = "seen", tasks: tuple[str, ...] = TASKS) -> None:
    assert wait_until(lambda: len(logged(job, what, tasks)) >= count, 60), job.stderr


def check(job: Job, most_repeated: int, *, has_all_events: bool = True) -> None:
    """Check that all shards are done, and that the job reports those seen twice, at most `most_repeated`."""
    seen = Counter(logged(job, "seen"))
    assert set(seen) == set(logged(job, "done")) == set(range(SHARDS))
    repeated = sum(seen.values()) - SHARDS
    assert repeated <= most_repeated
    if not has_all_events:
        return
    text = [event["text"] for event in job.events if event["kind"] == "shards"][-1]  # earlier attempts may have one
    reported = re.search(r"(\d+) leased again", text)
    assert repeated <= (int(reported[1]) if reported else 0) <= most_repeated


def test_all_shards_are_done_once_and_slow_task_takes_fewer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW", "worker-1")
    monkeypatch.setenv("SEEN_BY_OTHERS", "45")  # of 60: the two others would not get so many in a fixed division
    start(job)
    assert job.wait() == 0
    check(job, 0)


def test_shards_of_killed_worker_go_to_others(job: Job) -> None:
    start(job, hold_at=3)
    wait_for(job, 3, tasks=("worker-0",))
    kill(job, "worker-0")
    go(job)
    assert job.wait() == 0
    check(job, LEASED)
    shown = subprocess.run([TF4SLURM, "status", job.run_directory], capture_output=True, text=True, check=True).stdout
    assert re.search(r"^  data shards 'data': 60 of 60 done in 2 epochs, [1-8] leased again$", shown, re.M)


def test_forked_process_leases_shards_of_its_own_and_others_get_those_of_a_killed_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKS", "worker-0")
    start(job, hold_at=3)
    wait_for(job, 2, "process", ("worker-0",))
    forked = max(logged(job, "process", ("worker-0",)), key=lambda process_id: psutil.Process(process_id).create_time())
    wait_for(job, 6, tasks=("worker-0",))
    os.kill(forked, signal.SIGKILL)
    go(job)
    assert job.wait() == 0
    check(job, LEASED)


def test_next_attempt_continues_from_saved_position(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVES", "1")
    start(job, "--max-attempts", "2", hold_at=6)
    for task in TASKS:
        wait_for(job, 6, tasks=(task,))
    before = json.loads((job.children / "position.json").read_text())
    kill(job, "chief-0")
    assert job.wait() == 0
    assert job.result["attempts"] == 2
    assert before["next"] >= 5
    again = {number for number, times in Counter(logged(job, "seen")).items() if times > 1}
    assert again <= {*before["open"], *range(before["next"], SHARDS)}
    check(job, MOST_REPEATED)


def test_worker_restarted_after_a_save_continues_with_its_older_position(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide recommends, each process gives the saved position. The other processes began without one."""
    monkeypatch.setenv("SAVES", "1")
    start(job, hold_at=4)
    for task in ("chief-0", "worker-0"):
        wait_for(job, 4, tasks=(task,))
    kill(job, "worker-0")
    wait_for(job, 2, "process", ("worker-0",))
    go(job)
    assert job.wait() == 0, job.stdout
    check(job, LEASED)
    assert "DataShardsError" not in job.stdout


LARGE = """
import os, time
import tf4slurm
if os.environ["TF4SLURM_TASK"] == "ps/0":
    time.sleep(1000)
def make(**options):
    return tf4slurm.data_shards(10**7, shard_size=1, epochs=1, **options)
fingerprint = make(name="draft").position()["fingerprint"]
position = {"fingerprint": fingerprint, "next": 65_536, "open": list(range(1, 65_536, 2))}
shards = make(position=position)
print("first", shards.take(1_000).number % 2)
tf4slurm.barrier("all", roles=("chief", "worker"))
saved = shards.position()
assert saved["next"] == 65_536, saved["next"]
print("same" if saved["open"] == position["open"] else saved["open"][:10])
tf4slurm.barrier("end", roles=("chief", "worker"))
"""


def test_position_of_many_scattered_shards_is_restored_by_all_tasks(job: Job) -> None:
    job.start("--ps", "1", "--workers", "2", command=[sys.executable, "-c", LARGE])
    assert job.wait() == 0, job.stdout
    lines = job.stdout.splitlines()
    for task in ("chief/0", "worker/0", "worker/1"):
        assert {f"{task} | first 1", f"{task} | same"} <= set(lines)


def test_stop_ends_the_iteration(job: Job) -> None:
    start(job, "--grace-period", "60", seconds=1.0, hold_at=2)
    wait_for(job, 3)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    job.wait_for_event("stopping")
    go(job)
    assert job.wait() == 128 + signal.SIGTERM
    assert len(logged(job, "done")) < SHARDS


def test_task_with_other_data_is_refused_with_reason_and_others_continue(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_DATA", "worker-0")
    refusal = "this task has 31 shards an epoch and 2 epochs, another task 30 and 2"
    start(job, hold_at=2)
    assert wait_until(lambda: refusal in job.stdout, 60), job.stdout
    go(job)
    assert job.wait() == 0
    assert "process" in (job.children / "worker-0.log").read_text()  # restarted, with the same data as the others
    check(job, 0)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(200))
def test_random_kills(job: Job, seed: int, process_mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill workers, the ps, the chief and the launcher; the next attempt or job continues from the saved position."""
    monkeypatch.setenv("SAVES", "1")
    chance = random.Random(seed)
    options = ("--max-attempts", "20", "--max-worker-restarts", "20", "--heartbeat-timeout", "2")
    start(job, *options)
    most_repeated, launchers = 0, 1
    for victim in chance.choices(("worker-0", "worker-1", "chief-0", "ps-0", "launcher"), k=chance.randrange(1, 5)):
        if victim == "launcher" and job.process is not None and job.process.poll() is None:
            job.process.kill()
            job.process.wait()
            assert wait_until_gone(process_mark, timeout_seconds=30) == []
            start(job, *options)
            launchers += 1
        elif victim != "launcher":
            retry(lambda victim=victim: kill(job, victim))  # type: ignore[misc]
        most_repeated += LEASED if victim.startswith("worker") else MOST_REPEATED
        time.sleep(chance.random())
    assert job.wait(60) == 0, job.stderr
    check(job, most_repeated, has_all_events=launchers == 1)


def retry(action: Callable[[], None]) -> None:
    """Do an action on a task when the task has started."""

    def succeeds() -> bool:
        try:
            action()
        except (IndexError, FileNotFoundError, ProcessLookupError):
            return False
        return True

    wait_until(succeeds, 60)
