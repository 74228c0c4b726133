"""`tf4slurm doctor` on this host, with real faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM
from tests.servers import free_ports

pytestmark = pytest.mark.keras

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the Slurm of this machine, as on a laptop."""
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(TF4SLURM).parent}:{tmp_path / 'no-programs'}")


def doctor(
    *options: str, env: Mapping[str, str] | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, TF4SLURM, "doctor", *options]
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=200)


def findings(done: subprocess.CompletedProcess[str], topic: str) -> list[dict[str, Any]]:
    shown = json.loads(done.stdout)
    assert shown["exit_code"] == done.returncode
    return [finding for finding in shown["findings"] if finding["topic"] == topic]


def test_host_without_faults(tmp_path: Path) -> None:
    done = doctor("--quick", "--runs-directory", str(tmp_path / "runs"))
    assert (done.returncode, "fail" in done.stdout) == (0, False), done.stdout
    assert "Slurm is not installed" in done.stdout
    assert "ok    open files" in done.stdout
    assert done.stderr.startswith("no failure")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("number", "level", "code"), [(40, "fail", 3), (512, "warn", 0)])
def test_few_open_files(tmp_path: Path, number: int, level: str, code: int) -> None:
    limit = ("/bin/sh", "-c", f'ulimit -n {number} && exec "$@"', "sh")
    done = doctor("--quick", "--json", "--runs-directory", str(tmp_path), prefix=limit)
    (found,) = findings(done, "open files")
    assert (done.returncode, found["level"]) == (code, level)
    assert f"{number} files" in found["text"]
    assert found["advice"]


def test_run_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor("--quick", "--json", "--runs-directory", str(tmp_path / "file" / "runs"))
    (found,) = findings(done, "run directory")
    assert (done.returncode, found["level"]) == (3, "fail")
    assert "--runs-directory" in found["advice"]


def test_missing_interface() -> None:
    done = doctor("--quick", "--json", "--interface", "nope0")
    (found,) = findings(done, "interfaces")
    assert (done.returncode, found["level"]) == (3, "fail")
    assert "'nope0' does not exist" in found["text"]


def test_ports_in_use() -> None:
    port = str(free_ports(1))
    with socket.create_server(("", int(port))):
        done = doctor("--quick", "--json", "--ports", port)
    (found,) = findings(done, "free ports")
    assert (done.returncode, found["level"]) == (3, "fail")
    assert port in found["text"]
    assert findings(doctor("--quick", "--json", "--ports", port), "free ports")[0]["level"] == "ok"


def test_each_requested_port_is_tried_and_ports_left_out_are_counted() -> None:
    (found,) = findings(doctor("--quick", "--json", "--ports", "61000-61100"), "free ports")
    assert "of 101 ports (61000-61100) are free" in found["text"]
    (found,) = findings(doctor("--quick", "--json", "--ports", "20000-25000"), "free ports")
    assert "of 4096 ports (20000-24095) are free; the other 905 were not tried" in found["text"]


def test_proxy_is_named_without_its_password() -> None:
    proxy = {"https_proxy": f"http://ana:{SECRET}@proxy:3128"}
    done = doctor("--quick", "--json", env=proxy)
    (found,) = findings(done, "proxy")
    assert found["level"] == "warn"
    assert found["text"].startswith("https_proxy is set")
    assert SECRET not in done.stdout + done.stderr + doctor("--quick", "--report", env=proxy).stdout
    addresses = found["detail"].partition(": ")[2].replace(" ", "")
    for variables, level in (
        ({"no_proxy": addresses}, "ok"),
        ({"no_proxy": "0.0.0.0/0,::/0"}, "ok"),
        ({"NO_PROXY": addresses}, "warn"),  # gRPC does not read it
        ({"no_proxy": addresses, "no_grpc_proxy": "example.org"}, "warn"),  # it reads this variable instead of no_proxy
    ):
        assert findings(doctor("--quick", "--json", env=proxy | variables), "proxy")[0]["level"] == level


@pytest.mark.long
def test_broken_tensorflow(tmp_path: Path) -> None:
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly.')")
    path = ":".join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = doctor("--json", env={"PYTHONPATH": path})
    (found,) = findings(done, "tensorflow")
    assert (done.returncode, found["level"]) == (3, "fail")
    assert "Descriptors cannot be created" in found["text"]
    assert "protobuf" in found["advice"]


@pytest.mark.long
def test_conflicting_packages(tmp_path: Path) -> None:
    """Create a package with metadata only, since pip reads nothing else; hide TensorFlow to save time."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('not for this test')")
    written = tmp_path / "tensorflow_text-1.0.dist-info"
    written.mkdir()
    needs = "Metadata-Version: 2.1\nName: tensorflow-text\nVersion: 1.0\nRequires-Dist: protobuf<3\n"
    (written / "METADATA").write_text(needs)
    path = ":".join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    (found,) = findings(doctor("--json", env={"PYTHONPATH": path}), "packages")
    assert found["level"] == "warn"
    assert found["text"].startswith("tensorflow-text 1.0 has requirement protobuf<3")


def test_installed_tensorflow() -> None:
    done = doctor("--json")
    (tensorflow,) = findings(done, "tensorflow")
    (keras,) = findings(done, "keras")
    assert (tensorflow["level"], tensorflow["text"].startswith("TensorFlow 2.")) == ("ok", True)
    assert "grpcio" in tensorflow["text"]
    assert keras["level"] in ("ok", "warn")
    assert "ParameterServerStrategy" in keras["text"]


@pytest.mark.long
def test_other_python_is_a_warning(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text("#!/bin/sh\n")
    (programs / "python").chmod(0o755)
    (found,) = findings(doctor("--quick", "--json", env={"PATH": str(programs)}), "python")
    assert found["level"] == "warn"
    assert str(programs / "python") in found["text"]


def test_report_hides_the_user_name(tmp_path: Path) -> None:
    home = tmp_path / "jovyan"
    env = {"HOME": str(home), "LOGNAME": "jovyan"}
    done = doctor("--quick", "--report", "--runs-directory", str(home / "runs"), env=env)
    assert done.stdout.startswith("tf4slurm ")
    assert "~/runs" in done.stdout
    assert "jovyan" not in done.stdout
    assert done.stderr == ""


def test_on_nodes_outside_of_an_allocation_is_refused() -> None:
    done = doctor("--on-nodes")
    assert done.returncode == 3
    assert "salloc -N4 tf4slurm doctor --on-nodes" in done.stderr
