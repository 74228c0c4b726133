"""`--stage-env` on four hosts of a real Slurm, each with a disk of its own: agents and scripts start from the copy."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM, Job
from tests.processes import marked_processes, wait_until, wait_until_gone
from tests.slurm.lab import SlurmLab
from tests.slurm.test_run import SALLOC, make_job

SHOW = """
import json, os, shutil, sys
print("FOUND", json.dumps([sys.prefix, sys.executable, shutil.which("python"), os.environ.get("VIRTUAL_ENV")]))
"""

SHOW_AGENT = (
    SHOW
    + """
print("AGENT", [line.split()[-1] for line in open(f"/proc/{os.getppid()}/maps") if "cygrpc" in line][0])
"""
)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def disks(lab: SlurmLab, tmp_path: Path) -> Iterator[Path]:
    """A path at which each host has a disk of 20 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    for node in lab.nodes:
        lab.on(node, "mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", path)
    yield path
    for node in lab.nodes:
        lab.on(node, "umount", "--lazy", path)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment that is active; its archive is beside it."""
    path = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(path, ".")
    monkeypatch.setenv("VIRTUAL_ENV", str(path))
    monkeypatch.setenv("PATH", f"{path}/bin:{os.environ['PATH']}")
    return path


@pytest.fixture
def job(tmp_path: Path, lab: SlurmLab) -> Iterator[Job]:
    with make_job(tmp_path, lab) as job:
        yield job


def start(job: Job, disks: Path, *options: str, archive: str = "env.tar.gz", code: str = SHOW) -> None:
    stage = ("--stage-env", str(job.directory / archive), "--stage-directory", str(disks))
    job.start(
        "--no-chief", "--ps", "0", "--workers", "4", *stage, *options, prefix=SALLOC, command=("python", "-c", code)
    )


def found(job: Job) -> list[list[str]]:
    """Return what the scripts of the latest job have printed."""
    lines = [line.partition("FOUND ")[2] for line in job.stdout.splitlines()]
    return [json.loads(line) for line in lines if line]


def staging_events(job: Job) -> list[str]:
    """Return the terminal's lines about copies."""
    return [line for line in job.stderr.splitlines() if "copying the environment" in line]


def test_scripts_start_from_the_copy_and_the_next_job_finds_it(
    job: Job, lab: SlurmLab, disks: Path, environment: Path
) -> None:
    start(job, disks)
    assert job.wait(60) == 0, job.stderr
    (copy,) = {prefix for prefix, *_ in found(job)}
    assert Path(copy).parents[1] == disks / f"tf4slurm-{os.getuid()}"
    assert found(job) == [[copy, f"{copy}/bin/python", f"{copy}/bin/python", copy]] * 4
    assert len(staging_events(job)) == 1
    for node in lab.nodes:  # no archive is left
        assert lab.on(node, "ls", "-A", Path(copy).parents[1]).stdout.split() == [Path(copy).parts[-2]]

    start(job, disks)
    assert job.wait(60) == 0, job.stderr
    assert found(job) == [[copy, f"{copy}/bin/python", f"{copy}/bin/python", copy]] * 4
    assert staging_events(job) == []


def test_too_small_disk_is_named_and_the_job_runs_without_a_copy(
    job: Job, lab: SlurmLab, disks: Path, environment: Path
) -> None:
    lab.on(lab.nodes[2], "dd", "if=/dev/zero", f"of={disks}/filling", "bs=1M", "count=20", check=False)
    start(job, disks)
    assert job.wait(60) == 0, job.stderr
    assert {prefix for prefix, *_ in found(job)} == {str(environment)}
    assert f"node {lab.nodes[2]} has 0 B free" in job.stderr
    assert "--stage-directory" in job.stderr


def test_unused_copies_make_room_and_used_ones_stay(job: Job, lab: SlurmLab, disks: Path, environment: Path) -> None:
    parent, node = disks / f"tf4slurm-{os.getuid()}", lab.nodes[0]
    for name in ("env-used", "env-unused"):
        lab.on(node, "mkdir", "-p", "-m", "700", parent / name)
        lab.on(node, "dd", "if=/dev/zero", f"of={parent / name}/file", "bs=1M", "count=9")
        lab.on(node, "touch", parent / name / ".complete")
        lab.on(node, "touch", "-d", "1 hour ago", parent / name)
    lab.on(node, "dd", "if=/dev/zero", f"of={disks}/filling", "bs=1k", "count=2040", check=False)
    lock = ("flock", "-Fs", parent / "env-used", "sleep", "300")
    user = lab.popen_on(node, *lock, stdin=subprocess.DEVNULL, stdout=None)
    try:
        start(job, disks)
        assert job.wait(60) == 0, job.stderr
        left = lab.on(node, "ls", parent).stdout.split()
    finally:
        user.kill()
        user.wait()
    assert "env-used" in left
    assert "env-unused" not in left
    assert {prefix for prefix, *_ in found(job)} != {str(environment)}


@pytest.mark.parametrize("fault", ["no archive", "no Python", "directory of another user"])
def test_copy_that_cannot_be_used_is_refused_and_the_job_runs_without_it(
    job: Job, lab: SlurmLab, disks: Path, environment: Path, fault: str
) -> None:
    if fault == "no archive":
        (job.directory / "env.tar.gz").write_text("text")
    elif fault == "no Python":
        with tarfile.open(job.directory / "env.tar.gz", "w:gz") as archive:
            archive.add(environment, "env")  # not the directory's content
    else:
        for node in lab.nodes:
            lab.on(node, "install", "-d", "-o", "nobody", disks / f"tf4slurm-{os.getuid()}")
    start(job, disks)
    assert job.wait(60) == 0, job.stderr
    assert {prefix for prefix, *_ in found(job)} == {str(environment)}
    reason = {
        "no archive": "tar",
        "no Python": "bin/python",
        "directory of another user": "not a directory of this user",
    }
    assert reason[fault] in job.stderr.partition("--stage-env: ")[2]


def test_lines_that_a_task_prolog_prints_are_ignored(slurm: None, tmp_path: Path, environment: Path) -> None:
    prolog = tmp_path / "prolog.sh"
    prolog.write_text("#!/bin/sh\necho print ----------\necho print welcome: complete\n")
    prolog.chmod(0o755)
    options = ("--no-chief", "--ps=0", "--workers=1", "--runs-directory", tmp_path / "runs")
    stage = ("--stage-env", tmp_path / "env.tar.gz", "--stage-directory", tmp_path)
    with SlurmLab(["prolog-1"], extra_conf=f"TaskProlog={prolog}") as lab:
        command = ("salloc", "-Q", "-n1", TF4SLURM, "run", *options, *stage, "--", "python", "-c", SHOW)
        done = lab.run(*command, cwd=tmp_path)
    assert "welcome: complete" in done.stdout
    prefix = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])[0]
    assert Path(prefix).is_relative_to(tmp_path / f"tf4slurm-{os.getuid()}"), done.stderr


def test_stop_during_the_copy_ends_the_job_and_its_programs(
    job: Job, disks: Path, environment: Path, process_mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = job.directory / "bin"
    programs.mkdir()
    (programs / "sbcast").write_text("#!/bin/sh\nexec sleep 100\n")  # as if the network were slow
    (programs / "sbcast").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    start(job, disks)
    assert wait_until(lambda: any("sleep 100" in process.command for process in marked_processes(process_mark)), 60)
    (launcher,) = [p for p in marked_processes(process_mark) if p.command.split()[1:3] == [TF4SLURM, "run"]]
    os.kill(launcher.pid, signal.SIGTERM)
    assert job.wait(60) == 143
    assert job.result["state"] == "STOPPED"
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def copy_packages(site_packages: Path) -> None:
    """Copy tf4slurm and what it needs from this environment: other releases' root directories have no network."""
    shutil.copytree(ROOT / "tf4slurm", site_packages / "tf4slurm")
    names = ["tf4slurm"]
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for other versions of Python
        for file in distribution.files or () if name != "tf4slurm" else ():
            if ".." not in file.parts:
                (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(distribution.locate_file(file)), site_packages / file)
        required = [re.split(r"[^\w.-]", text)[0] for text in distribution.requires or () if "extra ==" not in text]
        names += dict.fromkeys(name for name in required if name not in names)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_active_environment_is_packed_once_and_agents_start_from_its_copy(lab: SlurmLab, tmp_path: Path) -> None:
    environment, disk = tmp_path / "env", tmp_path / "disk"
    disk.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    copy_packages(next(environment.glob("lib/python*/site-packages")))
    nodes = lab.nodes[:2]
    for node in nodes:
        (tmp_path / f"disk-{node}").mkdir()
        lab.on(node, "mount", "--bind", tmp_path / f"disk-{node}", disk)
    try:
        options = ("--runs-directory", tmp_path / "runs", "--no-chief", "--ps=0", "--stage-env=active")
        run = (environment / "bin" / "python", "-m", "tf4slurm", "run", *options, "--stage-directory", disk)
        salloc = ("salloc", "-Q", "-n2", f"--nodelist={','.join(nodes)}")
        command = (environment / "bin" / "python", "-c", SHOW_AGENT)
        for is_packed in (True, False, True):
            done = lab.run(*salloc, *run, "--", *command, cwd=tmp_path, timeout_seconds=180)
            assert ("copying the environment" in done.stderr) == is_packed, done.stderr
            prefixes = [
                json.loads(line.partition("FOUND ")[2])[0] for line in done.stdout.splitlines() if "FOUND" in line
            ]
            agents = [line.partition("AGENT ")[2] for line in done.stdout.splitlines() if "AGENT" in line]
            assert len(prefixes) == len(agents) == 2
            assert all(Path(path).is_relative_to(disk) for path in (*prefixes, *agents))
            (archive,) = (tmp_path / "runs" / f".environments-{os.getuid()}").iterdir()
            assert archive.suffix == ".tar"
            assert (archive.stat().st_uid, archive.stat().st_size > 10**6) == (os.getuid(), True)
            if not is_packed:  # another user puts an archive in its place, and no node has a copy
                archive.write_bytes(b"planted")
                os.chown(archive, 65534, 65534)
                for node in nodes:
                    lab.on(node, "rm", "-rf", disk / f"tf4slurm-{os.getuid()}")
    finally:
        for node in nodes:
            lab.on(node, "umount", "--lazy", disk)
