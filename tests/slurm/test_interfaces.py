"""Addresses of interfaces on hosts of the lab: eth0 and ib0, on one also a tap of the hardware type InfiniBand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab

NODE = "r1-n9"
TAP = Path(__file__).with_name("tap.py")
CHOOSE = (
    "import sys; from tf4slurm.network.interfaces import interface_address; print(interface_address(*sys.argv[1:]))"
)


def choose(lab: SlurmLab, interface: str, node: str = NODE) -> str:
    """Return the chosen address, or the last line of the error."""
    result = lab.on(node, sys.executable, "-c", CHOOSE, interface, node, check=False)
    return (result.stdout or result.stderr).strip().splitlines()[-1]


@contextmanager
def infiniband(lab: SlurmLab, node: str, name: str, address: str) -> Iterator[None]:
    holder = lab.popen_on(node, sys.executable, TAP, name, address, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        yield
    finally:
        holder.communicate(timeout=60)


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("eth0", "10.78.0.2"),
        ("ib0", "172.29.0.2"),
        ("ib*", "172.29.0.2"),
        ("hsn0,ib0,eth0", "172.29.0.2"),
        ("172.29.0.0/16", "172.29.0.2"),
        ("10.78.0.0/24", "10.78.0.2"),
        ("infiniband", "172.29.0.2"),
        ("{host}-ib", "172.29.0.2"),
    ],
)
def test_requested_interface_gives_its_address(lab: SlurmLab, interface: str, address: str) -> None:
    assert choose(lab, interface) == address


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("ib1", "'ib1' does not exist on node r1-n9. Found: eth0, ib0, lo"),
        ("*0", "matches several on node r1-n9: eth0 (10.78.0.2), ib0 (172.29.0.2)"),
        ("fastest", "matches several"),  # both report 10 Gbit/s
        ("192.168.7.0/24", "Found: eth0, ib0, lo"),
        ("{host}-opa", "Found: eth0, ib0, lo"),
    ],
)
def test_no_or_several_matches_are_an_error_that_lists_the_interfaces(
    lab: SlurmLab, interface: str, words: str
) -> None:
    assert words in choose(lab, interface)


def test_infiniband_is_found_by_hardware_type(lab: SlurmLab) -> None:
    with infiniband(lab, NODE, "fast7", "192.0.2.9/24"):
        assert choose(lab, "infiniband") == "192.0.2.9"
    assert choose(lab, "infiniband") == "172.29.0.2"


def test_interface_that_is_down_is_skipped(lab: SlurmLab) -> None:
    lab.on(NODE, "ip", "link", "set", "ib0", "down")
    try:
        assert "'ib0' has no address or is down on node r1-n9. Found: eth0, lo" in choose(lab, "ib0")
        assert choose(lab, "ib0,eth0") == "10.78.0.2"
    finally:
        lab.on(NODE, "ip", "link", "set", "ib0", "up")


def test_ipv6_is_used_without_ipv4(lab: SlurmLab) -> None:
    lab.on(NODE, "ip", "addr", "flush", "dev", "ib0")
    lab.on(NODE, "ip", "-6", "addr", "add", "fd00:29::2/64", "dev", "ib0", "nodad")
    try:
        assert choose(lab, "ib0") == "fd00:29::2"
        assert choose(lab, "fd00:29::/64") == "fd00:29::2"
    finally:
        lab.on(NODE, "ip", "-6", "addr", "del", "fd00:29::2/64", "dev", "ib0")
        lab.on(NODE, "ip", "addr", "add", "172.29.0.2/16", "dev", "ib0")


DICTIONARY = (
    "from tf4slurm import get_server_dictionary;"
    "print(get_server_dictionary(['ps', 'worker'], interface='{host}-ib')[0]['worker'])"
)


def test_host_name_pattern_uses_slurms_node_name(slurm: None, tmp_path: Path) -> None:
    """With host names that differ from node names: launcher, agents, plain srun, doctor and `tf4slurm env` agree."""
    with SlurmLab(["x1", "x2"], host_suffix=".lab.example", resolve_names=False) as lab:
        step, pattern = ("srun", "-Q", "-N2", "-n2"), ("--interface", "{host}-ib")
        show = ("sh", "-c", 'echo "$TF_CONFIG"')
        task = lab.run(*step, TF4SLURM, "task", "--no-chief", "--ps", "1", *pattern, "--", *show, cwd=tmp_path)
        assert '"worker": ["172.29.0.2:' in task.stdout
        assert lab.run(*step, sys.executable, "-c", DICTIONARY, cwd=tmp_path).stdout.count("172.29.0.2:") == 2
        env = lab.run(*step, TF4SLURM, "env", "--json", *pattern).stdout
        assert '"172.29.0.1"' in env
        assert '"172.29.0.2"' in env
        check = (TF4SLURM, "doctor", "--on-nodes", "--quick", "--json", *pattern, "--runs-directory", tmp_path / "runs")
        findings = json.loads(lab.run("salloc", "-Q", "-N2", "-n2", *check, check=False).stdout)["findings"]
        levels = {finding["topic"]: finding["level"] for finding in findings}
        assert (levels["interfaces"], levels["reach"]) == ("ok", "ok"), findings


def test_interface_missing_on_all_hosts_ends_a_step_without_a_launcher(lab: SlurmLab, tmp_path: Path) -> None:
    step = ("srun", "-Q", "-N2", "-n2", TF4SLURM, "task", "--no-chief", "--ps", "1", "--interface", "ib7")
    assert lab.run(*step, "--", "true", cwd=tmp_path, check=False).returncode == 3
    (path,) = tmp_path.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    assert result["exit_code"] == 3
    assert "Interface 'ib7' does not exist on node" in result["reason"]
