"""Input, environment and output of sbatch, with a fake program."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tf4slurm
from tf4slurm import api
from tf4slurm.errors import LaunchError, RefusedError, RunDirectoryError
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.submission.snapshot import place_snapshot, take_snapshot
from tf4slurm.submission.submit import estimate, submit, submit_environment, submit_script

NO_ANSWER = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake sbatch that saves its arguments and its input, and then runs the shell commands in the file `does`.

    A fake squeue lists the job 4712 with the comment of this sbatch if the file `queued` exists, and other jobs.
    """
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/script\n. {tmp_path}/does\n')
    program.chmod(0o755)
    squeue = program.with_name("squeue")
    squeue.write_text(
        f"#!/bin/bash\ncomment=$(grep -o 'tf4slurm-.*' {tmp_path}/arguments)\necho 'Welcome|to all'\n"
        f'[ -e {tmp_path}/queued ] && echo "4712$(cat {tmp_path}/queued)|$comment"; exit 0\n'
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("tf4slurm.submission.submit._FIND_SECONDS", 0.1)
    return tmp_path


def test_submit_returns_job_id_and_logs_warnings(sbatch: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sbatch / "does").write_text("echo 4711; echo 'sbatch: be warned' >&2")
    assert submit_script("#!/bin/bash\n", os.environ) == JobId(4711)
    assert caplog.messages == ["sbatch: be warned"]
    assert (sbatch / "script").read_text() == "#!/bin/bash\n"
    assert re.fullmatch(r"--parsable --comment=tf4slurm-[0-9a-f]{16}\n", (sbatch / "arguments").read_text())


def test_host_without_a_cluster_is_named_in_place_of_errors_of_dns(sbatch: Path) -> None:
    (sbatch / "does").write_text(
        "echo 'sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2\n"
        "echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2\n"
        "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1\n"
    )
    with pytest.raises(
        LaunchError, match=r"have no cluster.*slurm\.conf.*To run the job on this host: tf4slurm run\."
    ) as caught:
        submit_script("#!/bin/bash\n", dict(os.environ))
    assert "dns" not in str(caught.value).lower()
    assert not isinstance(caught.value, RefusedError)


def test_comment_of_the_script_is_kept(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 4711")
    submit_script("#!/bin/bash\n#SBATCH --comment=mine\n", os.environ)
    assert (sbatch / "arguments").read_text() == "--parsable\n"


@pytest.mark.parametrize(
    "printed",
    [
        "Welcome to the cluster\n4711\n",
        "4711\nYour project has 12 hours left.\n",
        "*** 24 ***\n\n4711  \nBye\n",
        "Welcome\n4711;fat\nBye\n",
    ],
)
def test_greeting_beside_the_job_id_is_left_out(sbatch: Path, printed: str) -> None:
    (sbatch / "does").write_text(f"printf {printed!r}")
    assert submit_script("", os.environ) == JobId(4711)


@pytest.mark.parametrize("element", ["", "_[0-3]", "+0"])
@pytest.mark.parametrize(
    "does",
    [
        f"echo '{NO_ANSWER}' >&2; exit 1",
        "echo Submitted",
        "echo 4711; echo 24",
        "echo 4712; exit 3  # a wrapper fails after sbatch",
        "echo 'sbatch: be warned' >&2; exit 3  # a wrapper fails after sbatch",
        "kill -9 $$",
    ],
)
def test_job_is_found_by_its_comment_if_sbatch_does_not_show_it(
    sbatch: Path, does: str, element: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf4slurm.submission.submit._FIND_SECONDS", 60)
    (sbatch / "does").write_text(does)
    (sbatch / "queued").write_text(element)
    assert submit_script("", os.environ) == JobId(4712)
    assert any(message.startswith("squeue shows the job as 4712, although:\n") for message in caplog.messages)


@pytest.mark.parametrize("script", ["", "#SBATCH --comment=mine\n"])
@pytest.mark.parametrize("does", [f"echo '{NO_ANSWER}' >&2; exit 1", "echo Submitted", "echo no budget; exit 1"])
def test_job_that_squeue_does_not_show_may_be_queued(sbatch: Path, does: str, script: str) -> None:
    (sbatch / "does").write_text(does)
    with pytest.raises(RefusedError, match="unknown whether Slurm accepted the job") as unknown:
        submit_script(script, os.environ)
    assert (unknown.value.exit_code, unknown.value.may_be_queued) == (4, True)


def test_last_of_several_numbers_is_the_job_if_squeue_does_not_answer(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 24; echo 4711")
    (sbatch / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert submit_script("", os.environ) == JobId(4711)


@pytest.mark.parametrize(
    ("does", "is_kept"),
    [(f"echo '{NO_ANSWER}' >&2; exit 1", True), ("echo 'sbatch: error: Invalid qos' >&2; exit 1", False)],
)
def test_script_of_a_job_that_may_be_queued_is_kept(
    sbatch: Path, does: str, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (sbatch / "does").write_text(does)
    with pytest.raises(RefusedError):
        submit(BatchSpec(("true",), workers=1, runs_directory=sbatch / "runs"), os.environ)
    kept = [str(path) for path in (sbatch / "runs").glob("*.draft")]
    assert caplog.messages == [f"the batch script is kept as {path}" for path in kept]
    assert len(kept) == is_kept


@pytest.fixture
def spec(sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> BatchSpec:
    """A job with a snapshot of a directory with one file. All jobs are submitted in the same second."""
    (sbatch / "project").mkdir()
    (sbatch / "project" / "train.py").touch()
    monkeypatch.chdir(sbatch / "project")
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    (sbatch / "does").write_text("echo $$")
    return BatchSpec(("/bin/sh", "train.py"), workers=1, snapshot="copy", runs_directory=sbatch / "runs")


def test_simultaneous_submissions_have_a_snapshot_each(spec: BatchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 8
    have_names = threading.Barrier(number)

    def place(spec: BatchSpec) -> BatchSpec:
        placed = place_snapshot(spec)
        have_names.wait(60)
        return placed

    monkeypatch.setattr("tf4slurm.submission.submit.place_snapshot", place)
    with ThreadPoolExecutor(number) as threads:
        jobs = [each.result() for each in [threads.submit(submit, spec, os.environ) for _ in range(number)]]
    scripts = [job.batch_script.read_text() for job in jobs]
    directories = {Path(match[1]) for text in scripts if (match := re.search(r"^cd (\S+) \|\|", text, re.MULTILINE))}
    assert len(directories) == number
    assert {path for path in spec.runs_directory.iterdir() if path.is_dir()} == directories
    assert [sorted(os.listdir(path)) for path in directories] == [["train.py"]] * number


@pytest.mark.parametrize("failing", ["snapshot._keep_links", "submit._write_draft", "submit.make_output_directory", ""])
def test_failed_submission_removes_only_its_own_snapshot(
    spec: BatchSpec, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(spec: BatchSpec) -> BatchSpec:  # another submission takes the name
        placed = place_snapshot(spec)
        assert placed.directory is not None
        placed.directory.mkdir(parents=True)
        (placed.directory / "train.py").touch()
        return placed

    def fail(*arguments: object) -> None:
        raise RunDirectoryError("No space is left.", path="")

    monkeypatch.setattr("tf4slurm.submission.submit.place_snapshot", place)
    Path("../does").write_text("echo 'sbatch: error: Invalid qos' >&2; exit 1")
    if failing:
        monkeypatch.setattr(f"tf4slurm.submission.{failing}", fail)
    with pytest.raises((RefusedError, RunDirectoryError)):
        submit(spec, os.environ)
    (kept,) = spec.runs_directory.iterdir()
    assert os.listdir(kept) == ["train.py"]


def test_given_directory_of_a_snapshot_is_refused_and_kept_if_it_exists(spec: BatchSpec) -> None:
    project = Path.cwd()
    with pytest.raises(RunDirectoryError, match="exists"):
        submit(dataclasses.replace(spec, directory=project), os.environ)
    assert os.listdir(project) == ["train.py"]
    with pytest.raises(RunDirectoryError, match="exists"):
        take_snapshot("copy", project, project, is_fixed=True)
    assert os.listdir(project) == ["train.py"]
    assert not spec.runs_directory.exists()


def test_snapshot_and_script_are_kept_if_the_submission_is_interrupted(
    spec: BatchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("tf4slurm.submission.submit.submit_script", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit(spec, os.environ)
    assert sorted(path.suffix for path in spec.runs_directory.iterdir()) == [".code", ".draft"]


def test_script_and_estimate_of_a_job_with_a_snapshot_create_nothing(spec: BatchSpec) -> None:
    before = {*Path("..").rglob("*")} | {Path("../arguments"), Path("../script")}  # of the fake sbatch
    assert "train-20260101-000000.code" in api.script(spec)
    api.estimate(spec, environ=os.environ)
    assert {*Path("..").rglob("*")} == before


@pytest.mark.parametrize("chosen", [False, True])
def test_job_on_another_cluster_is_found_with_a_variable_of_slurm(
    sbatch: Path, chosen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (sbatch / "does").write_text('echo "4711;fat"; echo "$SLURM_CLUSTERS" >$(dirname $0)/../clusters')
    environ = submit_environment({**os.environ, **({"SLURM_CLUSTERS": "fat"} if chosen else {})}, "")
    assert submit_script("", environ) == JobId(4711)
    assert (sbatch / "clusters").read_text() == ("fat\n" if chosen else "\n")
    assert any("export SLURM_CLUSTERS=fat" in message for message in caplog.messages) is not chosen


@pytest.mark.parametrize("cluster", ["#SBATCH --clusters=fat", "#SBATCH -M fat", "variable"])
def test_job_in_doubt_is_looked_for_on_its_cluster(sbatch: Path, cluster: str) -> None:
    (sbatch / "does").write_text(f"echo '{NO_ANSWER}' >&2; exit 1")
    (sbatch / "bin" / "squeue").write_text(f'#!/bin/sh\necho "$SLURM_CLUSTERS" >{sbatch}/asked\n')
    environ = {**os.environ, **({"SBATCH_CLUSTERS": "fat"} if cluster == "variable" else {})}
    with pytest.raises(RefusedError, match="Check with squeue --me --clusters=fat before"):
        submit_script(f"#!/bin/bash\n{cluster}\n", environ)
    assert (sbatch / "asked").read_text() == "fat\n"


def test_failure_without_a_message_says_so(sbatch: Path) -> None:
    (sbatch / "does").write_text("exit 1")
    with pytest.raises(RefusedError, match="sbatch exited with code 1:\nit wrote no error message"):
        submit_script("", os.environ)


@pytest.mark.parametrize("name", ["sbatch", "sbatch.real"])
def test_refusal_contains_slurms_message(sbatch: Path, name: str) -> None:
    (sbatch / "does").write_text(f"echo '{name}: error: Invalid qos' >&2; exit 1")
    with pytest.raises(RefusedError, match=f"{name}: error: Invalid qos") as refused:
        submit_script("", os.environ)
    assert (refused.value.exit_code, refused.value.returncode, refused.value.may_be_queued) == (4, 1, False)


def test_sbatch_times_out(sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.submission.submit._TIMEOUT_SECONDS", 0.5)
    (sbatch / "does").write_text("exec sleep 60")
    with pytest.raises(RefusedError, match=r"after 0\.5 s") as refused:
        submit_script("", os.environ)
    assert (refused.value.returncode, refused.value.may_be_queued) == (-1, True)


@pytest.mark.parametrize(
    ("error", "words"),
    [("Invalid job id specified", "does not know that job"), ("Socket timed out on send/recv operation", "timed out")],
)
def test_job_of_after_is_unknown_only_if_slurm_answers(sbatch: Path, error: str, words: str) -> None:
    scontrol = sbatch / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'slurm_load_jobs error: {error}' >&2; exit 1\n")
    scontrol.chmod(0o755)
    spec = BatchSpec(("true",), workers=1, after=("17",), runs_directory=sbatch / "runs")
    with pytest.raises(RefusedError, match=words) as refused:
        submit(spec, os.environ)
    assert ("does not know" in str(refused.value)) is ("Invalid" in error)


def test_missing_sbatch_points_to_tf4slurm_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="tf4slurm script") as missing:
        submit_script("", os.environ)
    assert missing.value.exit_code == 3


def test_estimate_is_slurms_message(sbatch: Path) -> None:
    (sbatch / "does").write_text("echo 'Welcome to Slurm' >&2; echo 'sbatch: Job 4 to start at noon' >&2")
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
    set_by_the_user = {"TF4SLURM_LOG", "TF4SLURM_TRUST", "TF4SLURM_PYTHON", "TF4SLURM_PYTHONPATH"}
    assert set(submit_environment(dict.fromkeys(found, "x"), "")) == set_by_the_user
