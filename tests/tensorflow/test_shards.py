"""`run_shards` and `shard_batches` with real TensorFlow processes on this host, with and without failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

import tf4slurm  # noqa: E402
from tf4slurm.errors import CheckpointError  # noqa: E402
from tf4slurm.tensorflow import Checkpoints, shard_batches  # noqa: E402

TRAINING = Path(__file__).with_name("shard_training.py")
ROWS, EPOCHS, BATCH, HELD_FROM = 300, 3, 5, 30  # as in the script

pytestmark = pytest.mark.timeout(400)  # on a busy machine, the import of TensorFlow alone takes 90 s


def start(job: Job, *options: str) -> None:
    command = (sys.executable, str(TRAINING), str(job.directory / "checkpoints"))
    job.start("--ps", "1", "--workers", "2", *options, command=command)


def counts(job: Job) -> list[int]:
    """Return how often the least and the most frequent row were seen, and the total."""
    found = re.findall(r"counts (\d+) (\d+) (\d+)", job.stdout)
    return [int(number) for number in found[-1]]


def go(job: Job) -> None:
    """Let the workers train beyond step 30."""
    (job.directory / "checkpoints").mkdir(exist_ok=True)
    (job.directory / "checkpoints" / "go").touch()


def wait_for_checkpoint(job: Job) -> None:
    assert wait_until(lambda: any((job.directory / "checkpoints").glob("*.index")), 200), job.stderr


def test_workers_train_each_row_once_per_epoch(job: Job) -> None:
    go(job)
    start(job)
    assert job.wait(300) == 0, job.stderr
    assert counts(job) == [EPOCHS, EPOCHS, EPOCHS * ROWS]
    assert "steps 180 True ['loss']" in job.stdout


@pytest.mark.parametrize("victim", ["worker/0", "ps/0", "chief/0"])
def test_no_row_is_lost_with_a_killed_task(job: Job, victim: str) -> None:
    start(job, "--max-attempts", "2")
    wait_for_checkpoint(job)
    os.kill(child_of(victim), signal.SIGKILL)
    go(job)
    assert job.wait(300) == 0, job.stderr
    lowest, _, total = counts(job)
    assert lowest >= EPOCHS
    in_hand = 4  # of two workers; TensorFlow may repeat a lost closure, and run_shards one whose result is lost
    repeated = 2 * in_hand * 10
    if victim != "worker/0":
        *_, restored = map(int, re.findall(r"restored (\d+)", job.stdout))
        assert restored > 0
        assert job.result["attempts"] == 2
        # Up to step 30 the workers trained beside the save, whose counts may be later than its step.
        repeated += max(HELD_FROM - restored, 0) * BATCH
    assert total <= EPOCHS * ROWS + repeated


@pytest.mark.parametrize("scenario", ["error", "timeout", "empty"])
def test_repeated_calls_skip_no_row(tmp_path: Path, scenario: str) -> None:
    command = [sys.executable, "-m", "tests.tensorflow.repeated_calls", scenario]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, "passed" in ran.stdout) == (0, True), ran.stdout + ran.stderr[-5000:]


def test_shards_in_hand_at_a_break_are_the_first_of_the_next_loop() -> None:
    shards = tf4slurm.data_shards(40, shard_size=10, epochs=1)
    seen: Counter[int] = Counter()
    for stop_at in (3, 4, None):
        for number, batch in enumerate(shard_batches(shards, lambda rows: rows.batch(4))):
            seen.update(batch.numpy().tolist())
            if number == stop_at:
                break
    assert sorted(seen) == list(range(40))
    assert shards.is_over


def test_batches_of_all_shards_and_position_in_checkpoint(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    shards = tf4slurm.data_shards(35, shard_size=10, epochs=2)
    step = tf.Variable(0, dtype=tf.int64)
    checkpoints = Checkpoints(tmp_path, step=step, shards=shards)
    for batch in shard_batches(shards, lambda rows: rows.batch(4)):
        seen.update(batch.numpy().tolist())
        step.assign_add(1)
        if int(step) == 7:
            checkpoints.save()
            break
    shards = tf4slurm.data_shards(35, shard_size=10, epochs=2)
    restored = Checkpoints(tmp_path, step=step, shards=shards)
    assert restored.restored is not None
    assert json.loads(json.dumps(shards.position()))["open"] == [2, 3]
    for batch in shard_batches(shards, lambda rows: rows.batch(4)):
        seen.update(batch.numpy().tolist())
    assert sorted(seen) == list(range(35))
    assert {row for row, count in seen.items() if count > 2} == set(range(20, 24))  # a batch of the shard in hand


BETWEEN_GRAPH = """
import os, pathlib, sys, time
import tf4slurm
from tf4slurm.tensorflow import shard_batches
task = os.environ["TF4SLURM_TASK"].replace("/", "-")
rows, go = (pathlib.Path(sys.argv[1], name) for name in (f"{task}.rows", "go"))
is_first = not rows.exists()
with rows.open("a", buffering=1) as log:
    shards = tf4slurm.data_shards(300, shard_size=10, epochs=2)
    for number, batch in enumerate(shard_batches(shards, lambda rows: rows.batch(5))):
        print(*batch.numpy(), file=log)
        time.sleep(0.02)
        while is_first and number == 6 and not go.exists():
            time.sleep(0.02)
"""


def test_workers_without_coordinator_lose_no_row_with_a_killed_one(job: Job) -> None:
    job.start("--ps", "0", "--workers", "1", command=(sys.executable, "-c", BETWEEN_GRAPH, str(job.children)))
    log = job.children / "worker-0.rows"
    assert wait_until(lambda: log.exists() and log.read_text().count("\n") > 5, 200), job.stderr
    os.kill(child_of("worker/0"), signal.SIGKILL)
    (job.children / "go").touch()
    assert job.wait(300) == 0, job.stderr
    seen = Counter(int(row) for path in job.children.glob("*.rows") for row in path.read_text().split())
    assert sorted(seen) == list(range(300))
    assert min(seen.values()) >= 2
    assert sum(seen.values()) <= 2 * 300 + 2 * 10  # two shards in hand


def test_shard_batches_are_refused_in_a_multi_worker_mirrored_strategy() -> None:
    shards = tf4slurm.data_shards(10, shard_size=5, epochs=1)
    with tf.distribute.MultiWorkerMirroredStrategy().scope(), pytest.raises(ValueError, match="share_of"):
        next(shard_batches(shards, lambda rows: rows.batch(5)))


def test_shards_of_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text(f"{path.stem}\n" * 2)
    shards = tf4slurm.data_shards(paths, shard_size=2, epochs=1)
    lines = [
        batch.numpy().tolist()
        for batch in shard_batches(shards, lambda paths: paths.flat_map(tf.data.TextLineDataset).batch(3))
    ]
    assert lines == [[b"0", b"0", b"1"], [b"1"], [b"2", b"2"]]


def test_position_of_other_data_is_refused(tmp_path: Path) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    Checkpoints(tmp_path, step=step, shards=tf4slurm.data_shards(35, shard_size=10, epochs=2)).save()
    with pytest.raises(CheckpointError, match="other data or another shard_size"):
        Checkpoints(tmp_path, step=step, shards=tf4slurm.data_shards(35, shard_size=5, epochs=2))
