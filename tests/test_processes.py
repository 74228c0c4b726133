"""The leak check fails the test that leaks, and only that one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import marked_processes, wait_until, wait_until_gone

ROOT = Path(__file__).parent.parent
LEAKING = """
import subprocess
from pathlib import Path

def test_leaks():
    child = subprocess.Popen(["sleep", "300"])
    while not Path(f"/proc/{child.pid}/environ").read_bytes():
        pass  # for a moment after its start, Linux shows no environment of a process

def test_ends_its_child():
    subprocess.run(["true"], check=True)
"""


def test_child_is_found_until_it_exits(process_mark: str) -> None:
    with subprocess.Popen(["sleep", "300"]) as child:
        assert wait_until(lambda: bool(marked_processes(process_mark)), 60)  # see LEAKING
        assert [(found.pid, found.command) for found in marked_processes(process_mark)] == [(child.pid, "sleep 300")]
        child.kill()
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_leaked_process_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--color=no", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "2 passed, 1 error" in done.stdout
    assert ": sleep 300" in done.stdout
