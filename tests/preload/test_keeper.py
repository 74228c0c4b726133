"""A forked child belongs to its agent as an executed one does: its end, its signals, its descendants, every loss."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.preload.both_ways import TIMEOUT_SECONDS, Scripts
from tests.processes import wait_until
from tests.pythons import find_python
from tf4slurm.preload import messages
from tf4slurm.preload.client import NotPreloaded, Preloader, PreloaderAddress, PythonCommand
from tf4slurm.system.child_process import Child, ForkRequest

SLEEPS = "import time\nimport tensorflow\nprint('ready', flush=True)\ntime.sleep(300)\n"
DAEMON = (
    "import subprocess, sys\n"
    "import tensorflow\n"
    "print(subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)\n"
)


class Running:
    """A preloader of a script in a process of this test, and what its children have printed."""

    def __init__(self, scripts: Scripts, text: str) -> None:
        scripts.write("train.py", text)
        self.command = (sys.executable, str(scripts.work / "train.py"))
        self.environ = scripts.environ()
        self.preloader = Preloader(self.command, self.environ, has_own_group=True)
        self.printed = bytearray()

    async def start(self, timeout_seconds: float = TIMEOUT_SECONDS) -> Child:
        return await Child.start(
            self.command,
            self.environ,
            self.printed.extend,
            fork=ForkRequest(self.preloader.address, timeout_seconds),
        )

    async def start_until(self, text: bytes) -> Child:
        child = await self.start()
        await self.wait_for(text)
        return child

    async def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while text not in self.printed:
            assert time.monotonic() < deadline, self.printed
            await asyncio.sleep(0.01)

    @property
    def process(self) -> psutil.Process:
        """The preloader."""
        found = []
        for each in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # a zombie of another test
                if "program.py" in " ".join(each.cmdline()):
                    found.append(each)
        (preloader,) = found
        return preloader


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def run(scripts: Scripts, text: str, main: Callable[[Running], Coroutine[Any, Any, None]]) -> None:
    running = Running(scripts, text)
    try:
        asyncio.run(main(running))
    finally:
        running.preloader.close()


def is_alive(process_id: int) -> bool:
    return psutil.pid_exists(process_id) and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE


def is_gone(process_id: int) -> bool:
    return not is_alive(process_id)


def find_processes(script: str) -> set[int]:
    """Return the ids of the descendants of this process that run a script."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.cmdline()[1:2] == [script]:
                found.add(each.pid)
    return found


def test_child_goes_on_without_the_preloader_and_the_next_is_executed(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        child = await running.start_until(b"ready")
        running.process.kill()
        await asyncio.sleep(0.2)
        assert is_alive(child.process_id)
        child.signal(signal.SIGTERM)
        assert await child.wait() == -signal.SIGTERM
        second = await running.start()
        assert second.not_forked.startswith("the preloader has ended")
        second.signal(signal.SIGKILL)
        await second.wait()

    run(scripts, SLEEPS, main)


def test_loss_of_the_keeper_ends_its_child(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        child = await running.start_until(b"ready")
        os.kill(child.parent_id, signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        wait_until(lambda: not is_alive(child.process_id), 10)

    run(scripts, SLEEPS, main)


def test_ended_children_leave_no_zombies(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        for _ in range(2):
            child = await running.start()
            assert await child.wait() == 0
            assert child.is_forked
            await asyncio.to_thread(child.kill_left_processes)
        assert wait_until(lambda: running.process.children() == [], 10)

    run(scripts, "import tensorflow\n", main)


def test_child_is_executed_if_the_preloader_does_not_answer(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        first = await running.start_until(b"ready")
        preloader = running.process
        preloader.suspend()
        second = await running.start(timeout_seconds=0.5)
        assert second.not_forked == "the preloader did not answer within 0.5 s"
        preloader.resume()  # its answer comes too late: no third child
        third = await running.start()
        while running.printed.count(b"ready") < 3:
            await asyncio.sleep(0.01)
        assert find_processes(running.command[1]) == {first.process_id, second.process_id, third.process_id}
        for child in (first, second, third):
            child.signal(signal.SIGKILL)
            await child.wait()

    run(scripts, SLEEPS, main)


def test_what_the_child_leaves_behind_is_killed(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        child = await running.start()
        assert await child.wait() == 0
        daemon = int(running.printed.split()[-1])
        assert is_alive(daemon)
        child.kill_left_processes()
        assert not is_alive(daemon)
        wait_until(lambda: not is_alive(child.parent_id), 10)

    run(scripts, DAEMON, main)


OWNER = """
import asyncio, os, sys
from tf4slurm.preload.client import Preloader
from tf4slurm.system.child_process import Child, ForkRequest

async def main():
    preloader = Preloader(sys.argv[1:], os.environ, has_own_group=True)
    child = await Child.start(
        sys.argv[1:], os.environ, lambda data: os.write(1, data), fork=ForkRequest(preloader.address, 60)
    )
    print("child", child.process_id, child.parent_id, child.not_forked, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def test_child_and_its_processes_end_when_their_agent_is_killed(scripts: Scripts) -> None:
    path = scripts.write("train.py", DAEMON + "import time\ntime.sleep(300)\n")
    command = (sys.executable, "-c", OWNER, sys.executable, str(path))
    environ = scripts.environ(PYTHONPATH=f"{scripts.site}:{os.getcwd()}")
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as owner:
        assert owner.stdout is not None
        lines: list[str] = []
        while len([line for line in lines if line.startswith("child") or line.strip().isdigit()]) < 2:
            lines.append(owner.stdout.readline())
            assert lines[-1], lines
        (child,) = [line.split() for line in lines if line.startswith("child")]
        (daemon,) = [int(line) for line in lines if line.strip().isdigit()]
        preloaders = [each.pid for each in psutil.Process(owner.pid).children()]
        owner.kill()
    for process_id in (int(child[1]), int(child[2]), daemon, *preloaders):
        wait_until(functools.partial(is_gone, process_id), 10)


def test_signals_that_follow_the_end_reach_nobody(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        child = await running.start()
        assert await child.wait() == 0
        child.signal(signal.SIGKILL)
        child.kill_left_processes()
        child.signal(signal.SIGKILL)

    run(scripts, "import tensorflow\n", main)


def ask(address: PreloaderAddress, request: dict[str, Any]) -> Any:
    """Return the answer to a request, or None if the preloader gives none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_SECONDS)
        connection.connect("\0" + address.name)
        messages.send(connection, request)
        return messages.receive(connection)[0]


def test_request_with_another_token_has_no_answer(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        await running.start_until(b"printed")
        assert ask(running.preloader.address, {"token": "another"}) is None

    run(scripts, "import tensorflow\n", main)


AS_ANOTHER_USER = """
import json, os, socket, struct, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(20)
connection.connect("\\0" + sys.argv[1])
data = json.dumps({"token": sys.argv[2]}).encode()
try:
    connection.sendall(struct.pack("=I", len(data)) + data)
    print(connection.recv(100))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_request_of_another_user_has_no_answer(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        await running.start_until(b"printed")
        address = running.preloader.address
        command = (sys.executable, "-c", AS_ANOTHER_USER, address.name, address.token)
        asked = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert (asked.stdout, asked.stderr) == ("b''\n", "")

    run(scripts, "import tensorflow\n", main)


def test_connection_that_sends_nothing_delays_others_only_shortly(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        await running.start_until(b"printed")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect("\0" + running.preloader.address.name)
            child = await running.start()
            assert child.not_forked == ""
            assert await child.wait() == 0

    run(scripts, "import tensorflow\n", main)


CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "limit": (lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_NOFILE, (512, 512)), "limits"),
    "niceness": (lambda: os.nice(1), "niceness"),
    "session": (os.setsid, "session"),
    "oom_score_adj": (lambda: Path("/proc/self/oom_score_adj").write_text("500"), "oom_score_adj"),
}
IN_A_CHANGED_PROCESS = """
import asyncio, json, os, sys
sys.path.insert(0, {root!r})
from tests.preload.test_keeper import CHANGES
from tf4slurm.preload.client import PreloaderAddress
from tf4slurm.system.child_process import Child, ForkRequest
if os.fork():
    os.wait()
    os._exit(0)
CHANGES[sys.argv[1]][0]()
async def main():
    address = PreloaderAddress(*sys.argv[2:4])
    environ = dict(os.environ)
    environ.pop("LC_CTYPE", None)  # which this program's Python has set
    child = await Child.start(json.loads(sys.argv[4]), environ, lambda data: None, fork=ForkRequest(address, 60))
    await child.wait()
    print(child.not_forked, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("name", CHANGES)
def test_process_that_inherits_something_else_is_executed(name: str, scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        await running.start_until(b"printed")
        address = running.preloader.address
        code = IN_A_CHANGED_PROCESS.format(root=os.getcwd())
        arguments = (name, address.name, address.token, json.dumps(running.command))
        asked = await asyncio.to_thread(
            subprocess.run,
            (sys.executable, "-c", code, *arguments),
            env=running.environ,
            capture_output=True,
            text=True,
        )
        assert f"the {CHANGES[name][1]}" in asked.stdout, asked.stderr

    run(scripts, "import tensorflow\n", main)


def test_change_of_the_script_is_seen(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        first = await running.start()
        await first.wait()
        scripts.write("train.py", "import os\nos.environ['X'] = '1'\nimport tensorflow\n")
        second = await running.start()
        await second.wait()
        assert (first.not_forked, second.not_forked) == ("", "train.py has changed")

    run(scripts, "import tensorflow\n", main)


def test_module_that_starts_a_thread_is_not_forked(scripts: Scripts) -> None:
    package = scripts.site / "starts_a_thread"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
    )

    async def main(running: Running) -> None:
        child = await running.start()
        await child.wait()
        assert child.not_forked.startswith("an imported module has started the thread")

    run(scripts, "import tensorflow\nimport starts_a_thread\n", main)


@pytest.mark.parametrize("version", ["3.7", "3.8"])
def test_older_python_is_executed(scripts: Scripts, version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    scripts.write("train.py", "import tensorflow\nprint('ran')\n")
    executed, forked = scripts.run((python, "train.py"))
    assert (forked.returncode, forked.output) == (0, executed.output)
    assert forked.not_forked == "Python is older than 3.9"


def test_module_that_fails_is_imported_by_the_script(scripts: Scripts) -> None:
    (scripts.site / "fails.py").write_text("raise RuntimeError('broken')\n")

    async def main(running: Running) -> None:
        child = await running.start()
        assert await child.wait() == 1
        assert b"RuntimeError: broken" in running.printed

    run(scripts, "import fails\nimport tensorflow\n", main)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("bash train.sh", "bash is not Python"),
        ("./train.py", "./train.py is not Python"),
        ("python", "the command has no script"),
        ("python -c pass", "Python has the option -c"),
        ("python -i train.py", "Python has the option -i"),
        ("python --version", "Python has the option --version"),
    ],
)
def test_command_that_is_not_preloaded(command: str, why: str) -> None:
    with pytest.raises(NotPreloaded, match=why):
        PythonCommand.parse(command.split())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py -u a", PythonCommand(("python",), "train.py", None, ("-u", "a"))),
        (
            "/usr/bin/python3.11 -u -X dev -W error train.py",
            PythonCommand(("/usr/bin/python3.11", "-u", "-X", "dev", "-W", "error"), "train.py", None, ()),
        ),
        ("python -Wignore -m a.b -m c", PythonCommand(("python", "-Wignore"), None, "a.b", ("-m", "c"))),
    ],
)
def test_parts_of_a_command(command: str, expected: PythonCommand) -> None:
    assert PythonCommand.parse(command.split()) == expected


def test_many_children_at_once(scripts: Scripts) -> None:
    async def main(running: Running) -> None:
        children = await asyncio.gather(*(running.start() for _ in range(50)))
        assert {child.not_forked for child in children} == {""}
        assert await asyncio.gather(*(child.wait() for child in children)) == [7] * 50
        await asyncio.gather(*(asyncio.to_thread(child.kill_left_processes) for child in children))

    run(scripts, "import sys\nimport tensorflow\nsys.exit(7)\n", main)
