"""`tf4slurm submit` and `script` with a real sbatch: from the command to the end of the job."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.captures import OUTSIDE_OF_STEPS
from tests.jobs import CHILD, TF4SLURM
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab
from tf4slurm.spec.points import parse_array

ENDS_AT_ONCE = (sys.executable, "-c", "import os; print('role', os.environ['TF_CONFIG'][-40:])")
SAYS_ITS_ARGUMENTS = (sys.executable, "-c", "import sys; print(sys.argv[1:])")
AWKWARD = ('it\'s "two" words', "$HOME", "*", "", "two\nlines", "-n")
Tf4slurm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tf4slurm(tmp_path: Path, lab: SlurmLab) -> Tf4slurm:
    """The command on the login host, in its own directory and without settings."""

    def run(*arguments: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), **env}
        return lab.run(TF4SLURM, *arguments, cwd=tmp_path, env=environ, check=check)

    return run


def submit(tf4slurm: Tf4slurm, *arguments: str, **env: str) -> str:
    """Submit a job; return its id, the only text on standard output."""
    job_id = tf4slurm("submit", *arguments, **env).stdout
    assert job_id.rstrip("\n").isdecimal()
    return job_id.strip()


def field(lab: SlurmLab, job_id: str, name: str) -> str:
    text = lab.run("scontrol", "--oneliner", "show", "job", job_id).stdout.splitlines()[0]
    return next(word for word in text.split() if word.startswith(f"{name}=")).partition("=")[2]


def test_submitted_job_runs_and_writes_its_files(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    job_id = submit(tf4slurm, "-N4", "--workers", "2", "-J", "digits", "-t", "5", "--", *ENDS_AT_ONCE)
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    assert field(lab, job_id, "JobName") == "digits"
    assert field(lab, job_id, "NumTasks") == "4"
    assert "COMPLETED" in (tmp_path / f"slurm-{job_id}.out").read_text()
    result = json.loads((tmp_path / "runs" / f"digits-{job_id}" / "result.json").read_text())
    assert sorted(task["node"] for task in result["tasks"]) == sorted(lab.nodes)
    kept = tmp_path / "runs" / f"digits-{job_id}.sh"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert kept.read_text() == tf4slurm("submit", "--dry-run", *submitted_by(kept)).stdout
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"digits-{job_id}", kept.name]


def test_batch_script_runs_with_variables_of_later_slurm(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    variables = OUTSIDE_OF_STEPS["slurm-26.05-batch"]
    added = "\n".join(f"export {name}=${{{name}-{shlex.quote(value)}}}" for name, value in variables.items())
    job_id = submit(tf4slurm, "-N2", "--workers", "0", "--prologue", added, "--", *ENDS_AT_ONCE)
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0"), (tmp_path / f"slurm-{job_id}.out").read_text()


def submitted_by(script: Path) -> list[str]:
    """Return the arguments that are recorded in the first lines of a script."""
    return shlex.split(script.read_text().splitlines()[2].removeprefix("#   tf4slurm submit "))


def test_single_job_runs_its_command(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    command = ("bash", "-c", 'echo "GPU $CUDA_VISIBLE_DEVICES" "$@"', "bash", *AWKWARD)
    name = 'it\'s my "first" job #1'
    job_id = submit(tf4slurm, "--single", "--gpus-per-node", "1", "-J", name, "--", *command)
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    assert f"JobName={name} UserId" in lab.run("scontrol", "--oneliner", "show", "job", job_id).stdout
    assert (tmp_path / f"slurm-{job_id}.out").read_text() == f"GPU 0 {' '.join(AWKWARD)}\n"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"{name}-{job_id}.sh"]


def test_script_prints_without_slurm_for_sbatch(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    arguments = ("-N2", "-n3", "--", *SAYS_ITS_ARGUMENTS, *AWKWARD)
    here = {**os.environ, "PATH": "/nowhere", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    printed = subprocess.run([TF4SLURM, "script", *arguments], env=here, cwd=tmp_path, capture_output=True, text=True)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout == tf4slurm("submit", "--dry-run", *arguments).stdout
    line = f"{shlex.join([TF4SLURM, 'script', *arguments])} | sbatch --parsable"
    job_id = lab.run("bash", "-c", line, cwd=tmp_path, env={"XDG_CONFIG_HOME": str(tmp_path / "config")}).stdout.strip()
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    log = next((tmp_path / "runs").glob(f"*-{job_id}/logs/chief-0.1.log"))
    assert log.read_text() == f"{list(AWKWARD)}\n"


def test_refusal_has_message_of_slurm(tmp_path: Path, tf4slurm: Tf4slurm) -> None:
    for arguments, words in (
        (("-p", "nope"), "invalid partition specified: nope"),
        (("--sbatch", "no-such-option=1"), "no-such-option"),
    ):
        refused = tf4slurm("submit", "--workers", "1", *arguments, "--", *ENDS_AT_ONCE, check=False)
        assert (refused.returncode, refused.stdout) == (4, "")
        assert words in refused.stderr
        assert "sbatch: " in refused.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_after_unknown_job_is_refused(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    for test_only in ((), ("--test-only",)):
        refused = tf4slurm("submit", *test_only, "--single", "--after", "999999", "--", "true", check=False)
        assert (refused.returncode, refused.stdout) == (4, "")
        assert "Invalid job id specified. Slurm does not know that job" in refused.stderr
    assert lab.queue() == []


def test_test_only_submits_nothing(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    answer = tf4slurm("submit", "--test-only", "-N2", "--workers", "2", "--", *ENDS_AT_ONCE)
    assert answer.stdout.startswith("Job ")
    assert " to start at " in answer.stdout
    too_many = tf4slurm("submit", "--test-only", "-N20", "--workers", "18", "--", *ENDS_AT_ONCE, check=False)
    assert (too_many.returncode, too_many.stdout) == (4, "")
    assert "Requested node configuration is not available" in too_many.stderr
    assert lab.queue() == []
    assert not (tmp_path / "runs").exists()


WRAPPER = """#!/bin/bash
echo "Welcome to the cluster."
PATH={path} sbatch "$@" {end}
"""


@pytest.mark.parametrize("end", [">/dev/null", "&& echo Bye", ">/dev/null; exit 1"])
def test_job_is_found_behind_a_wrapper_of_sbatch(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm, end: str) -> None:
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(WRAPPER.format(path=os.environ["PATH"], end=end))
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{os.environ['PATH']}"
    job_id = submit(tf4slurm, "--single", "-J", "x", "--", *SAYS_ITS_ARGUMENTS, PATH=path)
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    assert [file.name for file in (tmp_path / "runs").iterdir()] == [f"x-{job_id}.sh"]


@pytest.mark.long
def test_job_that_the_controller_accepts_after_sbatch_timed_out_is_found(tmp_path: Path, lab: SlurmLab) -> None:
    wrapper, has_ended = tmp_path / "bin" / "sbatch", tmp_path / "has-ended"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/bash\nPATH={os.environ["PATH"]} sbatch "$@"; code=$?; touch {has_ended}; exit $code\n')
    wrapper.chmod(0o755)
    environ = {"PATH": f"{wrapper.parent}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path)}
    host = psutil.Process(int((lab.directory / "run" / "ctl").read_text()))
    (controller,) = (process for process in host.children(recursive=True) if process.name() == "slurmctld")
    command, pipe = (TF4SLURM, "submit", "--single", "-J", "x", "--", "true"), subprocess.PIPE
    controller.suspend()
    try:
        with lab.popen(*command, env=environ, cwd=tmp_path, stdout=pipe, stderr=pipe) as submitting:
            assert wait_until(has_ended.exists, 60)
            controller.resume()  # it reads what sbatch had sent
            output, errors = submitting.communicate(timeout=60)
    finally:
        controller.resume()
    assert (submitting.returncode, "timed out" in errors) == (0, True), errors
    assert lab.wait_for_job(output.strip()) == ("COMPLETED", "0:0")


def test_array_elements_run_with_their_lines(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    (tmp_path / "lines").write_text("--rate 0.1\n--words 'two words'\n")
    command = ("--", *SAYS_ITS_ARGUMENTS, "--seed", "1")
    job_id = submit(tf4slurm, "--single", "--array-args", "lines", "--array", "0-1%1", *command)
    outputs = [tmp_path / f"slurm-{job_id}_{element}.out" for element in (0, 1)]
    lab.wait_idle()
    expected = (["--seed", "1", "--rate", "0.1"], ["--seed", "1", "--words", "two words"])
    assert [output.read_text() for output in outputs] == [f"{arguments}\n" for arguments in expected]


def test_elements_of_grid_run_with_their_points(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    grid = ("--grid", "lr=0.1,0.01", "--grid", "words=two words")
    submit(tf4slurm, "--ps", "0", "--workers", "0", *grid, "--at-most", "1", "--", *SAYS_ITS_ARGUMENTS, "{lr}")
    lab.wait_idle()
    labels = {
        (path.parent / "logs" / "chief-0.1.log").read_text(): json.loads(path.read_text())["labels"]
        for path in (tmp_path / "runs").glob("*/job.json")
    }
    assert labels == {
        f"{[rate, '--words=two words']}\n": {"lr": rate, "words": "two words"} for rate in ("0.1", "0.01")
    }


def test_slurm_and_tf4slurm_have_the_same_elements(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    array = "0-9:3%2,20"
    job_id = submit(tf4slurm, "--single", "--array", array, "--", "true")
    lab.wait_idle()
    outputs = {path.name for path in tmp_path.glob(f"slurm-{job_id}_*.out")}
    assert outputs == {f"slurm-{job_id}_{index}.out" for index in parse_array(array)}


@pytest.mark.long
def test_after_waits_for_success(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    go = tmp_path / "go"
    first = submit(tf4slurm, "--single", "--", "bash", "-c", f"until [ -e {go} ]; do sleep 0.05; done")
    second = submit(tf4slurm, "--single", "--after", first, "--", "cat", str(go))
    assert field(lab, second, "Dependency").startswith(f"afterok:{first}")
    assert lab.job_state(second)[0] == "PENDING"
    draft = tmp_path / "draft"
    draft.write_text("gone")
    draft.replace(go)
    assert lab.wait_for_job(second, timeout_seconds=60) == ("COMPLETED", "0:0")
    assert (tmp_path / f"slurm-{second}.out").read_text() == "gone"


def test_het_runs_ps_on_own_component(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    job_id = submit(
        tf4slurm,
        *("--het", "-N2", "--workers", "3", "--gpus-per-worker", "1", "--sbatch", "nodelist=r1-n[2,9]", "-c", "2"),
        *("--ps-sbatch", "nodelist=gpu-09", "--ps-sbatch", "cpus-per-task=3", "--", *ENDS_AT_ONCE),
    )
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    result = json.loads(next((tmp_path / "runs").glob(f"*-{job_id}/result.json")).read_text())
    nodes = {task["task"]: task["node"] for task in result["tasks"]}
    assert nodes["ps/0"] == "gpu-09"
    assert {nodes[task] for task in nodes if task != "ps/0"} == {"r1-n2", "r1-n9"}
    assert field(lab, job_id, "CPUs/Task") == "3"
    assert field(lab, str(int(job_id) + 1), "CPUs/Task") == "2"


def test_job_submitted_inside_job_gets_none_of_its_variables(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    """Variables of the outer job would be mistaken for those of the inner one."""
    inner = (TF4SLURM, "submit", "-N1", "--single", "--", "env")
    lines = ("export TF_CONFIG={} TF4SLURM_TASK=worker/0 SBATCH_PARTITION=low", shlex.join(inner))
    (tmp_path / "outer.sh").write_text("\n".join(["#!/bin/bash", "#SBATCH -N3 -n3 -c2 -o outer.out", *lines, ""]))
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    outer = lab.run("sbatch", "--parsable", "outer.sh", cwd=tmp_path, env=environ).stdout.strip()
    assert lab.wait_for_job(outer) == ("COMPLETED", "0:0")
    job_id = (tmp_path / "outer.out").read_text().splitlines()[0]
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    output = (tmp_path / f"slurm-{job_id}.out").read_text()
    found = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    assert not {"SLURM_CPUS_PER_TASK", "TF_CONFIG", "TF4SLURM_TASK", "SBATCH_PARTITION"} & set(found)
    assert (found["SLURM_JOB_ID"], found["SLURM_JOB_PARTITION"]) == (job_id, "debug")


@pytest.mark.long
def test_requeued_job_keeps_output_of_each_run(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    children = tmp_path / "children"
    children.mkdir()
    job_id = submit(
        tf4slurm, "--workers", "1", "--requeue", "1", "-J", "again", "--", sys.executable, str(CHILD), str(children)
    )
    assert field(lab, job_id, "Requeue") == "1"
    assert wait_until((children / "chief-0.1").exists, 60)
    lab.run("scancel", "--batch", f"--signal={signal.SIGUSR1.name}", job_id)
    second = tmp_path / f"slurm-{job_id}.1.out"
    assert wait_until(second.exists, 90)
    (children / "chief-0.exit").write_text("0")
    assert lab.wait_for_job(job_id, timeout_seconds=60) == ("COMPLETED", "0:0")
    assert "COMPLETED" in second.read_text()
    assert "requeued (time limit)" in (tmp_path / f"slurm-{job_id}.out").read_text()


@pytest.mark.long
def test_array_element_is_requeued_alone(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    """The last element has the id of the array itself, and Slurm would requeue all by that."""
    mine = f"{tmp_path}/$SLURM_ARRAY_TASK_ID"
    command = ("bash", "-c", f"mkdir -p {mine}; exec {sys.executable} {CHILD} {mine}")
    job_id = submit(tf4slurm, "--workers", "1", "--array", "0-1", "--requeue", "1", "--", *command)
    assert wait_until(lambda: all((tmp_path / n / "chief-0.1").exists() for n in "01"), 60)
    last = next(f"{job_id}_{n}" for n in (0, 1) if field(lab, f"{job_id}_{n}", "JobId") == job_id)
    other = f"{job_id}_{1 - int(last[-1])}"
    lab.run("scancel", "--batch", "--signal=USR1", last)
    assert wait_until(lambda: field(lab, last, "Restarts") == "1", 60)
    lab.run("scancel", last)
    (tmp_path / other[-1] / "chief-0.exit").write_text("0")
    assert lab.wait_for_job(other) == ("COMPLETED", "0:0")
    assert field(lab, other, "Restarts") == "0"


@pytest.mark.long
def test_job_runs_in_its_snapshot(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    (tmp_path / "train.py").write_text("print('as submitted')")
    go = tmp_path / "go"
    wait = submit(tf4slurm, "--single", "--", "bash", "-c", f"until [ -e {go} ]; do sleep 0.05; done")
    job_id = submit(tf4slurm, "--single", "--snapshot", "copy", "--after", wait, "--", sys.executable, "train.py")
    (tmp_path / "train.py").write_text("print('changed since')")
    go.touch()
    assert lab.wait_for_job(job_id, timeout_seconds=60) == ("COMPLETED", "0:0")
    assert (tmp_path / f"slurm-{job_id}.out").read_text() == "as submitted\n"


def test_environment_that_does_not_exist_is_refused(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    for option, words in (("--venv", "'/no/such/bin/activate' does not exist"), ("--python", "cannot be run")):
        refused = tf4slurm("submit", "--workers", "1", option, "/no/such", "--", *ENDS_AT_ONCE, check=False)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in refused.stderr
    assert lab.queue() == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_python_of_environment_runs_tf4slurm(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    """A virtual environment whose Python reports its use; a json.py beside the script has no effect."""
    venv = tmp_path / "my venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={shlex.quote(str(venv))}:$PATH")
    (venv / "python").write_text(f'#!/bin/bash\necho "this one: $1 $2" >&2\nexec {sys.executable} "$@"\n')
    (venv / "python").chmod(0o755)
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    command = (sys.executable, "-c", "print('trained')")
    job_id = submit(tf4slurm, "-N2", "-n2", "--no-chief", "--venv", "my venv", "--", *command)
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    output = (tmp_path / f"slurm-{job_id}.out").read_text()
    assert output.startswith("this one: -m tf4slurm\n")  # the check before the submission has passed, too
    assert "worker/0 | trained" in output


@pytest.mark.long
def test_job_uses_site_profile_and_variables(tmp_path: Path, lab: SlurmLab, tf4slurm: Tf4slurm) -> None:
    (tmp_path / "config" / "tf4slurm").mkdir(parents=True)
    (tmp_path / "config" / "tf4slurm" / "config.toml").write_text('partition = "high"\ntime = "7"\nps = 5')
    job_id = submit(
        tf4slurm,
        *("--no-chief", "--ps", "1", "--env", "WORD=a b", "--prologue", "echo before", "--epilogue", "echo after"),
        *("--workers", "1", "--", sys.executable, "-c", "import os; print('value', os.environ['WORD'])"),
        TF4SLURM_TIME="9",
    )
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    assert (field(lab, job_id, "Partition"), field(lab, job_id, "TimeLimit")) == ("high", "00:09:00")
    lines = (tmp_path / f"slurm-{job_id}.out").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert any(line.endswith("value a b") for line in lines)
