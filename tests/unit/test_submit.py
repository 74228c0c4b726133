"""Input, environment and output of sbatch, with a fake program."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import tf4slurm
from tf4slurm.batch_spec import BatchSpec
from tf4slurm.errors import LaunchError, RefusedError
from tf4slurm.submission.submit import estimate, submit_environment, submit_script


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake sbatch that saves its arguments and its input, and then runs the shell commands in the file `does`."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/script\n. {tmp_path}/does\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path


def test_submit_returns_job_id_and_logs_warnings(sbatch: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sbatch / "does").write_text("echo 4711; echo 'sbatch: be warned' >&2")
    assert submit_script("#!/bin/bash\n", os.environ) == "4711"
    assert caplog.messages == ["sbatch: be warned"]
    assert (sbatch / "script").read_text() == "#!/bin/bash\n"
    assert (sbatch / "arguments").read_text().split() == ["--parsable"]


@pytest.mark.parametrize("chosen", [False, True])
def test_job_on_another_cluster_is_found_with_a_variable_of_slurm(
    sbatch: Path, chosen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (sbatch / "does").write_text('echo "4711;fat"; echo "$SLURM_CLUSTERS" >$(dirname $0)/../clusters')
    environ = submit_environment({**os.environ, **({"SLURM_CLUSTERS": "fat"} if chosen else {})}, "")
    assert submit_script("", environ) == "4711"
    assert (sbatch / "clusters").read_text() == ("fat\n" if chosen else "\n")
    assert any("export SLURM_CLUSTERS=fat" in message for message in caplog.messages) is not chosen


def test_refusal_contains_slurms_message(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 'sbatch: error: Invalid qos' >&2; exit 1")
    with pytest.raises(RefusedError, match="sbatch: error: Invalid qos") as refused:
        submit_script("", os.environ)
    assert (refused.value.exit_code, refused.value.returncode) == (4, 1)


def test_output_without_a_job_id_is_an_error(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo Submitted")
    with pytest.raises(LaunchError, match="no job id: 'Submitted"):
        submit_script("", os.environ)


def test_sbatch_times_out(sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.submission.submit._TIMEOUT_SECONDS", 0.5)
    (sbatch / "does").write_text("exec sleep 60")
    with pytest.raises(RefusedError, match=r"after 0\.5 s") as refused:
        submit_script("", os.environ)
    assert refused.value.returncode < 0


def test_missing_sbatch_points_to_tf4slurm_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="tf4slurm script") as missing:
        submit_script("", os.environ)
    assert missing.value.exit_code == 3


def test_estimate_is_slurms_message(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 'sbatch: Job 4 to start at noon' >&2")
    assert estimate(BatchSpec(("true",), workers=1), os.environ) == "Job 4 to start at noon"
    assert (sbatch / "arguments").read_text().split() == ["--test-only"]


def test_inside_a_job_its_variables_are_removed() -> None:
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
    assert submit_environment(environ, "") == {"SLURM_CONF": "/c", "PATH": "/bin", "TF4SLURM_LOG": "DEBUG"}


def test_outside_of_a_job_the_users_sbatch_variables_are_kept_unless_the_script_sets_them() -> None:
    environ = dict.fromkeys(("SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_NODE"), "x")
    environ |= {"SLURM_CPU_BIND": "x", "CUDA_VISIBLE_DEVICES": "0"}
    kept = submit_environment(
        environ, "#SBATCH --time=1\n#SBATCH --qos=low\n#SBATCH --mem-per-cpu=1G\necho --account=x\n"
    )
    assert set(kept) == {"SBATCH_ACCOUNT", "CUDA_VISIBLE_DEVICES"}


def test_every_variable_that_tf4slurm_sets_is_removed() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(tf4slurm.__file__).parent.rglob("*.py")]
    found = {name for source in sources for name in re.findall(r'"(TF4SLURM_[A-Z_]*[A-Z])"', source)}
    assert set(submit_environment(dict.fromkeys(found, "x"), "")) == {"TF4SLURM_LOG", "TF4SLURM_TRUST"}
