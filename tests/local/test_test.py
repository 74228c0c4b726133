"""`tf4slurm test` on this host, with and without TensorFlow, and its failure."""

from __future__ import annotations

import contextlib
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
from tf4slurm.doctor import plain_smoke

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
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for data in (b"", b"ps/0"):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(data)

        cluster = {"chief": ["127.0.0.1:1"], "ps": [f"127.0.0.1:{listener.getsockname()[1]}"]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        plain_smoke.main(timeout_seconds=10)
        thread.join(10)
    assert capsys.readouterr().out.startswith("1 of 1 tasks answered the chief")


def test_reset_connection_does_not_end_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:  # so that no other process takes the port
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = holder.getsockname()
        cluster = {"ps": [f"127.0.0.1:{address[1]}"]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}}))
        code = "from tf4slurm.doctor import plain_smoke; plain_smoke.main(30)"
        with subprocess.Popen([sys.executable, "-c", code]) as task:

            def answer() -> bytes:
                with contextlib.suppress(ConnectionError), socket.create_connection(address, 10) as connection:
                    return connection.recv(100)
                return b""

            try:
                assert wait_until(lambda: answer() == b"ps/0", 20)
                other_client = socket.create_connection(address, 10)
                other_client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                other_client.close()  # with a reset
                assert answer() == b"ps/0"
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
