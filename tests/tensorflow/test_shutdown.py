"""tf4slurm.shutdown with method="queue": real ps and workers that exit in each way."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tensorflow.tasks import Tasks
from tf4slurm.errors import ShutdownError
from tf4slurm.network.ports import hold_port
from tf4slurm.scripts.channel import CompletionSignal
from tf4slurm.server_dictionary import ServerDictionary

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")
from tf4slurm.tensorflow.legacy import queues  # noqa: E402

PS = """
import os, signal
import tensorflow as tf
import tf4slurm
from tf4slurm.server_dictionary import current_server_dictionary
signal.signal(signal.SIGTERM, lambda *_: os._exit(77))  # not through TensorFlow's exit, which may abort
server = tf.distribute.Server(*current_server_dictionary())
print("serving")
ending = tf4slurm.shutdown.serve_until_done(server, method="queue", timeout_seconds={timeout})
print("done:", *ending.done, "failed:", *ending.failed)
"""
WORKER = """
import sys, time
from tf4slurm import shutdown
import tensorflow
print("ready")
{body}
"""
BUSY_PS = """
import sys, time
import tensorflow as tf
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)
server = tf.distribute.Server({"ps": [sys.argv[1]], "worker": ["127.0.0.1:1"]}, "ps", 0, config=config)
def wait():
    print("busy")
    time.sleep(5)
    return 1
with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
    wait = tf.compat.v1.py_func(wait, [], tf.int64)
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps/task:0"])
    for line in sys.stdin:
        tf.compat.v1.Session(server.target, config=config).run(wait)
"""
BODIES = {
    # only the first signal is sent
    "block": "with shutdown.done_at_end(method='queue'): pass\nshutdown.signal_done(method='queue', failed=True)",
    "raises in block": "with shutdown.done_at_end(method='queue'): raise RuntimeError('no')",
    "exits in block": "with shutdown.done_at_end(method='queue'): sys.exit(3)",
    "raises": "shutdown.signal_at_exit(method='queue')\nraise RuntimeError('no')",
    "ends": "shutdown.signal_at_exit(method='queue')",
    "signals failure": "shutdown.signal_done(method='queue', failed=True)",
}


@pytest.fixture
def make_tasks(tmp_path: Path) -> Iterator[Callable[[int, int], Tasks]]:
    made: list[Tasks] = []

    def make(ps: int, workers: int) -> Tasks:
        made.append(Tasks(tmp_path, ps, workers))
        return made[-1]

    yield make
    for tasks in made:
        tasks.end()


def start_ps(tasks: Tasks, directory: Path, timeout: float | None = 100) -> None:
    script = directory / "ps.py"
    script.write_text(PS.format(timeout=timeout))
    tasks.start("ps/0", script)
    tasks.wait_for_line("ps/0", "serving")


def start_worker(tasks: Tasks, directory: Path, index: int, how: str) -> None:
    script = directory / f"worker-{index}.py"
    script.write_text(WORKER.format(body=BODIES[how]))
    tasks.start(f"worker/{index}", script)


@pytest.mark.parametrize(
    ("ways", "codes", "line"),
    [
        (("block", "raises in block", "raises"), [0, 1, 1], "done: worker/0 failed: worker/1 worker/2"),
        pytest.param(
            *(("ends", "exits in block", "signals failure"), [0, 3, 0], "done: worker/0 failed: worker/1 worker/2"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_ps_gets_the_ending_of_each_worker(
    make_tasks: Callable[[int, int], Tasks], tmp_path: Path, ways: tuple[str, ...], codes: list[int], line: str
) -> None:
    tasks = make_tasks(1, 3)
    start_ps(tasks, tmp_path)
    for index, how in enumerate(ways):
        start_worker(tasks, tmp_path, index, how)
    assert tasks.wait_all(["worker/0", "worker/1", "worker/2"]) == codes
    ended = time.monotonic()
    assert tasks.wait("ps/0") == 0
    assert time.monotonic() - ended < 60  # the last worker sent its signal before its exit
    assert line in tasks.output("ps/0")


@pytest.mark.parametrize("works", [True, False])
def test_queues_get_the_signal_before_the_control_service(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """A ps may exit once the control service has the signal, so that signal is sent last, even if a queue fails."""
    sent: list[str] = []

    def put_in_queues(current: ServerDictionary, failed: bool) -> None:
        sent.append("queues")
        if not works:
            raise ShutdownError("no ps")

    monkeypatch.setattr(queues, "_put_in_queues", put_in_queues)
    channel = SimpleNamespace(completion_signal=CompletionSignal(lambda failed: sent.append("service")))
    monkeypatch.setattr(queues, "find_script_channel", lambda: channel)
    monkeypatch.setattr(queues, "_signals", {})
    signal = queues.queue_completion_signal(
        ServerDictionary({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, "worker", 0)
    )
    with contextlib.nullcontext() if works else pytest.raises(ShutdownError):
        signal.send()
    assert sent == ["queues", "service"]
    signal.send(failed=True)
    assert sent == ["queues", "service", "service"]


def make_busy(ps: subprocess.Popen[str]) -> None:
    assert ps.stdin is not None
    assert ps.stdout is not None
    ps.stdin.write("go\n")
    ps.stdin.flush()
    assert ps.stdout.readline() == "busy\n"


def test_polls_and_signals_outlast_a_busy_ps_and_end_when_the_ps_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_ANSWER_SECONDS", 1.0)
    held = hold_port()
    current = ServerDictionary({"ps": [f"127.0.0.1:{held.port}"], "worker": ["127.0.0.1:1"]}, "ps", 0)
    environ = os.environ | {"TF_GRPC_REUSE_PORT": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-uc", BUSY_PS, current.ps_addresses[0]]
    ps = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with tf.Graph().as_default():
            queue = queues.make_done_queue(0, 100)
            put = queue.enqueue(1)
            with pytest.raises(ShutdownError, match="does not answer"), queues.open_session(current, 0) as session:  # noqa: PT012
                polling = queues.poll(session, current.ps_addresses[0], queue.size(), math.inf)
                assert next(polling) == 0  # the ps started later
                since = time.monotonic()
                make_busy(ps)
                assert next(polling) == 0
                assert time.monotonic() - since > 3  # several polls had no answer
                make_busy(ps)
                queues.run_when_free(session, current.ps_addresses[0], put, 60)
                assert time.monotonic() - since > 7
                assert next(polling) > 0
                ps.kill()
                ps.wait()
                next(polling)
    finally:
        ps.kill()
        ps.communicate()
        held.close()


def test_waiting_ps_handles_sigterm_at_once(make_tasks: Callable[[int, int], Tasks], tmp_path: Path) -> None:
    tasks = make_tasks(1, 1)
    start_ps(tasks, tmp_path)
    tasks.signal("ps/0", signal.SIGTERM)
    assert tasks.wait("ps/0", 60) == 77  # before the timeout of the ps


@pytest.mark.long
def test_timeout_names_workers_without_a_signal(make_tasks: Callable[[int, int], Tasks], tmp_path: Path) -> None:
    tasks = make_tasks(1, 2)
    start_ps(tasks, tmp_path, timeout=1)
    assert tasks.wait("ps/0") == 1
    assert "ShutdownTimeoutError: worker/0 and worker/1 sent no completion signal within 1 s" in tasks.output("ps/0")


@pytest.mark.long
def test_worker_ends_with_an_error_if_the_ps_is_missing(
    make_tasks: Callable[[int, int], Tasks], tmp_path: Path
) -> None:
    tasks = make_tasks(1, 1)
    start_worker(tasks, tmp_path, 0, "ends")
    assert tasks.wait("worker/0") == 0
    assert "ShutdownError: /job:ps/task:0 at grpc://127.0.0.1:" in tasks.output("worker/0")
