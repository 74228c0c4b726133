"""`tf4slurm test` on this host, with and without TensorFlow, and its failure."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tf4slurm.cluster import Address
from tf4slurm.doctor import smoke_test
from tf4slurm.network.reachability import answer_checks, find_fault

pytestmark = pytest.mark.keras


def run_test(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [TF4SLURM, "test", "--local", "--runs-directory", str(directory), *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=200)


def test_plain_processes(tmp_path: Path) -> None:
    done = run_test(tmp_path, "--plain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It works: 3 tasks on this host; 2 of 2 tasks answered the chief")
    assert done.stdout.count("\n") == 1


def test_task_whose_agent_holds_the_port_is_retried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def answer() -> None:
            listener.accept()[0].close()
            listener.setblocking(False)
            await answer_checks(listener, "ps/0", 0)
            await asyncio.to_thread(is_over.wait, 120)

        cluster = {"chief": ["127.0.0.1:1"], "ps": [f"127.0.0.1:{listener.getsockname()[1]}"]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
        thread = threading.Thread(target=lambda: asyncio.run(answer()), daemon=True)
        thread.start()
        smoke_test.main(timeout_seconds=60)
        is_over.set()
        thread.join(60)
    assert capsys.readouterr().out.startswith("1 of 1 tasks answered the chief")


def test_reset_connection_does_not_end_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:  # so that no other process takes the port
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = holder.getsockname()
        cluster = {"ps": [f"127.0.0.1:{address[1]}"]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}}))
        code = "from tf4slurm.doctor import smoke_test; smoke_test.main(120)"
        with subprocess.Popen([sys.executable, "-c", code]) as task:

            def is_answering() -> bool:
                return asyncio.run(find_fault("ps/0", 0, Address(*address), "ps/0", 60)) is None

            try:
                assert wait_until(is_answering, 60)
                other_client = socket.create_connection(address, 60)
                other_client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                other_client.close()  # with a reset
                assert is_answering()
            finally:
                task.kill()


def test_training_with_tensorflow(tmp_path: Path) -> None:
    done = run_test(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps of ParameterServerStrategy by the worker, with the variable on a ps (TensorFlow 2." in done.stdout


def test_user_module_does_not_replace_a_standard_one(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    done = run_test(tmp_path, "--plain")
    assert done.returncode == 0, done.stderr


def test_failure_names_its_step_and_the_next_command(tmp_path: Path) -> None:
    done = run_test(tmp_path, "--timeout", "1")  # importing TensorFlow and the rendezvous take longer
    assert done.returncode not in (0, 2)
    assert done.stdout == ""
    assert "while importing TensorFlow" in done.stderr or "within 1 s" in done.stderr, done.stderr
    assert "Next: tf4slurm doctor" in done.stderr
