"""`--stage-env` on four hosts of a real Slurm whose environment is on a slow shared file system (slow_files.py)."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Figure, ratio
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

_ROOT = Path(__file__).parents[1]
_SLOW_FILES = _ROOT / "benchmarks" / "slow_files.py"
_SECONDS = "0.005"  # in each metadata operation
_LAUNCHER = "ctl"  # the host of `tf4slurm run`
_SCRIPT = """
import time
started = time.monotonic()
import tensorflow
print("IMPORT", time.monotonic() - started, flush=True)
"""
_IMPORT = re.compile(r"IMPORT ([\d.]+)")
_KINDS = ("shared", "first copy", "later copy", "local")


def measure_staging(directory: Path, rounds: int) -> list[Figure]:
    """Measure the import of TensorFlow by four tasks, and the operations of their hosts on the shared file system."""
    shared, source, disk = directory / "shared", directory / "source", directory / "disk"
    _make_environment(shared)
    shared.rename(source)
    shared.mkdir()
    disk.mkdir()
    imports: dict[str, list[float]] = defaultdict(list)
    jobs: dict[str, list[float]] = defaultdict(list)
    on_nodes: dict[str, list[float]] = defaultdict(list)
    on_launcher: dict[str, list[float]] = defaultdict(list)
    with SlurmLab() as lab, _slow_files(lab, source, shared, directory / "counts"):
        for number in range(rounds):
            for node in lab.nodes:
                own_disk = directory / "disks" / f"{node}-{number}"
                own_disk.mkdir(parents=True)
                lab.on(node, "mount", "--bind", own_disk, disk)
            for kind in _KINDS:
                before = _counts(lab, directory / "counts")
                place = source if kind == "local" else shared
                stage = ("--stage-env", "active", "--stage-directory", disk) if "copy" in kind else ()
                options = ("--runs-directory", directory / f"runs-{number}", "--ps", "0", "--no-chief", *stage)
                python = place / "env" / "bin" / "python"
                command = (python, "-m", "tf4slurm", "run", *options, "--", python, place / "train.py")
                started = time.monotonic()
                done = lab.run("salloc", "-Q", "-N4", "-n4", *command, cwd=directory, timeout_seconds=900)
                jobs[kind].append(time.monotonic() - started)
                found = [float(seconds) for seconds in _IMPORT.findall(done.stdout)]
                assert len(found) == len(lab.nodes), done.stdout + done.stderr
                imports[kind].append(max(found))
                after = _counts(lab, directory / "counts")
                on_launcher[kind].append(after[_LAUNCHER] - before[_LAUNCHER])
                on_nodes[kind].append(sum(after[node] - before[node] for node in lab.nodes))
            for node in lab.nodes:
                lab.on(node, "umount", disk)
    what = "TensorFlow imported by 4 tasks on 4 hosts"
    return [
        Figure(f"{what}, from a shared file system with 5 ms per metadata operation", "s", tuple(imports["shared"])),
        Figure("the same from the copy of --stage-env", "s", tuple(imports["later copy"])),
        Figure("the same from a local disk", "s", tuple(imports["local"])),
        ratio("copy over local disk", imports["later copy"], imports["local"], "<= 1.2", beside="local disk"),
        Figure("metadata operations of the 4 hosts on the shared file system", "", tuple(on_nodes["shared"])),
        Figure("the same with --stage-env", "", tuple(on_nodes["later copy"])),
        ratio("so many times fewer", on_nodes["shared"], on_nodes["later copy"], ">= 100"),
        Figure("those of the launcher's host, without --stage-env", "", tuple(on_launcher["shared"])),
        Figure("with it, where the first job packs", "", tuple(on_launcher["first copy"])),
        Figure("with it, where the nodes have a copy", "", tuple(on_launcher["later copy"])),
        Figure("the whole job, without --stage-env", "s", tuple(jobs["shared"])),
        Figure("with it, where the first job packs and copies", "s", tuple(jobs["first copy"])),
        Figure("with it, where the nodes have a copy", "s", tuple(jobs["later copy"])),
    ]


def _make_environment(path: Path) -> None:
    """Make a virtual environment with tf4slurm and TensorFlow, and a script beside it."""
    subprocess.run([sys.executable, "-m", "venv", path / "env"], check=True)
    pip = path / "env" / "bin" / "pip"
    subprocess.run([pip, "install", "--quiet", "--disable-pip-version-check", f"{_ROOT}[cpu]"], check=True)
    (path / "train.py").write_text(_SCRIPT)


@contextlib.contextmanager
def _slow_files(lab: SlurmLab, source: Path, mount_point: Path, counts: Path) -> Iterator[None]:
    """Mount the slow file system on each host separately: each has its own cache, and counts its own operations."""
    counts.mkdir()
    command = (sys.executable, _SLOW_FILES, source, mount_point, _SECONDS)
    processes = [lab.popen(*command, counts / _LAUNCHER)]
    processes += [lab.popen_on(node, *command, counts / node, stdin=None, stdout=None) for node in lab.nodes]
    try:
        assert wait_until(lambda: all((counts / host).exists() for host in (_LAUNCHER, *lab.nodes)), 30)
        time.sleep(1)  # for the mounts
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _counts(lab: SlurmLab, counts: Path) -> dict[str, float]:
    time.sleep(0.5)  # they are written ten times a second
    return {host: float((counts / host).read_text()) for host in (_LAUNCHER, *lab.nodes)}
