"""Real children: their output, their exits, and that no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.disk import unresponsive_disk
from tests.processes import wait_until
from tf4slurm.system import exec_child
from tf4slurm.system.child_process import Child
from tf4slurm.system.proc import find_children, find_descendants, find_others, read_stat, signal_process

PYTHON = sys.executable

DAEMON = """
import subprocess, sys
output = None if sys.argv[1] == "holds" else subprocess.DEVNULL
print(subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=output, stderr=output).pid)
"""
HEEDS = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True)\n"
    "while True: time.sleep(0.01)"  # not signal.pause(), which misses a signal that arrives just before it
)
OWNER = """
import asyncio, os, sys
from tf4slurm.system.child_process import Child
from tf4slurm.system.proc import adopt_orphans, kill_descendants

async def main():
    adopt_orphans()
    child = await Child.start(sys.argv[2:], os.environ, lambda data: os.write(1, data))
    if sys.argv[1] == "wait":
        await child.wait()
        kill_descendants()
    else:
        print("child", child.process_id, flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""

REAPER = """
import asyncio, os, signal, subprocess
import psutil
from tf4slurm.system.child_process import Child
from tf4slurm.system.proc import adopt_orphans, reap_orphans

ORPHANS = 'for i in 1 2 3 4 5 6 7 8; do (setsid sleep 0.1 & sleep 0.2 &); done; echo ready; exec sleep 300'

def run_false(_):
    return subprocess.run(["false"]).returncode

async def main():
    adopt_orphans()
    child = await Child.start(["sh", "-c", ORPHANS], os.environ, lambda data: None)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, lambda: reap_orphans(child.process_id))
    codes = await asyncio.gather(*(asyncio.to_thread(run_false, number) for number in range(60)))
    print(codes.count(1), flush=True)
    while len(psutil.Process().children()) > 1:  # a zombie is one, too
        await asyncio.sleep(0.01)
    child.signal(signal.SIGKILL)
    print(await child.wait(), flush=True)

asyncio.run(main())
"""


class Output:
    """The output of a child so far."""

    def __init__(self) -> None:
        self.data = b""

    def __call__(self, data: bytes) -> None:
        self.data += data

    async def wait_for(self, text: bytes) -> None:
        await poll(lambda: text in self.data)


async def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def is_alive(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_child(*command: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a child to its end; return its return code and its output."""

    async def run() -> tuple[int, str]:
        output = Output()
        child = await Child.start(command, dict(os.environ) if environment is None else environment, output)
        returncode = await child.wait()
        return returncode, output.data.decode()

    return asyncio.run(run())


def run_owner(what: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([PYTHON, "-c", OWNER, what, *command], stdout=subprocess.PIPE, text=True)


def test_output_and_error_arrive_together_and_in_order() -> None:
    assert run_child("sh", "-c", "echo one; echo two >&2; printf three") == (0, "one\ntwo\nthree")


def test_output_arrives_while_the_child_runs() -> None:
    async def run() -> None:
        output = Output()
        child = await Child.start(["sh", "-c", "echo here; exec sleep 300"], os.environ, output)
        await output.wait_for(b"here\n")
        assert is_alive(child.process_id)
        await child.end(60)
        assert await child.wait() == -signal.SIGTERM

    asyncio.run(run())


def test_large_output_arrives_completely() -> None:
    returncode, text = run_child(PYTHON, "-c", "print('x' * 3_000_000)")
    assert (returncode, len(text)) == (0, 3_000_001)


def test_child_has_exactly_the_given_environment() -> None:
    returncode, text = run_child("/usr/bin/env", environment={"PATH": "/usr/bin:/bin", "TF_CONFIG": "{}"})
    lines = set(text.splitlines())
    assert returncode == 0
    assert {"PATH=/usr/bin:/bin", "TF_CONFIG={}"} <= lines
    assert not {line for line in lines if line.startswith(("HOME=", "PYTEST"))}


def test_group_is_signalled_only_while_its_id_cannot_be_in_use_again(monkeypatch: pytest.MonkeyPatch) -> None:
    is_taken, killpg = [], os.killpg

    def record(group_id: int, number: int) -> None:
        is_taken.append(Path(f"/proc/{group_id}").exists())
        killpg(group_id, number)

    async def run() -> None:
        child = await Child.start(["sh", "-c", "exit 3"], os.environ, lambda data: None)
        assert await child.wait() == 3
        child.signal(signal.SIGKILL)
        await child.end(1)

    monkeypatch.setattr(os, "killpg", record)
    asyncio.run(run())
    assert is_taken == [True]


def test_signal_is_not_sent_to_another_process_with_the_same_id() -> None:
    with subprocess.Popen(["sleep", "300"]) as process:
        stat = read_stat(process.pid)
        signal_process(process.pid, stat.start_ticks - 1, signal.SIGKILL)
        assert read_stat(process.pid).state != "Z"
        signal_process(process.pid, stat.start_ticks, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    signal_process(process.pid, stat.start_ticks, signal.SIGTERM)


def test_child_has_empty_stdin_and_its_own_process_group() -> None:
    code = "import os, sys; print(repr(sys.stdin.read()), os.getpid() == os.getpgid(0))"
    assert run_child(PYTHON, "-c", code) == (0, "'' True\n")


@pytest.mark.parametrize(
    ("script", "returncode"),
    [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -KILL $$", -9), ("kill -TERM $$", -15)],
)
def test_returncode_of_a_child(script: str, returncode: int) -> None:
    assert run_child("sh", "-c", script) == (returncode, "")


def test_missing_program_is_reported_with_127(tmp_path: Path) -> None:
    returncode, text = run_child(str(tmp_path / "nothing"))
    assert returncode == 127
    assert text == f"tf4slurm: the program '{tmp_path}/nothing' does not exist on {os.uname().nodename}.\n"


@pytest.mark.parametrize("content", [None, "no program at all"], ids=["directory", "not executable"])
def test_program_that_cannot_be_executed_is_reported_with_126(tmp_path: Path, content: str | None) -> None:
    program = tmp_path / "program"
    if content is None:
        program.mkdir()
    else:
        program.write_text(content)
    returncode, text = run_child(str(program))
    assert returncode == 126
    assert text.startswith(f"tf4slurm: the program '{program}' cannot be run on {os.uname().nodename}: ")
    assert "Permission denied" in text


def test_missing_interpreter_is_reported_as_such(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    returncode, text = run_child(str(script))
    assert returncode in (126, 127)
    assert "interpreter" in text


def test_child_gets_sigterm_first() -> None:
    async def run() -> None:
        output = Output()
        child = await Child.start([PYTHON, "-c", HEEDS], os.environ, output)
        await output.wait_for(b"ready")
        await child.end(60)
        assert await child.wait() == 5

    asyncio.run(run())


def seconds_to_end(
    script: str, grace_period_seconds: float, *, ignores_stop_signals: bool = False
) -> tuple[float, int]:
    """Start a shell script, end it once it has printed "ready"; return the duration of the end and the return code."""

    async def run() -> tuple[float, int]:
        output = Output()
        child = await Child.start(["sh", "-c", script], os.environ, output, ignores_stop_signals=ignores_stop_signals)
        await output.wait_for(b"ready")
        before = time.monotonic()
        await child.end(grace_period_seconds)
        returncode = await child.wait()
        return time.monotonic() - before, returncode

    return asyncio.run(run())


def test_child_that_runs_on_after_sigterm_is_killed_after_the_grace_period() -> None:
    seconds, returncode = seconds_to_end("trap : TERM; echo ready; while :; do sleep 0.1; done", 0.3)
    assert returncode == -signal.SIGKILL
    assert 0.3 <= seconds < 30


@pytest.mark.parametrize(("script", "ignores_stop_signals"), [("trap '' TERM; ", False), ("", True)])
def test_child_that_ignores_sigterm_is_killed_at_once(script: str, ignores_stop_signals: bool) -> None:
    seconds, returncode = seconds_to_end(
        f"{script}echo ready; sleep 300; sleep 300", 100, ignores_stop_signals=ignores_stop_signals
    )
    assert returncode == -signal.SIGKILL
    assert seconds < 60


def test_own_handler_of_a_child_that_ignores_stop_signals_has_the_grace_period() -> None:
    _, returncode = seconds_to_end(f'{PYTHON} -c "{HEEDS}"; exit $?', 60, ignores_stop_signals=True)
    assert returncode == 5


def test_child_runs_on_after_its_handler_until_the_grace_period_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, signal_child = Output(), Child.signal

    def signal_and_wait(child: Child, number: int) -> None:
        signal_child(child, number)
        assert wait_until(lambda: b"saved" in output.data, 60)

    async def run() -> int:
        script = f'{PYTHON} -c "{HEEDS}"; echo saved; sleep 1; exit 6'
        child = await Child.start(["sh", "-c", script], os.environ, output, ignores_stop_signals=True)
        await output.wait_for(b"ready")
        monkeypatch.setattr(Child, "signal", signal_and_wait)  # as if this process were delayed right after it
        await child.end(60)
        return await child.wait()

    assert asyncio.run(run()) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_child_ignores_the_stop_signals_of_slurm(number: signal.Signals, tmp_path: Path) -> None:
    async def run() -> int:
        output = Output()
        script = f"echo ready; while ! [ -e '{tmp_path}/end' ]; do sleep 0.01; done; exit 6"
        child = await Child.start(["sh", "-c", script], os.environ, output, ignores_stop_signals=True)
        await output.wait_for(b"ready")
        child.signal(number)
        (tmp_path / "end").touch()
        return await child.wait()

    assert asyncio.run(run()) == 6


def test_stopped_child_is_killed() -> None:
    async def run() -> int:
        child = await Child.start(["sleep", "300"], os.environ, Output())
        os.kill(child.process_id, signal.SIGSTOP)
        await poll(lambda: psutil.Process(child.process_id).status() == psutil.STATUS_STOPPED)
        await child.end(0.1)
        return await child.wait()

    assert asyncio.run(run()) == -signal.SIGKILL


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a file system")
def test_python_on_a_stalled_file_system_delays_its_child_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        with unresponsive_disk(tmp_path / "disk"):
            monkeypatch.setattr(sys, "executable", str(tmp_path / "disk" / "python"))
            starting = asyncio.create_task(Child.start(["true"], os.environ, Output()))
            for _ in range(50):  # the event loop runs on
                await asyncio.sleep(0.02)
            assert not starting.done()
        with pytest.raises(OSError, match="python"):
            await asyncio.wait_for(starting, 60)

    asyncio.run(run())


@pytest.mark.parametrize("turns", [1, 1_000])
def test_child_whose_start_is_cancelled_is_killed(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    async def run() -> None:
        monkeypatch.setattr(subprocess, "Popen", start_and_note)
        starting = asyncio.create_task(Child.start(["sleep", "300"], os.environ, Output()))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            child = await starting
            child.signal(signal.SIGKILL)  # it has exited before
        await poll(lambda: bool(started) and started[0].returncode is not None)

    asyncio.run(run())
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("thread", ["child", "child-output"])
def test_child_is_not_started_if_no_thread_can_be(thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes is simulated, since it does not apply to root."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    async def run() -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        await asyncio.wait_for(Child.start(["sleep", "300"], os.environ, Output()), 60)

    before = find_children(os.getpid())
    with pytest.raises(RuntimeError, match="can't start new thread"):
        asyncio.run(run())
    assert find_children(os.getpid()) == before


def test_ending_a_child_that_has_ended_does_nothing() -> None:
    async def run() -> int:
        child = await Child.start(["true"], os.environ, Output())
        await child.wait()
        await child.end(5)
        return await child.wait()

    assert asyncio.run(run()) == 0


def test_processes_that_the_child_has_started_are_killed_after_it() -> None:
    returncode, text = run_child(
        "sh", "-c", "sleep 300 & echo $!; (trap '' TERM; sleep 300; sleep 300) & echo $!; exit 4"
    )
    assert returncode == 4
    grandchildren = list(map(int, text.split()))
    assert len(grandchildren) == 2
    assert wait_until(lambda: not any(map(is_alive, grandchildren)), timeout_seconds=60, poll_seconds=0.005)


def test_daemon_that_keeps_the_output_open_delays_nothing() -> None:
    before = time.monotonic()
    returncode, text = run_child(PYTHON, "-c", DAEMON, "holds")
    seconds = time.monotonic() - before
    assert is_alive(int(text))
    os.kill(int(text), signal.SIGKILL)
    assert returncode == 0
    assert seconds < 60  # the daemon runs for 300 s


@pytest.mark.parametrize("seconds", [0, 0.2])
def test_what_a_child_has_printed_is_read_though_a_daemon_keeps_the_output_open(seconds: float) -> None:
    async def run() -> bytes:
        output = Output()

        def read_slowly(data: bytes) -> None:
            time.sleep(seconds)
            output(data)

        child = await Child.start([PYTHON, "-c", DAEMON, "holds"], os.environ, read_slowly)
        await child.wait_for_exit()
        await child.wait_for_printed()
        return output.data

    text = asyncio.run(run())
    assert is_alive(int(text))
    os.kill(int(text), signal.SIGKILL)


def test_orphans_of_another_session_are_adopted_and_killed() -> None:
    with run_owner("wait", PYTHON, "-c", DAEMON, "frees") as owner:
        text, _ = owner.communicate(timeout=60)
    assert owner.returncode == 0
    assert wait_until(lambda: not is_alive(int(text)), timeout_seconds=60, poll_seconds=0.005)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_programs_of_other_code_are_no_descendants_of_a_child() -> None:
    with subprocess.Popen(["sleep", "300"]) as own, subprocess.Popen(["sleep", "300"], start_new_session=True) as left:
        try:
            everything, others = find_descendants(), find_descendants(with_own_group=False)
        finally:
            own.kill()
            left.kill()
    assert {own.pid, left.pid} <= {each.process_id for each in everything}
    assert left.pid in {each.process_id for each in others}
    assert own.pid not in {each.process_id for each in others}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_children_from_before_a_job_are_no_descendants_of_it() -> None:
    command = ["sh", "-c", "sleep 300 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as before:
        assert before.stdout is not None
        grandchild = int(before.stdout.readline())
        others = find_others()
        with subprocess.Popen(["sleep", "300"], start_new_session=True) as child:
            try:
                everything, of_the_job = find_descendants(), find_descendants(others=others)
            finally:
                child.kill()
                os.killpg(before.pid, signal.SIGKILL)
    assert {before.pid, grandchild, child.pid} <= {each.process_id for each in everything}
    assert {before.pid, grandchild} & {each.process_id for each in of_the_job} == set()
    assert {before.pid, grandchild} <= {process_id for process_id, _ in others}  # also if the grandchild is adopted
    assert child.pid in {each.process_id for each in of_the_job}


def test_orphans_are_reaped_beside_other_subprocesses_which_keep_their_exit_codes() -> None:
    done = subprocess.run([PYTHON, "-c", REAPER], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["60", str(-signal.SIGKILL)], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_child_is_killed_with_its_owner() -> None:
    with run_owner("stay", "sleep", "300") as owner:
        assert owner.stdout is not None
        word, process_id = owner.stdout.readline().split()
        assert word == "child"
        assert is_alive(int(process_id))
        owner.kill()
    assert wait_until(lambda: not is_alive(int(process_id)), timeout_seconds=60, poll_seconds=0.005)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_child_whose_owner_was_killed_before_never_starts() -> None:
    unused_process_id = 2**22 + 1  # above the largest process id of Linux
    command = [PYTHON, "-I", "-S", exec_child.__file__, str(unused_process_id), "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (137, "")
