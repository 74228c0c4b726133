"""The token and the private key of a job on this host are in no file, log, argument or child process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.jobs import Job, know_secret
from tests.processes import marked_processes, read_process


@pytest.mark.parametrize(
    "trace", [{}, {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "http,api,tcp"}], ids=["", "gRPC traced"]
)
def test_token_and_private_key_are_in_no_file_log_argument_or_environ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_mark: str, trace: dict[str, str]
) -> None:
    monkeypatch.setenv("TF4SLURM_LOG", "DEBUG")
    for name, value in trace.items():
        monkeypatch.setenv(name, value)
    token = know_secret(monkeypatch, tmp_path).encode()
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "2")
    for name in ("chief-0", "ps-0", "worker-0"):
        job.wait_for_child(name)
    assert trace.items() <= job.wait_for_child("chief-0")["environ"].items()
    job.end_child("worker-1", 3)  # so that the ends of logs are reported too
    job.wait_for_child("worker-1", 2)
    assert len(token) == 64
    assert job.run_directory.stat().st_mode & 0o777 == 0o700
    processes = marked_processes(process_mark)
    shown = [read_process(process.pid, name) for process in processes for name in ("cmdline", "environ")]
    assert len([text for text in shown if text]) >= 8
    job.end_child("worker-1")
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    assert "DEBUG" in job.stderr
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and "known-secret" not in path.parts]
    assert {"job.json", "result.json", "events.jsonl", "worker-1.1.log"} <= {path.name for path in kept}
    for text in (*(path.read_bytes() for path in kept), *shown):
        assert token not in text
        assert b"PRIVATE KEY" not in text


def test_service_of_a_local_job_listens_on_loopback_only(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "1")
    assert job.process is not None
    job.wait_for_child("chief-0")
    listening = [
        c.laddr.ip.removeprefix("::ffff:")  # gRPC's IPv4 sockets are IPv6 sockets where the host has IPv6
        for c in psutil.Process(job.process.pid).net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    job.end_child("chief-0")
    assert job.wait() == 0
    assert listening == ["127.0.0.1"]
