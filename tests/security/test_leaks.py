"""The secret of a job on this host is in no file, log, argument or child."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.jobs import Job, know_secret
from tests.processes import marked_processes, read_process


def test_the_secret_is_found_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_mark: str) -> None:
    monkeypatch.setenv("TF4SLURM_LOG", "DEBUG")
    secret = know_secret(monkeypatch, tmp_path).encode()
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "2")
    for name in ("chief-0", "ps-0", "worker-0"):
        job.wait_for_child(name)
    job.end_child("worker-1", 3)  # so that the ends of logs are told, too
    job.wait_for_child("worker-1", 2)
    assert len(secret) == 64
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
        assert secret not in text


def test_the_service_of_a_local_job_listens_on_this_host_only(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start("--ps", "1", "--workers", "1")
    assert job.process is not None
    job.wait_for_child("chief-0")
    listening = [
        c.laddr.ip for c in psutil.Process(job.process.pid).net_connections() if c.status == psutil.CONN_LISTEN
    ]
    job.end_child("chief-0")
    assert job.wait() == 0
    assert listening == ["127.0.0.1"]
