"""`tf4slurm doctor` and `tf4slurm test` on hosts of a real Slurm, intact and with real faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.keras

SALLOC = ("salloc", "-Q", "-N4", "-n4")


def doctor(
    lab: SlurmLab, directory: Path, *options: str, prefix: tuple[str, ...] = SALLOC
) -> subprocess.CompletedProcess[str]:
    nodes = ("--on-nodes",) if prefix else ()
    command = (*prefix, TF4SLURM, "doctor", *nodes, "--json", *options)
    return lab.run(*command, "--runs-directory", directory / "runs", timeout_seconds=300, check=False)


def findings(done: subprocess.CompletedProcess[str], topic: str, level: str | None = None) -> list[dict[str, Any]]:
    """Return the findings of a topic, of one level or all."""
    assert done.stdout.startswith("{"), done.stderr
    shown = json.loads(done.stdout)
    assert shown["exit_code"] == done.returncode
    found = [finding for finding in shown["findings"] if finding["topic"] == topic]
    return [finding for finding in found if level is None or finding["level"] == level]


@contextlib.contextmanager
def hidden(lab: SlurmLab, node: str, directory: Path) -> Iterator[None]:
    """Mount an empty directory over this one on one node only."""
    lab.on(node, "mount", "-t", "tmpfs", "tmpfs", directory)
    try:
        yield
    finally:
        lab.on(node, "umount", "--lazy", directory)


@contextlib.contextmanager
def changed(lab: SlurmLab, node: str, *commands: str) -> Iterator[None]:
    """Run the first command on a node, and the second at the end of the block."""
    lab.on(node, *commands[0].split())
    try:
        yield
    finally:
        lab.on(node, *commands[1].split())


def test_intact_cluster(lab: SlurmLab, tmp_path: Path) -> None:
    done = doctor(lab, tmp_path, "--quick")
    assert done.returncode == 0, done.stdout
    version = lab.run("srun", "--version").stdout.split()[-1]
    assert findings(done, "slurm")[0]["text"].startswith(f"Slurm {version}; tf4slurm was tested with")
    assert findings(done, "step ports")[0]["text"].startswith("Slurm reserves ports of 23000-23999")
    assert findings(done, "kill wait", "warn"), "the lab kills after 5 s, the grace period is 25 s"
    assert findings(done, "shared", "ok")
    assert findings(done, "clocks", "ok")
    assert findings(done, "munge between nodes", "ok")
    assert findings(done, "reach")[0]["text"] == "4 nodes reach each other and this host, at every address"
    (interfaces,) = findings(done, "interfaces")
    assert (interfaces["text"], interfaces["nodes"]) == ("up: eth0, ib0", [])
    assert all(node in interfaces["detail"] for node in lab.nodes)
    assert list(tmp_path.iterdir()) == [], "nothing is left of the probes"


@pytest.mark.long
def test_batch_job(lab: SlurmLab, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    command = f"{TF4SLURM} doctor --on-nodes --quick --json --runs-directory {tmp_path / 'runs'}"
    script.write_text(f"#!/bin/bash\nexec {command} 2>/dev/null\n")
    job = lab.run("sbatch", "--parsable", "-N3", "--ntasks-per-node=2", "-o", tmp_path / "out", script).stdout.strip()
    assert lab.wait_for_job(job, timeout_seconds=60) == ("COMPLETED", "0:0")
    found = {finding["topic"]: finding for finding in json.loads((tmp_path / "out").read_text())["findings"]}
    assert found["reach"]["text"].startswith("3 nodes reach each other")


def test_without_accounting_is_a_warning(lab: SlurmLab, tmp_path: Path) -> None:
    (found,) = findings(doctor(lab, tmp_path, "--quick", prefix=()), "sacct")
    assert (found["level"], "no accounting" in found["text"]) == ("warn", True)
    assert "Keep the run directory" in found["advice"]


def test_with_accounting_sacct_answers(accounting_lab: SlurmLab, tmp_path: Path) -> None:
    (found,) = findings(doctor(accounting_lab, tmp_path, "--quick", prefix=()), "sacct")
    assert (found["level"], found["text"]) == ("ok", "sacct answers")


@pytest.mark.long
def test_accounting_that_is_down_is_a_warning_with_slurms_message(accounting: None, tmp_path: Path) -> None:
    with SlurmLab(["alone"], accounting=True) as lab:
        lab.run("sacctmgr", "-i", "shutdown", check=False)
        assert wait_until(lambda: lab.run("sacct", "-n", check=False).returncode != 0, timeout_seconds=60)
        (found,) = findings(doctor(lab, tmp_path, "--quick", prefix=()), "sacct")
    assert found["level"] == "warn"
    assert found["text"].startswith("accounting does not answer: sacct")


@pytest.mark.long
def test_controller_that_is_down_is_a_failure_within_30_s(slurm: None, tmp_path: Path) -> None:
    with SlurmLab(["alone"]) as lab:
        lab.run("scontrol", "shutdown", "slurmctld")
        assert wait_until(lambda: "DOWN" in lab.run("scontrol", "ping", check=False).stdout, timeout_seconds=60)
        started = time.monotonic()
        done = doctor(lab, tmp_path, "--quick", prefix=())
        seconds = time.monotonic() - started
    (found,) = findings(done, "slurm")
    assert (done.returncode, found["level"]) == (3, "fail")
    assert found["text"].startswith("scontrol ")
    assert seconds < 30


@pytest.mark.long
def test_run_directory_that_one_node_does_not_share(lab: SlurmLab, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with hidden(lab, "r1-n2", runs):
        done = doctor(lab, tmp_path, "--quick")
    (found,) = findings(done, "shared", "fail")
    assert (done.returncode, found["nodes"]) == (3, ["r1-n2"])
    assert "--runs-directory" in found["advice"]
    assert findings(done, "shared", "ok")[0]["nodes"] == ["gpu-09", "r1-n9", "r1-n10"]
    assert list(runs.iterdir()) == []


@pytest.mark.long
def test_run_directory_that_only_nodes_can_write(lab: SlurmLab, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    lab.run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", runs)
    try:
        done = doctor(lab, tmp_path, "--quick")
    finally:
        lab.run("umount", "--lazy", runs)
    (found,) = findings(done, "run directory", "fail")
    assert (done.returncode, found["nodes"]) == (3, ["ctl"])
    assert "Read-only file system" in found["text"]
    assert not findings(done, "shared"), "there was nothing to see"


@pytest.mark.long
def test_node_whose_interface_is_down(lab: SlurmLab, tmp_path: Path) -> None:
    with changed(lab, "r1-n9", "ip link set ib0 down", "ip link set ib0 up"):
        requested, not_requested = (
            doctor(lab, tmp_path, "--quick", "--interface", "ib0"),
            doctor(lab, tmp_path, "--quick"),
        )
    (found,) = findings(requested, "interfaces", "fail")
    assert (requested.returncode, found["nodes"]) == (3, ["r1-n9"])
    assert "'ib0' has no address or is down" in found["text"]
    assert not findings(requested, "reach", "fail"), "the fault of a node is not reported for the others"
    assert not_requested.returncode == 0
    assert {tuple(each["nodes"]): each["text"] for each in findings(not_requested, "interfaces")} == {
        ("gpu-09", "r1-n2", "r1-n10"): "up: eth0, ib0",
        ("r1-n9",): "up: eth0",
    }


@pytest.mark.long
def test_node_that_does_not_reach_another(lab: SlurmLab, tmp_path: Path) -> None:
    route = "unreachable 172.29.0.4/32"  # the address of gpu-09 in ib0
    with changed(lab, "r1-n10", f"ip route add {route}", f"ip route del {route}"):
        used, not_used = doctor(lab, tmp_path, "--quick", "--interface", "ib0"), doctor(lab, tmp_path, "--quick")
    (found,) = [each for each in findings(used, "reach", "fail") if each["text"].startswith("gpu-09")]
    assert used.returncode == 3
    assert found["text"] == "gpu-09 is unreachable at 172.29.0.4 (ib0) from r1-n10, and a job would use that address"
    assert not_used.returncode == 0
    assert any("gpu-09 is unreachable" in each["text"] for each in findings(not_used, "reach", "warn"))


@pytest.mark.long
def test_node_without_munge(lab: SlurmLab, tmp_path: Path) -> None:
    away = ("mount -t tmpfs tmpfs /run/munge", "umount --lazy /run/munge")  # slurmd uses another path
    with changed(lab, "r1-n9", *away):
        done = doctor(lab, tmp_path, "--quick")
    (found,) = findings(done, "munge between nodes", "warn")
    assert found["nodes"] == ["r1-n9"]
    assert "'unmunge' does not work on r1-n9" in found["text"]


@pytest.mark.long
def test_node_without_python_is_a_failure(lab: SlurmLab, tmp_path: Path) -> None:
    started = time.monotonic()
    with hidden(lab, "r1-n9", Path(sys.executable).parent):
        done = doctor(lab, tmp_path, "--quick")
    assert time.monotonic() - started < 60, "a failure of srun ends the wait for answers"
    (found,) = findings(done, "nodes", "fail")
    assert done.returncode == 3
    assert found["text"].startswith("1 node did not answer, only gpu-09, r1-n10, r1-n2 did")
    assert "same path" in found["advice"]


@pytest.mark.long
def test_step_ends_when_doctor_is_terminated(lab: SlurmLab, tmp_path: Path) -> None:
    """The leak check of the fixtures finds leftovers on the nodes."""
    script = 'echo $$ > pid; exec "$0" doctor --on-nodes --runs-directory runs'
    salloc = lab.popen(*SALLOC, "sh", "-c", script, TF4SLURM, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: "--as-node" in _commands(lab), timeout_seconds=60)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        assert salloc.wait(timeout=60) != 0
    finally:
        if salloc.poll() is None:
            salloc.kill()
            salloc.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["pid"], "nothing is left of the probes"


def _commands(lab: SlurmLab) -> str:
    return lab.on("r1-n9", "ps", "-e", "-ww", "-o", "args").stdout


def test_plain_smoke_test_on_all_hosts(lab: SlurmLab, tmp_path: Path) -> None:
    done = lab.run(*SALLOC, TF4SLURM, "test", "--plain", "--runs-directory", tmp_path, timeout_seconds=100)
    assert done.stdout.startswith("It works: 4 tasks on 4 hosts (")
    assert "each address checked from another host; 3 of 3 tasks answered the chief" in done.stdout


@pytest.mark.long
def test_smoke_test_with_tensorflow(lab: SlurmLab, tmp_path: Path) -> None:
    done = lab.run("salloc", "-Q", "-N3", "-n3", TF4SLURM, "test", "--runs-directory", tmp_path, timeout_seconds=200)
    assert done.stdout.startswith("It works: 3 tasks on 3 hosts (")
    assert "steps of ParameterServerStrategy by the worker, with the variable on a ps" in done.stdout


@pytest.mark.parametrize("tasks", ["1", "2"])
def test_smoke_test_refuses_too_few_tasks(lab: SlurmLab, tmp_path: Path, tasks: str) -> None:
    command = ("salloc", "-Q", "-n", tasks, TF4SLURM, "test", "--plain", "--runs-directory", tmp_path)
    done = lab.run(*command, check=False)
    assert done.returncode == 2
    assert f"Slurm gives {tasks} tasks" in done.stderr


def test_maintenance_and_drained_nodes_are_named(lab: SlurmLab, tmp_path: Path) -> None:
    reservation = "reservationname=weekly starttime=now+2hours duration=60 flags=maint nodes=r1-n2,r1-n9 users=root"
    lab.run("scontrol", "create", "reservation", *reservation.split())
    lab.run("scontrol", "update", "nodename=gpu-09", "state=drain", "reason=test")
    try:
        done = doctor(lab, tmp_path, "--quick", prefix=())
    finally:
        lab.run("scontrol", "update", "nodename=gpu-09", "state=resume")
        lab.run("scontrol", "delete", "reservationname=weekly")
    (maintenance,) = findings(done, "maintenance", "warn")
    assert maintenance["text"].startswith("weekly reserves r1-n[2,9] from 20")
    assert any("1 of 4 nodes are drained" in finding["text"] for finding in findings(done, "partition"))
    (settings,) = findings(done, "settings")
    assert "SelectType=select/cons_tres" in settings["text"]


def test_profile_is_compared_with_slurm(lab: SlurmLab, tmp_path: Path) -> None:
    done = doctor(lab, tmp_path, "--quick", "--site", "leonardo", prefix=())
    texts = [finding["text"] for finding in findings(done, "profile")]
    assert any("--partition boost_usr_prod" in text and "there is debug, high, low, lowc" in text for text in texts)
