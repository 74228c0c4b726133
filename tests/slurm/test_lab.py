"""The lab is a real Slurm and leaves nothing. All other tests of this directory depend on it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import kill_leftovers, marked_processes, wait_until, wait_until_gone
from tests.slurm.lab import LabError, SlurmLab

SLURMD_PORT = 6818


def submit(lab: SlurmLab, *arguments: str) -> str:
    return lab.run("sbatch", "--parsable", "--output=/dev/null", *arguments).stdout.strip()


def can_connect(lab: SlurmLab, node: str, host: str) -> bool:
    connect = f"exec 3<>/dev/tcp/{host}/{SLURMD_PORT}"
    return lab.on(node, "timeout", "0.5", "bash", "-c", connect, check=False).returncode == 0


def connects(lab: SlurmLab, node: str, host: str) -> bool:
    return wait_until(lambda: can_connect(lab, node, host), timeout_seconds=60)


def namespaces(command_part: str = "", kept: contextlib.ExitStack | None = None) -> set[str]:
    """Return the namespaces, other than ours, of processes with such a command line.

    While they are `kept` open, their numbers are not reused by another lab.
    """
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited
            if command_part.encode() in (process / "cmdline").read_bytes():
                for path in (process / "ns").iterdir():
                    if kept is not None:
                        kept.callback(os.close, os.open(path, os.O_RDONLY))
                    found.add(os.readlink(path))
    return found - {os.readlink(path) for path in Path("/proc/self/ns").iterdir()}


def mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


@pytest.fixture
def kept() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as kept:
        yield kept


def names_in(*folders: str) -> set[str]:
    return {str(path) for folder in folders for path in Path(folder).glob("*")}


def test_each_task_runs_on_its_own_host(lab: SlurmLab) -> None:
    lines = lab.run("srun", "-N4", "-n4", "-l", "hostname").stdout.splitlines()
    ranks, hosts = zip(*(line.split(": ") for line in lines), strict=True)
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert sorted(hosts) == sorted(lab.nodes)


@pytest.mark.parametrize(("interface", "address"), [("eth0", "10.78.0.3/24"), ("ib0", "172.29.0.3/16")])
def test_node_has_both_interfaces(lab: SlurmLab, interface: str, address: str) -> None:
    assert f" {address} " in lab.run("srun", "-wr1-n10", "ip", "-4", "-o", "addr", "show", interface).stdout
    assert lab.on("r1-n10", "ls", "/sys/class/net").stdout.split() == ["eth0", "ib0", "lo"]


def test_job_gets_gpus(lab: SlurmLab) -> None:
    assert lab.run("srun", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "0,1\n"


@pytest.mark.parametrize(("command", "ended"), [("true", ("COMPLETED", "0:0")), ("exit 3", ("FAILED", "3:0"))])
def test_batch_job_ends_with_its_exit_code(lab: SlurmLab, command: str, ended: tuple[str, str]) -> None:
    assert lab.wait_for_job(submit(lab, "--wrap", command)) == ended


def test_failed_command_is_an_error_with_its_output(lab: SlurmLab) -> None:
    with pytest.raises(LabError, match=r"(?s)exited with code 4\..*nowhere"):
        lab.run("sh", "-c", "echo nowhere >&2; exit 4")


def test_signal_reaches_the_command_and_not_its_wrapper(lab: SlurmLab) -> None:
    with lab.popen("srun", "-v", "-wgpu-09", "sleep", "300", stderr=subprocess.PIPE) as srun:
        assert srun.stderr is not None
        try:  # srun may exit with 0 if signalled before it knows that its step has started
            assert any("1 tasks started" in line for line in srun.stderr)
        finally:
            srun.terminate()
        assert srun.wait(timeout=60) > 0
    lab.wait_idle(60)


def test_partitioned_node_is_unreachable_until_healed(lab: SlurmLab) -> None:
    hosts = ("r1-n9", "r1-n9-ib")
    assert all(connects(lab, "gpu-09", host) for host in hosts)
    lab.partition("r1-n9")
    try:
        assert not any(can_connect(lab, "gpu-09", host) for host in hosts)
    finally:
        lab.heal("r1-n9")
    assert all(connects(lab, "gpu-09", host) for host in hosts)


def test_crashed_node_boots_again(lab: SlurmLab, process_mark: str) -> None:
    hosts = ("10.78.0.1", "172.29.0.1")
    assert all(connects(lab, "gpu-09", host) for host in hosts)
    lab.crash("r1-n2")
    with pytest.raises(LabError, match="r1-n2 is not running"):
        lab.on("r1-n2", "true")
    lab.boot("r1-n2")
    lab.wait_idle(60)
    assert lab.run("srun", "-wr1-n2", "hostname").stdout == "r1-n2\n"
    assert all(connects(lab, "gpu-09", host) for host in hosts), "its neighbours know it still"
    assert marked_processes(process_mark) == [], "the daemons of a booted node belong to no test"


def test_leftover_process_is_found_on_any_host(lab: SlurmLab, process_mark: str) -> None:
    assert marked_processes(process_mark) == []
    lab.run("srun", "-wgpu-09", "sh", "-c", "setsid setsid sleep 300 >/dev/null 2>&1 </dev/null &")
    assert wait_until(lambda: [p.command for p in marked_processes(process_mark)] == ["sleep 300"], timeout_seconds=60)
    (leftover,) = wait_until_gone(process_mark, timeout_seconds=0.2)
    assert (leftover.host, leftover.command) == ("gpu-09", "sleep 300")
    assert kill_leftovers(process_mark, timeout_seconds=0) == [leftover]
    assert marked_processes(process_mark) == []


@pytest.mark.long
def test_second_lab_runs_beside_the_first_and_leaves_nothing(lab: SlurmLab, kept: contextlib.ExitStack) -> None:
    mounted, folders = mounts(), ("/etc/netns", "/run/netns", "/sys/class/net")
    names = names_in(*folders, "/sys/fs/cgroup/freezer")
    with SlurmLab(["alpha", "beta"], host_suffix=".lab.example") as other:
        assert sorted(other.run("srun", "-N2", "hostname").stdout.split()) == ["alpha.lab.example", "beta.lab.example"]
        assert lab.run("srun", "-wgpu-09", "hostname").stdout == "gpu-09\n"
        assert " 10.78.0.1/24 " in other.on("alpha", "ip", "-o", "addr").stdout
        assert " 10.78.0.1/24 " in lab.on("r1-n2", "ip", "-o", "addr").stdout
        sleeper = other.popen("srun", "sleep", "300")
        assert wait_until(lambda: bool(other.queue()), timeout_seconds=60)
        assert lab.queue() == []
        added = namespaces(str(other.directory), kept)
        assert len(added) == 3 * 4  # network, UTS, PID and mount of ctl, alpha and beta
    assert sleeper.wait(timeout=60) != 0
    assert wait_until(lambda: not added & namespaces(), timeout_seconds=60)  # killed processes exit a moment later
    assert not other.directory.exists()
    assert wait_until(lambda: mounts() <= mounted, timeout_seconds=120)  # a test in parallel may have mounted a disk
    assert names_in(*folders, "/sys/fs/cgroup/freezer") == names


def test_sacct_shows_an_ended_job_with_accounting(accounting_lab: SlurmLab) -> None:
    job = submit(accounting_lab, "--wrap", "exit 3")
    assert accounting_lab.wait_for_job(job) == ("FAILED", "3:0")
    command = ("sacct", "-n", "-X", "-P", "-o", "JobID,State,ExitCode", "-j", job)
    assert wait_until(lambda: accounting_lab.run(*command).stdout == f"{job}|FAILED|3:0\n", timeout_seconds=60)


@pytest.mark.long
def test_sacct_shows_the_memory_of_a_job(accounting_lab: SlurmLab) -> None:
    code = "import time; x = b'x' * 50_000_000; time.sleep(2)"  # until slurmstepd has sampled its memory
    job = submit(accounting_lab, "--wrap", f"exec {shlex.join([sys.executable, '-c', code])}")
    assert accounting_lab.wait_for_job(job) == ("COMPLETED", "0:0")
    command = ("sacct", "-n", "-P", "--units=K", "-o", "MaxRSS", "-j", f"{job}.batch")

    def kilobytes() -> float:
        return float(accounting_lab.run(*command).stdout.strip().rstrip("K") or 0)

    assert wait_until(lambda: kilobytes() > 45_000, timeout_seconds=60)


@pytest.mark.long
def test_lab_with_accounting_leaves_nothing(accounting: None, kept: contextlib.ExitStack) -> None:
    with SlurmLab(["alone"], accounting=True) as other:
        added = namespaces(str(other.directory), kept)
    assert added
    assert wait_until(lambda: not added & namespaces(), timeout_seconds=60)
    assert not other.directory.exists()


def test_sacct_fails_without_accounting(lab: SlurmLab) -> None:
    assert "accounting storage is disabled" in lab.run("sacct", "-n", check=False).stderr


def test_lab_that_does_not_start_is_an_error_with_the_reason_and_leaves_nothing(slurm: None) -> None:
    lab = SlurmLab(["alpha"], extra_conf="NoSuchKey=1")
    with pytest.raises(LabError, match=r"(?s)slurmctld does not start.*NoSuchKey"):
        lab.up()
    assert not lab.directory.exists()


def test_lab_ends_with_the_process_that_holds_it(slurm: None) -> None:
    """As when pytest is killed: `down` is not called, but the pipe is closed."""
    lab = SlurmLab(["alpha"])
    lab.up()
    try:
        holder = lab._holder
        assert holder is not None
        assert holder.stdin is not None
        holder.stdin.close()
        assert wait_until(lambda: not lab.directory.exists(), timeout_seconds=60)  # lab.sh waits up to 30 s per host
    finally:
        lab.down()
