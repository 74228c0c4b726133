"""Packets between the hosts of the lab: those that a packet filter accepts, and their content."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import NAMES, ROLES, TF4SLURM, Job
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import make_job
from tf4slurm.control.credentials import TLS_NAME

CAPTURE = Path(__file__).with_name("capture.py")

PORTS = "40000-40007"
CONTROL_PORT = "40100"
SLURM = "6817:6818,60001:60400"  # slurmctld, slurmd, and SrunPortRange
OPEN = f"{SLURM},{PORTS.replace('-', ':')},{CONTROL_PORT}"


@pytest.fixture(scope="module")
def filtered_lab(slurm: None) -> Iterator[SlurmLab]:
    """A lab whose hosts drop each new TCP connection from another host to a port that is not in OPEN."""
    if shutil.which("iptables") is None:
        pytest.fail("the tests of the packet filter need iptables: apt-get install iptables", pytrace=False)
    with SlurmLab(["wall-1", "wall-2"], extra_conf="SrunPortRange=60001-60400") as lab:
        rule = ("-p", "tcp", "--syn", "!", "-i", "lo", "-m", "multiport", "!", "--dports", OPEN, "-j", "DROP")
        lab.run("iptables", "-A", "INPUT", *rule)
        for node in lab.nodes:
            lab.on(node, "iptables", "-A", "INPUT", *rule)
        yield lab


def dropped(lab: SlurmLab) -> int:
    """Return how many packets the login host and the nodes have dropped."""
    listing = ("iptables", "-nvxL", "INPUT")
    texts = [lab.run(*listing).stdout, *(lab.on(node, *listing).stdout for node in lab.nodes)]
    return sum(int(line.split()[0]) for text in texts for line in text.splitlines() if "DROP" in line)


def run_job(directory: Path, lab: SlurmLab, *options: str) -> Job:
    job = make_job(directory, lab)
    job.start(*ROLES, *options, prefix=("salloc", "-Q", "-N2", "-n4"))
    return job


@pytest.mark.parametrize("options", [("--ports", PORTS), ("--ports", PORTS, "--control-port", CONTROL_PORT)])
def test_job_whose_ports_are_open_forms_and_completes(
    tmp_path: Path, filtered_lab: SlurmLab, options: tuple[str, ...]
) -> None:
    before = dropped(filtered_lab)
    job = run_job(tmp_path, filtered_lab, *options)
    cluster = job.wait_for_child("chief-0")["config"]["cluster"]
    for name in NAMES:
        job.wait_for_child(name)
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    ports = {int(address.rpartition(":")[2]) for addresses in cluster.values() for address in addresses}
    assert ports <= set(range(40000, 40008))
    assert dropped(filtered_lab) == before


def test_job_on_any_free_port_fails_to_register(tmp_path: Path, filtered_lab: SlurmLab) -> None:
    """Control experiment for the test above."""
    job = run_job(tmp_path, filtered_lab, "--start-timeout", "4")
    assert job.wait() == 6, job.stderr
    assert "did not register" in job.stderr
    assert dropped(filtered_lab) > 0


def test_step_without_launcher_forms_within_its_ports(tmp_path: Path, filtered_lab: SlurmLab) -> None:
    before = dropped(filtered_lab)
    task = (TF4SLURM, "task", "--runs-directory", str(tmp_path / "runs"), *ROLES, "--ports", PORTS, "--", "true")
    filtered_lab.run("srun", "-Q", "-N2", "-n4", *task)
    assert dropped(filtered_lab) == before


def test_capture_of_the_network_shows_no_name_address_or_log_line(tmp_path: Path, filtered_lab: SlurmLab) -> None:
    capture = filtered_lab.popen(
        *(sys.executable, CAPTURE, tmp_path / "capture", PORTS, f"{CONTROL_PORT}-{CONTROL_PORT}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert capture.stdout is not None
    assert capture.stdout.readline() == "capturing\n"
    job = run_job(tmp_path, filtered_lab, "--ports", PORTS, "--control-port", CONTROL_PORT)
    addresses = job.wait_for_child("chief-0")["config"]["cluster"]
    for name in NAMES:
        job.wait_for_child(name)
    job.end_child("worker-1", 3)  # its last lines are sent to the launcher
    job.wait_for_child("worker-1", 2)
    job.end_child("worker-1")
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
    capture.communicate(timeout=60)
    captured = (tmp_path / "capture").read_bytes()
    assert captured.count(TLS_NAME.encode()) >= 4  # each task's ClientHello contains it, so the capture works
    words = ["worker", "chief", "listens on", *filtered_lab.nodes, *(a for role in addresses.values() for a in role)]
    hosts = {word.partition(":")[0] for word in words}
    assert len(hosts) >= 7
    for word in (*words, *hosts):
        assert word.encode() not in captured


@pytest.mark.long
def test_tensorflow_trains_behind_the_packet_filter(tmp_path: Path, filtered_lab: SlurmLab) -> None:
    before = dropped(filtered_lab)
    test = (TF4SLURM, "test", "--runs-directory", str(tmp_path / "runs"), "--ports", PORTS)
    done = filtered_lab.run("salloc", "-Q", "-N2", "-n4", *test, timeout_seconds=120)
    assert "It works: 4 tasks on 2 hosts" in done.stdout
    assert dropped(filtered_lab) == before
