"""`--stage-env`: what is relocated, what is refused, and what the nodes answer; `srun` and `sbcast` are scripts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tf4slurm.errors import LaunchError
from tf4slurm.launch import staging
from tf4slurm.launch.environment_archive import Relocation
from tf4slurm.launch.node_copies import parse_answers
from tf4slurm.launch.staging import StagedEnvironment, stage_environment
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.job_spec import JobSpec

SRUN = """#!/bin/sh
while [ "$1" != sh ]; do shift; done
SLURMD_NODENAME=n1 "$@" | sed 's/^/0: /'
"""
SBCAST = '#!/bin/sh\ncat "$2" >"$3"\n'


def make_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def staged() -> StagedEnvironment:
    relocate = Relocation({"/project": "/disk/0"})
    return StagedEnvironment("/disk", "/disk/0/bin/python", relocate)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (("/project/bin/python", "train.py"), ("/disk/0/bin/python", "train.py")),
        (("python", "/project/train.py"), ("python", "/project/train.py")),
        (("bin/python", "--out=/project/out"), ("/disk/0/bin/python", "--out=/project/out")),
        (("./train", "--out", "/project"), ("/disk/0/train", "--out", "/project")),
        (("../usr/bin/env", "/project/bin/python"), ("../usr/bin/env", "/project/bin/python")),
        (("/usr/bin/python", "-m", "project"), ("/usr/bin/python", "-m", "project")),
    ],
)
def test_only_the_program_of_the_command_is_relocated(
    staged: StagedEnvironment, monkeypatch: pytest.MonkeyPatch, script: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/project")
    command = staged.command(("/project/bin/python", "-c", "import sys; sys.path += ['/project/lib']"), script)
    assert command[3:7] == ("/disk", "/disk/0/bin/python", "-c", "import sys; sys.path += ['/disk/0/lib']")
    assert command[7:] == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PATH", "/project/bin:/usr/bin", "/disk/0/bin:/disk/0/bin:/usr/bin"),
        ("PYTHONPATH", "/project/lib", "/disk/0/lib"),
        ("LD_LIBRARY_PATH", "/usr/lib:/project/lib", "/usr/lib:/disk/0/lib"),
        ("VIRTUAL_ENV", "/project", "/disk/0"),
        ("CONDA_PREFIX", "/project", "/disk/0"),
        ("TF4SLURM_RUN_DIRECTORY", "/project/runs/train-1", "/project/runs/train-1"),
        ("CHECKPOINTS", "/project/checkpoints", "/project/checkpoints"),
        ("HOME", "/project", "/project"),
        ("PWD", "/project", "/project"),
    ],
)
def test_only_search_paths_of_the_environment_variables_are_relocated(
    staged: StagedEnvironment, name: str, value: str, expected: str
) -> None:
    assert staged.environ({name: value})[name] == expected


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is a virtual environment: `python -m venv .`; the working directory is elsewhere."""
    path = tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        archive.add(path, ".")
    monkeypatch.chdir(tmp_path)
    return path


def make_spec(project: Path, **options: object) -> JobSpec:
    return JobSpec(
        (f"{project}/bin/python", "train.py"),
        workers=1,
        stage_directory=project.parent / "disk",
        **{"stage_env": "active", "runs_directory": project.parent / "runs", **options},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("stage_env", ["active", "env.tar"])
@pytest.mark.parametrize("place", ["working directory", "directory of run directories", "link to the project"])
def test_environment_that_contains_what_the_job_writes_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, stage_env: str, place: str
) -> None:
    monkeypatch.setattr(staging, "list_files", lambda environment: [])
    (project.parent / "link").symlink_to(project)
    spec = make_spec(project, stage_env=str(project.parent / stage_env) if stage_env != "active" else stage_env)
    staging._find_source(spec, os.environ)
    if place == "working directory":
        monkeypatch.chdir(project)
    else:
        directory = project if place == "directory of run directories" else project.parent / "link"
        spec = make_spec(project, stage_env=spec.stage_env, runs_directory=directory / "runs")
    with pytest.raises(LaunchError) as refused:
        staging._find_source(spec, os.environ)
    assert f"is in the environment {str(project)!r}" in str(refused.value)
    assert "python -m venv .venv" in str(refused.value)


def test_lines_of_the_site_among_the_answers_are_ignored() -> None:
    lines = (
        "----------",
        "0: ----------",
        "1: n2 free: 12",
        "",
        "0: slurm-prolog: complete",
        "0: welcome to n1: complete",
    )
    own = ("1: tf4slurm-stage-env: n2 free: 12", "0: no newline heretf4slurm-stage-env: n1 error: no space")
    for cut in ("2: tf4slurm-stage-env:", "2: tf4slurm-stage-env: n3"):
        assert parse_answers("\n".join((*lines, *own, cut))) == {"n2": "free: 12", "n1": "error: no space"}


def stage(project: Path, **options: object) -> StagedEnvironment | None:
    (project.parent / "runs").mkdir(exist_ok=True)
    (project.parent / "disk").mkdir(exist_ok=True)
    allocation = SlurmAllocation(JobId(1), 1, None, num_nodes=1)
    copying: list[str] = []
    return asyncio.run(stage_environment(make_spec(project, **options), allocation, os.environ, copying.append))


@pytest.fixture
def programs(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of fake programs of Slurm; this host is the node n1."""
    path = project.parent / "programs"
    path.mkdir()
    make_program(path / "srun", SRUN)
    make_program(path / "sbcast", SBCAST)
    monkeypatch.setenv("PATH", str(path), prepend=os.pathsep)
    return path


@pytest.mark.parametrize("banner", ["", "echo '0: ----------'; echo '0: n1 print'; printf hello"])
def test_copy_is_made_and_the_next_job_finds_it(project: Path, programs: Path, banner: str) -> None:
    make_program(programs / "srun", SRUN.replace("while", f"{banner}\nwhile", 1))
    for _ in range(2):
        staged = stage(project, stage_env=str(project.parent / "env.tar"))
        assert staged is not None
        assert Path(staged.program).is_relative_to(project.parent / "disk" / f"tf4slurm-{os.getuid()}")
        command = staged.command((sys.executable,), ("echo", "hello"))
        echo = subprocess.run([*command[:4], *command[5:]], capture_output=True, text=True, check=True)
        assert echo.stdout == "hello\n"
        make_program(programs / "sbcast", "#!/bin/sh\nexit 1\n")  # the second job needs none


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("free: ", "node n1: free:"),
        ("free: much", "node n1: free: much"),
        ("free: 1", "node n1 has 1.02 kB free"),
        ("what", "node n1: what"),
        ("error: no home", "node n1: error: no home"),
    ],
)
def test_answer_that_cannot_be_used_is_a_warning(
    project: Path, programs: Path, caplog: pytest.LogCaptureFixture, answer: str, words: str
) -> None:
    make_program(programs / "srun", f"#!/bin/sh\necho '0: tf4slurm-stage-env: n1 {answer}'\n")
    assert stage(project, stage_env=str(project.parent / "env.tar")) is None
    (warning,) = caplog.messages
    assert warning.startswith("--stage-env: the tasks start from the environment itself: ")
    assert words in warning


def test_error_that_is_not_foreseen_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(staging, "find_environment", fail)
    assert stage(project) is None
    assert "ValueError: unforeseen" in caplog.text
