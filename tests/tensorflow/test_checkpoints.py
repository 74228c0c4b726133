"""Checkpoints: restored and removed files, also after a kill during a save."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job
from tests.processes import child_of, wait_until

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

from tensorflow.python.eager import cancellation  # noqa: E402
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable  # noqa: E402

from tests.faults.disk import fill, small_disk  # noqa: E402
from tf4slurm.control.messages import CheckpointState, ScriptState  # noqa: E402
from tf4slurm.errors import CheckpointError  # noqa: E402
from tf4slurm.tensorflow.checkpoint_files import count_bytes, find_finished, make_room  # noqa: E402
from tf4slurm.tensorflow.checkpoints import Checkpoints  # noqa: E402
from tf4slurm.tensorflow.concurrent_saves import separate_threads  # noqa: E402

SAVING = Path(__file__).with_name("saving.py")
STACK = """
\t [[{{node SaveV2_1}}]]
Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations_upon_oom.

Additional GRPC error information from remote target /job:ps/replica:0/task:0/device:CPU:0 while calling /Enqueue:
:UNKNOWN:Error received from peer  {grpc_message:"/saved/ckpt-5; No space left on device\\n", grpc_status:8}
"""
"""What follows the cause in the message of a ps."""


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


@pytest.mark.parametrize(
    ("error", "message", "advice"),
    [
        (tf.errors.NotFoundError, "No such file or directory", "Chief and ps must see"),
        (tf.errors.PermissionDeniedError, "Read-only file system", "Give a directory on a shared file system"),
        (tf.errors.ResourceExhaustedError, "Disk quota exceeded", "Make room on its file system"),
        (tf.errors.UnknownError, "Input/output error", "Its file system does not work"),
        (tf.errors.AbortedError, "Stale file handle", "Its file system does not work"),
        (tf.errors.ResourceExhaustedError, "No space left on device" + STACK, "Make room on its file system"),
    ],
)
def test_directory_that_cannot_be_written_is_refused_in_two_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str, advice: str
) -> None:
    """The errors are made by the test, as TensorFlow makes them from errno."""
    checkpoints = Checkpoints(tmp_path, step=tf.Variable(5, dtype=tf.int64), weight=tf.Variable(0.0))

    def refuse(**_: object) -> None:
        raise error(None, None, f"{tmp_path}/ckpt-5; {message}")

    monkeypatch.setattr(checkpoints._manager, "save", refuse)
    cause = message.partition("\n")[0]
    with pytest.raises(CheckpointError, match=rf"{cause}\. {advice}") as raised:
        checkpoints.save()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [tf.errors.UnavailableError, tf.errors.AbortedError])
def test_loss_of_a_ps_during_a_due_save_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    checkpoints = Checkpoints(tmp_path, step=tf.Variable(5, dtype=tf.int64), weight=tf.Variable(0.0))

    def fail(**_: object) -> None:
        raise error(None, None, "failed to connect to all addresses")

    monkeypatch.setattr(checkpoints._manager, "save", fail)
    checkpoints.begin_save()
    with pytest.raises(error):
        checkpoints.save()


def test_due_save_holds_the_counter_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, weight = tf.Variable(5, dtype=tf.int64), tf.Variable(5.0)
    checkpoints = Checkpoints(tmp_path, step=step, weight=weight)
    save = checkpoints._manager.save

    def save_later(**options: int) -> str:
        step.assign(7)
        weight.assign(7.0)
        return str(save(**options))

    monkeypatch.setattr(checkpoints._manager, "save", save_later)
    checkpoints.begin_save()
    checkpoints.finish_save()
    assert restore(tmp_path) == ("ckpt-5", 5, 7.0)


def test_only_a_due_save_lets_sparse_updates_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow reads a variable without a copy, so that its next sparse update copies it, and blocks all others."""
    read = BaseResourceVariable._read_variable_op
    reads: list[bool] = []  # whether each read was without a copy

    def note(variable: Any, no_copy: bool = False) -> Any:
        if variable is table:
            reads.append(no_copy)
        return read(variable, no_copy)

    step, table = tf.Variable(1, dtype=tf.int64), tf.Variable(tf.zeros([4, 2]))
    checkpoints = Checkpoints(tmp_path, step=step, table=table)
    monkeypatch.setattr(BaseResourceVariable, "_read_variable_op", note)
    for way, without_copy in ((checkpoints.begin_save, False), (checkpoints.save, True)):
        step.assign_add(1)
        table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3])))
        reads.clear()
        way()
        checkpoints.finish_save()
        assert reads == [without_copy]
        assert checkpoints.latest is not None
        saved = tf.train.load_checkpoint(checkpoints.latest).get_tensor("table/.ATTRIBUTES/VARIABLE_VALUE")
        assert saved.tolist() == [[0, 0], [0, 0], [0, 0], [int(step) - 1] * 2]


def test_interrupted_wait_leaves_the_save_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tf.Variable(5, dtype=tf.int64)
    checkpoints = Checkpoints(tmp_path, step=step, weight=tf.Variable(0.0))
    numbers: list[int] = []
    go_on = threading.Event()

    def save(checkpoint_number: int) -> str:
        numbers.append(checkpoint_number)
        signal.pthread_kill(main_thread, signal.SIGINT)
        go_on.wait()
        return f"ckpt-{checkpoint_number}"

    main_thread = threading.get_ident()
    monkeypatch.setattr(checkpoints._manager, "save", save)
    with pytest.raises(KeyboardInterrupt):
        begin_and_finish(checkpoints)
    step.assign(6)
    checkpoints.begin_save()
    go_on.set()
    checkpoints.finish_save()
    assert numbers == [5]


def begin_and_finish(checkpoints: Checkpoints) -> None:
    checkpoints.begin_save()
    checkpoints.finish_save()


def test_second_object_continues_the_number_of_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = FakeChannel()
    monkeypatch.setattr("tf4slurm.tensorflow.checkpoints.find_script_channel", lambda: channel)
    save_at(tmp_path / "first", 5, 10)
    assert dataclasses.replace(channel.sent[-1], seconds=0.0, num_bytes=0) == CheckpointState(
        f"{tmp_path}/first/ckpt-10", 10, 2
    )
    restore(tmp_path / "second")
    assert channel.sent[-1] == CheckpointState("", 0, 2)


class FakeChannel:
    """A script channel that notes the states of checkpoints."""

    def __init__(self) -> None:
        self.state = ScriptState()
        self.sent: list[CheckpointState] = []

    def send(self, checkpoint: CheckpointState) -> None:
        self.state = ScriptState(checkpoint=checkpoint)
        self.sent.append(checkpoint)


def test_size_of_a_checkpoint_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "ckpt-5.index").symlink_to(tmp_path / "missing")
    assert count_bytes(f"{tmp_path}/ckpt-5") == 0


def test_threads_do_not_share_a_cancellation_manager() -> None:
    separate_threads()
    manager = cancellation.CancellationManager()
    found: list[object] = []
    with cancellation.CancellationManagerContext(manager):
        thread = threading.Thread(target=lambda: found.append(cancellation.context()))
        thread.start()
        thread.join()
        assert cancellation.context() is manager
    assert found == [None]
    assert cancellation.context() is None


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory whose file system has 256 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    with small_disk(tmp_path / "disk"):
        yield tmp_path / "disk"


def test_full_disk_loses_older_checkpoints_but_not_the_newest(disk: Path) -> None:
    step, weight = tf.Variable(0, dtype=tf.int64), tf.Variable(tf.zeros(25_000))  # 100 kB
    checkpoints = Checkpoints(disk, step=step, weight=weight)
    for number in (1, 2, 3, 4):
        step.assign(number)
        checkpoints.save()
    assert {path.stem for path in disk.glob("*.index")} == {"ckpt-3", "ckpt-4"}
    assert {Path(path).name for path in find_finished(disk)} == {"ckpt-3", "ckpt-4"}
    assert restore_array(disk) == 4


def test_due_save_on_a_full_disk_warns_and_a_later_one_succeeds(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, weight = tf.Variable(1, dtype=tf.int64), tf.Variable(tf.zeros(25_000))
    checkpoints = Checkpoints(disk, step=step, weight=weight)
    checkpoints.save()
    fill(disk)
    step.assign(2)
    with caplog.at_level(logging.WARNING):
        checkpoints.begin_save()
        checkpoints.finish_save()
    assert f"The checkpoint of step 2 could not be written to {disk}: " in caplog.text
    assert "Make room on its file system: it, or this user's quota of it, is full." in caplog.text
    assert f"The newest checkpoint is {disk}/ckpt-1. The training goes on" in caplog.text
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        checkpoints.save()
    (disk / "filling").unlink()
    checkpoints.begin_save()
    assert checkpoints.save() == f"{disk}/ckpt-2"
    assert restore_array(disk) == 2


def test_more_failed_saves_than_allowed_end_the_training(disk: Path) -> None:
    step = tf.Variable(1, dtype=tf.int64)
    checkpoints = Checkpoints(disk, step=step, max_failed_saves=1, weight=tf.Variable(tf.zeros(100_000)))  # 400 kB
    checkpoints.begin_save()
    checkpoints.finish_save()
    assert not list(disk.glob("ckpt-*")), "the unfinished files use the disk"
    checkpoints.begin_save()
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        checkpoints.finish_save()


def test_room_is_made_only_from_other_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at(tmp_path, 5, 10, 15)
    (tmp_path / "ckpt-best.index").touch()
    assert make_room(tmp_path, f"{tmp_path}/ckpt-15")
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"checkpoint", "ckpt-15", "ckpt-best"}
    assert not make_room(tmp_path, f"{tmp_path}/ckpt-15")
    save_at(tmp_path, 20)

    def refuse(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not make_room(tmp_path, f"{tmp_path}/ckpt-20"), "the caller would try to save for ever"


def restore_array(directory: Path) -> int:
    step = tf.Variable(0, dtype=tf.int64)
    assert Checkpoints(directory, step=step, weight=tf.Variable(tf.ones(25_000))).restored
    return int(step.numpy())


def test_full_disk_keeps_the_checkpoint_that_was_restored(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, weight = tf.Variable(0, dtype=tf.int64), tf.Variable(tf.zeros(25_000))
    checkpoints = Checkpoints(disk, step=step, weight=weight)
    for number in (1, 2):
        step.assign(number)
        checkpoints.save()
    os.truncate(disk / "ckpt-2.index", 3)
    checkpoints = Checkpoints(disk, step=step, weight=weight)
    assert checkpoints.restored == f"{disk}/ckpt-1"
    assert "ckpt-2 cannot be read" in caplog.text
    step.assign(3)
    checkpoints.save()
    assert {path.stem for path in disk.glob("*.index")} == {"ckpt-1", "ckpt-3"}
    assert restore_array(disk) == 3


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


@pytest.mark.timeout(4000)  # each of its waits has a limit of its own
@pytest.mark.long
@pytest.mark.parametrize(("way", "kills"), [("paused", 4), ("beside", 4), ("beside", 100)])
def test_kill_during_a_save_keeps_the_checkpoint_before(job: Job, way: str, kills: int) -> None:
    """With keep=1, split over two ps; chief and ps are killed in turn, and each attempt checks what it restores."""
    checkpoints = job.directory / "checkpoints"
    roles = ("--ps", "2", "--workers", "1", "--max-attempts", str(kills + 1), "--grace-period", "60")
    job.start(*roles, command=(sys.executable, str(SAVING), str(checkpoints), way))
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
