"""sbatch as a program: what it gets, and its answers. The sbatch here is a script that says what it is told to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import tf4slurm
from tf4slurm.errors import LaunchError, RefusedError
from tf4slurm.slurm.sbatch import estimate_start, submit_environment, submit_script


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that keeps its arguments and its script, and then does what the file `does` says."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/script\n. {tmp_path}/does\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize("answer", ["4711", "4711;cluster"])
def test_the_job_id_and_what_was_said_beside_it(sbatch: Path, answer: str) -> None:
    (sbatch / "does").write_text(f"echo '{answer}'; echo 'sbatch: be warned' >&2")
    assert submit_script("#!/bin/bash\n", os.environ) == ("4711", "sbatch: be warned")
    assert (sbatch / "script").read_text() == "#!/bin/bash\n"
    assert (sbatch / "arguments").read_text().split() == ["--parsable"]


def test_a_refusal_is_told_in_slurms_own_words(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 'sbatch: error: Invalid qos' >&2; exit 1")
    with pytest.raises(RefusedError, match="sbatch: error: Invalid qos") as refused:
        submit_script("", os.environ)
    assert (refused.value.exit_code, refused.value.returncode) == (4, 1)


def test_an_answer_that_is_no_job_is_an_error(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo Submitted")
    with pytest.raises(LaunchError, match="no job id: 'Submitted"):
        submit_script("", os.environ)


def test_a_controller_that_does_not_answer_is_not_waited_for(sbatch: Path) -> None:
    (sbatch / "does").write_text("exec sleep 60")
    with pytest.raises(RefusedError, match=r"within 0\.5 s") as refused:
        submit_script("", os.environ, timeout_seconds=0.5)
    assert refused.value.returncode < 0


def test_without_sbatch_there_is_another_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="tf4slurm script") as missing:
        submit_script("", os.environ)
    assert missing.value.exit_code == 3


def test_the_estimate_is_slurms_sentence(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 'sbatch: Job 4 to start at noon' >&2")
    assert estimate_start("", os.environ) == "Job 4 to start at noon"
    assert (sbatch / "arguments").read_text().split() == ["--test-only"]


def test_inside_a_job_nothing_of_it_leaks() -> None:
    environ = {
        **{
            "SLURM_JOB_ID": "1",
            "SLURM_CPU_BIND": "x",
            "SLURMD_NODENAME": "n",
            "SBATCH_PARTITION": "p",
            "TF_CONFIG": "{}",
        },
        **{
            "TF4SLURM_SCRIPT_CHANNEL": "@x",
            "TF4SLURM_TOKEN": "s",
            "SLURM_CONF": "/c",
            "CUDA_VISIBLE_DEVICES": "2",
            "PATH": "/bin",
            "TF4SLURM_LOG": "DEBUG",
        },
    }
    assert submit_environment(environ, []) == {"SLURM_CONF": "/c", "PATH": "/bin", "TF4SLURM_LOG": "DEBUG"}


def test_outside_of_a_job_the_users_own_wishes_stay_unless_the_script_says_otherwise() -> None:
    environ = dict.fromkeys(("SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE"), "x")
    environ |= {"SLURM_CPU_BIND": "x", "CUDA_VISIBLE_DEVICES": "0"}
    kept = submit_environment(environ, ["time", "qos", "mem-per-cpu"])
    assert set(kept) == {"SBATCH_ACCOUNT", "CUDA_VISIBLE_DEVICES"}


def test_every_variable_in_the_sources_is_a_users_or_is_removed_before_sbatch() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(tf4slurm.__file__).parent.rglob("*.py")]
    found = {name for source in sources for name in re.findall(r'"(TF4SLURM_[A-Z_]*[A-Z])"', source)}
    assert set(submit_environment(dict.fromkeys(found, "x"), [])) == {"TF4SLURM_LOG", "TF4SLURM_TRUST"}
