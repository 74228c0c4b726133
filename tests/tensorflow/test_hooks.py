"""The hooks in scripts that were written for the old package, on this host."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tensorflow.tasks import Tasks

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

OLD_SCRIPTS = Path(__file__).with_name("old_scripts")
WORKERS = ["worker/0", "worker/1"]
NUMBERS = ("-ps", "1", "-workers", "2")
PRINT = """
import time

class Print(tf.train.SessionRunHook):
    def __init__(self, what):
        self.what = what

    def after_create_session(self, session, coord):
        print(self.what, "at", time.monotonic(), flush=True)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    tasks = Tasks(tmp_path, ps=1, workers=2)
    yield tasks
    tasks.end()


def with_hook(directory: Path, hook: str) -> Path:
    """Write the asynchronous script with one more hook."""
    text = (OLD_SCRIPTS / "asynchronous.py").read_text()
    changed = text.replace(
        "    hooks = [\n", f"    from tf4slurm.tensorflow.legacy.hooks import StartBarrierHook\n    hooks = [{hook},\n"
    )
    assert changed != text
    path = directory / "script.py"
    path.write_text(changed)
    return path


def test_synchronous_training_ends_without_tensorflows_two_minutes(tasks: Tasks) -> None:
    for name in ["ps/0", *WORKERS]:
        tasks.start(name, OLD_SCRIPTS / "synchronous.py", *NUMBERS)
    for name in WORKERS:
        tasks.wait_for_line(name, "stopped at step")
    stopped = time.monotonic()
    assert tasks.wait_all(["ps/0", *WORKERS]) == [0, 0, 0]
    assert time.monotonic() - stopped < 60


@pytest.mark.long
def test_worker_that_starts_before_the_chief_waits_for_it(tasks: Tasks, tmp_path: Path) -> None:
    """TensorFlow alone looks for the variables, logs that it waits, and sleeps for 30 s."""
    script = tmp_path / "script.py"
    text = (OLD_SCRIPTS / "asynchronous.py").read_text()
    line = "tf.disable_v2_behavior()\n"
    script.write_text(text.replace(line, f"{line}tf.logging.set_verbosity(tf.logging.INFO)\n"))
    with_filters(script)
    for name in ["ps/0", "worker/1"]:
        tasks.start(name, script, *NUMBERS)
    tasks.wait_for_line("worker/1", "QueueManagementHook is now")  # it is about to create its session
    tasks.start("worker/0", script, *NUMBERS)
    assert tasks.wait_all(["ps/0", *WORKERS]) == [0, 0, 0]
    assert "Graph was finalized" in tasks.output("worker/1")  # TensorFlow would log that it waits
    assert "Waiting for model to be ready" not in tasks.output("worker/1")


@pytest.mark.long
def test_chief_exits_only_after_the_last_worker_has_its_session(tasks: Tasks, tmp_path: Path) -> None:
    """TensorFlow makes no session while a task of the cluster is missing; this chief needs no other worker."""
    text = (OLD_SCRIPTS / "asynchronous.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(text)
    tasks.start("ps/0", OLD_SCRIPTS / "asynchronous.py", *NUMBERS)
    tasks.start("worker/0", with_filters(script), *NUMBERS)
    tasks.wait_for_line("worker/0", "QueueManagementHook is now")
    tasks.start("worker/1", OLD_SCRIPTS / "asynchronous.py", *NUMBERS)
    assert tasks.wait_all(["ps/0", *WORKERS]) == [0, 0, 0]


@pytest.mark.long
def test_no_worker_trains_before_all_have_started(tasks: Tasks, tmp_path: Path) -> None:
    script = with_filters(with_hook(tmp_path, "Print('come'), StartBarrierHook(), Print('train')"))
    line = "tf.disable_v2_behavior()\n"
    script.write_text(script.read_text().replace(line, line + PRINT))
    for name in ["ps/0", "worker/0"]:
        tasks.start(name, script, *NUMBERS, "-steps", "5000")
    tasks.wait_for_line(
        "worker/0", "QueueManagementHook is now"
    )  # without the barrier it would run its 5000 steps in 5 s
    tasks.start("worker/1", script, *NUMBERS, "-steps", "5000")
    assert tasks.wait_all(["ps/0", *WORKERS]) == [0, 0, 0]
    outputs = [tasks.output(name) for name in WORKERS]
    assert all(int(re.findall(r"made (\d+) steps", output)[0]) > 100 for output in outputs)
    come, train = ([float(re.findall(rf"{what} at (\S+)", each)[0]) for each in outputs] for what in ("come", "train"))
    assert max(come) < min(train)


@pytest.mark.long
def test_start_barrier_timeout_names_the_missing_worker(tasks: Tasks, tmp_path: Path) -> None:
    script = with_hook(tmp_path, "StartBarrierHook(start_timeout_seconds=2)")
    tasks.start("ps/0", script, *NUMBERS)
    tasks.start("worker/0", with_filters(script), *NUMBERS)
    assert tasks.wait("worker/0") == 1
    assert "RendezvousTimeoutError: worker/1 failed, or did not reach the start barrier within 2 s" in tasks.output(
        "worker/0"
    )


def with_filters(script: Path) -> Path:
    """Connect each worker to itself and the ps only, so that it gets a session while another is missing."""
    text = script.read_text()
    filters = 'config=tf.ConfigProto(device_filters=["/job:ps", "/job:worker/task:%d" % task_index])'
    changed = text.replace("is_chief=is_chief, hooks", f"is_chief=is_chief, {filters}, hooks")
    assert changed != text
    script.write_text(changed)
    return script


@pytest.mark.long
def test_ps_exits_after_a_worker_raises(tasks: Tasks, tmp_path: Path) -> None:
    text = (OLD_SCRIPTS / "asynchronous.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("steps += 1", 'steps += 1; raise RuntimeError("broken")'))
    tasks.start("ps/0", OLD_SCRIPTS / "asynchronous.py", *NUMBERS)
    tasks.start("worker/0", OLD_SCRIPTS / "asynchronous.py", *NUMBERS)
    tasks.start("worker/1", broken, *NUMBERS)
    assert tasks.wait_all(["ps/0", *WORKERS]) == [0, 0, 1]
    assert "RuntimeError: broken" in tasks.output("worker/1")


@pytest.mark.long
def test_synchronous_workers_end_after_the_chief_raises(tasks: Tasks, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    text = (OLD_SCRIPTS / "synchronous.py").read_text()
    broken.write_text(text.replace("train_op])[:2]\n", "train_op])[:2]\n            assert step < 20, 'broken'\n"))
    for name, script in (("ps/0", broken), ("worker/0", broken), ("worker/1", OLD_SCRIPTS / "synchronous.py")):
        tasks.start(name, script, *NUMBERS)
    assert tasks.wait_all(["ps/0", *WORKERS]) == [0, 1, 0]
    assert "AssertionError: broken" in tasks.output("worker/0")


@pytest.mark.long
def test_late_ps_costs_synchronous_training_no_step(tmp_path: Path) -> None:
    """The early ps could not connect to the late one, and gRPC backs off."""
    tasks = Tasks(tmp_path, ps=2, workers=1)
    numbers = ("-ps", "2", "-workers", "1")
    try:
        for name in ["ps/1", "worker/0"]:
            tasks.start(name, OLD_SCRIPTS / "synchronous.py", *numbers)
        for name in ["ps/1", "worker/0"]:
            tasks.wait_for_line(name, "DistributedTFQueueHook.")  # it is about to connect to all others
        tasks.start("ps/0", OLD_SCRIPTS / "synchronous.py", *numbers)
        assert tasks.wait_all(["ps/0", "ps/1", "worker/0"]) == [0, 0, 0]
        # one session.run reads the step before or after its own update
        assert re.search(r"worker 0 stopped at step (99|100)$", tasks.output("worker/0"), re.MULTILINE)
    finally:
        tasks.end()
