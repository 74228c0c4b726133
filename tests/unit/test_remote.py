"""The ssh command with which a person's own computer reaches a page of this host."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

import pytest

from tf4slurm.cli.remote import is_remote, ssh_tunnel

SESSION = {"SSH_CONNECTION": "192.0.2.7 51234 192.0.2.9 22"}


@pytest.fixture
def without_slurm(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path)}


def test_session_job_and_login_node_are_remote(without_slurm: dict[str, str], tmp_path: Path) -> None:
    assert not is_remote(without_slurm)
    for variables in (SESSION, {"SSH_TTY": "/dev/pts/1"}, {"SLURM_JOB_ID": "4711"}):
        assert is_remote({**without_slurm, **variables})
    (tmp_path / "sbatch").touch(mode=0o755)
    assert is_remote(without_slurm)


@pytest.mark.parametrize(
    ("host", "connection", "expected"),
    [
        ("login1.example.org", "", "ssh -N -L 8000:127.0.0.1:8000 ana@login1.example.org"),
        ("login1.example.org", "192.0.2.7 51234 192.0.2.9 22", "ssh -N -L 8000:127.0.0.1:8000 ana@login1.example.org"),
        ("login1", "192.0.2.7 51234 192.0.2.9 22", "ssh -N -L 8000:127.0.0.1:8000 ana@192.0.2.9"),
        ("localhost.localdomain", "::1 51234 2001:db8::9 22", "ssh -N -L 8000:127.0.0.1:8000 ana@2001:db8::9"),
        ("login1", "192.0.2.7 51234 192.0.2.9 2222", "ssh -p 2222 -N -L 8000:127.0.0.1:8000 ana@192.0.2.9"),
        ("login1", "192.0.2.7", "ssh -N -L 8000:127.0.0.1:8000 ana@login1"),
    ],
)
def test_tunnel_has_user_host_and_port(
    monkeypatch: pytest.MonkeyPatch, host: str, connection: str, expected: str
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: host)
    monkeypatch.setattr(getpass, "getuser", lambda: "ana")
    environ = {**os.environ, "SSH_CONNECTION": connection}
    assert ssh_tunnel(environ, 8000) == expected
    assert ssh_tunnel({**environ, "SLURM_JOB_ID": "4711"}, 8000) == expected  # of salloc, whose shell is on this host


@pytest.mark.parametrize(
    ("host", "submit_host", "connection", "expected"),
    [
        ("n3", "login1.example.org", "", "ssh -J ana@login1.example.org {} ana@n3"),
        ("n3.example.org", "login1", "", "ssh -J ana@login1 {} ana@n3.example.org"),
        ("n3", "login1", "192.0.2.7 51234 192.0.2.9 22", "ssh -J ana@192.0.2.9 {} ana@n3"),
        ("n3", "login1", "192.0.2.7 51234 192.0.2.9 2222", "ssh -J ana@192.0.2.9:2222 {} ana@n3"),
        ("n3", "login1", "::1 51234 2001:db8::9 2222", "ssh -J ana@[2001:db8::9]:2222 {} ana@n3"),
        ("localhost", "", "", "ssh -J ana@LOGIN {} ana@n3 (LOGIN: a login node of the cluster)"),
        ("n3", "n3", "", "ssh -J ana@LOGIN {} ana@n3 (LOGIN: a login node of the cluster)"),
    ],
)
def test_tunnel_to_a_node_of_a_job_goes_through_a_login_node(
    monkeypatch: pytest.MonkeyPatch, host: str, submit_host: str, connection: str, expected: str
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: host)
    monkeypatch.setattr(getpass, "getuser", lambda: "ana")
    job = {"SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "n3", "SLURM_SUBMIT_HOST": submit_host}
    found = ssh_tunnel({"SSH_CONNECTION": connection, **job}, 8000)
    assert found == expected.format("-N -L 8000:127.0.0.1:8000")
