"""Checkpoints: restored and removed files, also after a kill during a save."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

from tf4slurm.errors import CheckpointError  # noqa: E402
from tf4slurm.tensorflow.checkpoints import Checkpoints  # noqa: E402

SAVING = Path(__file__).with_name("saving.py")


def save_at(directory: Path, *numbers: int) -> None:
    step, weight = tf.Variable(0, dtype=tf.int64), tf.Variable(0.0)
    checkpoints = Checkpoints(directory, step=step, weight=weight)
    for number in numbers:
        step.assign(number)
        weight.assign(number)
        checkpoints.save()


def restore(directory: Path) -> tuple[str | None, int, float]:
    step, weight = tf.Variable(0, dtype=tf.int64), tf.Variable(0.0)
    restored = Checkpoints(directory, step=step, weight=weight).restored
    return restored and Path(restored).name, int(step.numpy()), float(weight.numpy())


def test_newest_checkpoint_is_restored_and_older_ones_are_removed(tmp_path: Path) -> None:
    assert restore(tmp_path) == (None, 0, 0.0)
    save_at(tmp_path, 5, 10, 15, 20)
    assert restore(tmp_path) == ("ckpt-20", 20, 20.0)
    assert {path.stem for path in tmp_path.glob("*.index")} == {"ckpt-10", "ckpt-15", "ckpt-20"}


def test_second_save_at_the_same_step_keeps_the_first(tmp_path: Path) -> None:
    save_at(tmp_path, 5)
    before = {path: path.stat().st_ino for path in tmp_path.glob("ckpt-*")}
    step = tf.Variable(0, dtype=tf.int64)
    assert Checkpoints(tmp_path, step=step, weight=tf.Variable(0.0)).save() == str(tmp_path / "ckpt-5")
    assert {path: path.stat().st_ino for path in tmp_path.glob("ckpt-*")} == before


def test_directory_that_cannot_be_written_is_refused_in_two_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, step=tf.Variable(5, dtype=tf.int64), weight=tf.Variable(0.0))

    def refuse(**_: object) -> None:
        raise tf.errors.NotFoundError(None, None, f"{tmp_path}/ckpt-5; No such file or directory")

    monkeypatch.setattr(checkpoints._manager, "save", refuse)
    with pytest.raises(CheckpointError, match=r"No such file or directory\. Chief and ps must see"):
        checkpoints.save()


@pytest.mark.parametrize("what", ["index", "data-00000-of-00001"])
def test_unreadable_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_at(tmp_path, 5, 10)
    os.truncate(tmp_path / f"ckpt-10.{what}", 3)
    with caplog.at_level(logging.WARNING):
        assert restore(tmp_path) == ("ckpt-5", 5, 5.0)
    assert "ckpt-10 cannot be read" in caplog.text
    os.truncate(tmp_path / f"ckpt-5.{what}", 3)
    with pytest.raises(CheckpointError, match="None of the checkpoints in"):
        restore(tmp_path)


def test_newest_checkpoint_is_found_without_the_checkpoint_file(tmp_path: Path) -> None:
    save_at(tmp_path, 9, 10)
    (tmp_path / "checkpoint").write_text("")  # as after a power failure: TensorFlow alone would start from scratch
    assert restore(tmp_path) == ("ckpt-10", 10, 10.0)


def test_checkpoint_of_other_variables_is_refused(tmp_path: Path) -> None:
    save_at(tmp_path, 5)
    with pytest.raises(CheckpointError, match="has other variables"):
        Checkpoints(tmp_path, step=tf.Variable(0, dtype=tf.int64), weights=tf.Variable(0.0))
    with pytest.raises(CheckpointError, match="has other variables"):
        Checkpoints(tmp_path, step=tf.Variable(0, dtype=tf.int64), weight=tf.Variable([0.0, 1.0]))


def test_files_of_a_killed_save_are_removed_and_no_others(tmp_path: Path) -> None:
    save_at(tmp_path, 5)
    (tmp_path / "ckpt-6_temp").mkdir()
    (tmp_path / "ckpt-6_temp" / "part-00000-of-00001.data-00000-of-00001").touch()
    (tmp_path / "ckpt-7.data-00000-of-00002").touch()
    kept = {path.name for path in tmp_path.glob("ckpt-5.*")} | {"checkpoint", "ckpt-best.data-00000-of-00001", "notes"}
    for name in ("ckpt-best.data-00000-of-00001", "notes"):
        (tmp_path / name).touch()
    assert restore(tmp_path) == ("ckpt-5", 5, 5.0)
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("size", [0, 100])
def test_truncated_index_of_the_first_save_is_removed(tmp_path: Path, size: int) -> None:
    save_at(tmp_path, 5)
    (tmp_path / "checkpoint").unlink()  # it is written last
    os.truncate(tmp_path / "ckpt-5.index", size)
    assert restore(tmp_path) == (None, 0, 0.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("kills", [4])
def test_kill_during_a_save_keeps_the_checkpoint_before(job: Job, kills: int) -> None:
    """With keep=1, split over two ps; chief and ps are killed in turn, and each attempt checks what it restores."""
    checkpoints = job.directory / "checkpoints"
    roles = ("--ps", "2", "--workers", "1", "--max-attempts", str(kills + 1), "--grace-period", "60")
    job.start(*roles, command=(sys.executable, str(SAVING), str(checkpoints)))
    caught = 0
    for number, task in enumerate(("chief/0", "ps/1") * (kills // 2), start=1):
        wait_for_attempt(job, number)
        before = seen(checkpoints)
        assert wait_until(lambda before=before: seen(checkpoints) != before, 60), job.stdout + job.stderr  # type: ignore[misc]
        victim = child_of(task)
        assert wait_until(lambda: any(checkpoints.glob("*_temp")), 60, poll_seconds=0.001)  # a save has begun
        os.kill(victim, signal.SIGKILL)
        caught += any(checkpoints.glob("*_temp"))
    wait_for_attempt(job, kills + 1)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(100) == 128 + signal.SIGTERM, job.stdout + job.stderr
    restored = [int(number) for number in re.findall(r"restored (\d+) of", job.stdout)]
    assert len(restored) == kills + 1
    assert restored == sorted(restored)
    assert restored[-1] > restored[0]
    assert caught


def wait_for_attempt(job: Job, number: int) -> None:
    """Wait until the chief has restored so many times."""
    assert wait_until(lambda: job.stdout.count("restored") == number, 100), job.stdout + job.stderr


def seen(checkpoints: Path) -> str:
    path = checkpoints / "seen"
    return path.read_text() if path.exists() else ""
