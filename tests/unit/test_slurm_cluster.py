"""SlurmCluster without Slurm: its options, its batch script, and what sbatch gets from a notebook in a job."""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tf4slurm
from tests.captures import OUTSIDE_OF_STEPS
from tests.fake_slurm import FakeSlurm
from tf4slurm.clusters import batch_job
from tf4slurm.clusters.base import NotebookCluster
from tf4slurm.errors import OptionError, RefusedError, RendezvousError, RendezvousTimeoutError
from tf4slurm.jobs.schema import JobFile, Process, StatusFile, TaskStatus
from tf4slurm.jobs.status import JobStatus

PROGRAM = "-m tf4slurm.tensorflow.server_program"


def command_of(**options: Any) -> str:
    """Return the command of the tasks in the batch script."""
    last = tf4slurm.SlurmCluster(site="none", **options).script().splitlines()[-1]
    return last.partition(" -- ")[2]


def test_script_runs_servers_for_an_external_chief() -> None:
    lines = tf4slurm.SlurmCluster(1, 3, nodes=2, time="2h", partition="gpu", site="none").script().splitlines()
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {
        "--nodes=2",
        "--ntasks=4",
        "--time=2:00:00",
        "--partition=gpu",
        "--job-name=notebook",
        "--no-requeue",
    } <= directives
    assert "--external-chief" in shlex.split(lines[-1])
    assert lines[-1].endswith(f" -- {shlex.quote(sys.executable)} {PROGRAM}")


@pytest.mark.parametrize(
    ("options", "python"),
    [
        ({}, shlex.quote(sys.executable)),
        ({"module": ("tensorflow",)}, "python"),
        ({"venv": "/my/venv"}, "python"),
        ({"conda": "tf"}, "python"),
        ({"load_env": ". env.sh"}, "python"),
        ({"module": ("tensorflow",), "python": "python3.11"}, "python3.11"),
        ({"python": "/opt/python"}, "/opt/python"),
    ],
)
def test_tasks_run_the_python_of_the_environment(options: dict[str, Any], python: str) -> None:
    assert command_of(**options) == f"{python} {PROGRAM}"


def test_settings_complete_the_options_except_those_that_a_cluster_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tf4slurm.toml").write_text('partition = "short"\nrequeue = 2\nmax-attempts = 3\nps = 4\n')
    script = tf4slurm.SlurmCluster(time="5m").script()
    assert "#SBATCH --partition=short" in script
    assert "#SBATCH --ntasks=3" in script
    assert "--no-requeue" in script
    assert "--requeue" not in script


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "python train.py"}, "A SlurmCluster has no command: .* tf4slurm.Job."),
        ({"chief": True}, "A SlurmCluster has no chief: .* the notebook is its chief"),
        ({"external_chief": True}, "A SlurmCluster has no external_chief"),
        ({"array": "0-3"}, "A SlurmCluster has no array: a cluster is one job"),
        ({"grid": ("lr=1,2",)}, "A SlurmCluster has no grid: a cluster is one job"),
        ({"single": True}, "A SlurmCluster has no single"),
        ({"max_attempts": 2}, "A SlurmCluster has no max_attempts: variables of a lost ps are lost"),
        ({"requeue": 1}, "A SlurmCluster has no requeue"),
        ({"evaluators": 1}, "A SlurmCluster has no evaluators"),
        ({"worker": 3}, "'worker' is not an option of a job. Did you mean 'workers'"),
        ({"workers": None}, "workers=None: expected a number"),
        ({"ps": -1}, "--ps: -1 is less than 0"),
        ({"here": True, "partition": "gpu"}, "With here=True nothing is submitted, so partition has no effect"),
        ({"mem": "1G", "mem_per_cpu": "1G"}, "exclude each other"),
    ],
)
def test_options_that_a_cluster_does_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tf4slurm.SlurmCluster(**options)


def test_cluster_without_ps_or_workers_is_refused() -> None:
    with pytest.raises(OptionError, match="needs ps and workers"):
        tf4slurm.SlurmCluster(ps=0, site="none").script()


def test_help_has_the_options() -> None:
    parameters = inspect.signature(tf4slurm.SlurmCluster).parameters
    assert list(parameters)[:2] == ["ps", "workers"]
    assert {"partition", "gpus_per_worker", "pending_timeout_seconds", "site"} <= parameters.keys()
    assert not {"options", "command", "chief", "array", "single", "max_attempts"} & parameters.keys()
    assert "partition: Partition." in (tf4slurm.SlurmCluster.__init__.__doc__ or "")


def test_start_without_slurm_names_the_local_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RendezvousError, match=r"srun, sbatch, .* are not on PATH of .*use tf4slurm.LocalCluster"):
        tf4slurm.SlurmCluster().start()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    """Fakes of Slurm's programs. sbatch writes its environment variables to the file "variables"."""
    monkeypatch.chdir(tmp_path)
    fake_slurm.fake("srun", "exit 1")
    fake_slurm.fake("sbatch", f"env -0 > {fake_slurm.directory}/variables; echo 50")
    return fake_slurm


@pytest.mark.parametrize("job", OUTSIDE_OF_STEPS)
def test_variables_of_the_job_of_a_notebook_are_not_passed_to_sbatch(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    for name, value in OUTSIDE_OF_STEPS[job].items():
        monkeypatch.setenv(name, value)
    outer = {"TF_CONFIG": "{}", "TF4SLURM_TASK": "worker/0", "SBATCH_PARTITION": "low", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in {**outer, "SLURM_CONF": "/etc/slurm.conf", "MINE": "1"}.items():
        monkeypatch.setenv(name, value)
    slurm.set_queue(j50="FAILED")
    with pytest.raises(RendezvousError):
        tf4slurm.SlurmCluster(site="none").start()
    entries = (slurm.directory / "variables").read_text().split("\0")
    found = dict(entry.partition("=")[::2] for entry in entries if entry)
    assert not outer.keys() & found.keys()
    assert [name for name in found if name.startswith("SLURM")] == ["SLURM_CONF"]
    assert found["MINE"] == "1"


def test_job_that_ends_before_its_start_is_an_error_with_its_output(slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "slurm-50.out").write_text("no module tensorflow\n")
    slurm.set_queue(j50="FAILED")
    cluster = tf4slurm.SlurmCluster(site="none")
    with pytest.raises(RendezvousError) as caught:
        cluster.start()
    message = str(caught.value)
    assert message.startswith("The cluster could not be started:\nnotebook-50 is FAILED: ")
    assert "no module tensorflow" in message
    assert slurm.calls("scancel") == []
    with pytest.raises(RendezvousError, match="The cluster is closed"):
        cluster.start()


def test_job_that_is_pending_for_too_long_is_cancelled(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "_POLL_SECONDS", 0.01)
    slurm.set_queue(j50="PENDING")
    slurm.fake("scancel", f"echo '50|CANCELLED|None|0:01|1:00|N/A|n1' > {slurm.directory}/queue")
    cluster = tf4slurm.SlurmCluster(site="none", pending_timeout_seconds=0.2)
    with pytest.raises(RendezvousTimeoutError, match=r"did not start notebook-50 within pending_timeout_seconds=0.2"):
        cluster.start()
    assert slurm.calls("scancel") == ["50"]
    assert cluster.job.status().state == "STOPPED"


def test_interrupt_during_the_submission_cancels_the_job(slurm: FakeSlurm) -> None:
    """Jupyter signals the process group, to which sbatch belongs."""
    body = f"grep SigBlk /proc/self/status > {slurm.directory}/blocked; kill -INT $PPID; sleep 0.2; echo 50"
    (slurm.directory / "sbatch").write_text(f"#!/bin/bash\n{body}\n")  # dash would clear the mask
    slurm.set_queue(j50="PENDING")
    slurm.fake("scancel", f"echo '50|CANCELLED|None|0:01|1:00|N/A|n1' > {slurm.directory}/queue")
    cluster = tf4slurm.SlurmCluster(site="none")
    with pytest.raises(KeyboardInterrupt):
        cluster.start()
    assert slurm.calls("scancel") == ["50"]
    blocked = int((slurm.directory / "blocked").read_text().split()[1], 16)
    assert blocked & 1 << signal.SIGINT - 1
    assert cluster.job.status().state == "STOPPED"


def test_refusal_of_sbatch_is_raised_and_nothing_is_cancelled(slurm: FakeSlurm) -> None:
    slurm.fake("sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(RefusedError, match="invalid partition specified: nope"):
        tf4slurm.SlurmCluster(site="none", partition="nope").start()
    assert slurm.calls("scancel") == []
    assert not list((Path.cwd() / "runs").glob("*"))


@pytest.mark.parametrize(
    ("start", "end"), [(None, "are first."), ("2026-11-27T10:21:07", "are first. Expected start: 2026-11-27T10:21:07.")]
)
def test_line_of_a_pending_job_has_the_reason_and_the_expected_start(start: str | None, end: str) -> None:
    reason = "Priority: jobs with a higher priority are first"
    status = JobStatus("50", "notebook-50", "PENDING", 0.0, reason=reason, start=start)
    assert batch_job.describe_start(status) == f"notebook-50 PENDING: Priority: jobs with a higher priority {end}"


def test_new_workers_have_the_options_of_the_cluster_but_those_of_whole_nodes(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NotebookCluster, "_check_running", lambda cluster: cluster.run_directory)
    run = slurm.run("notebook-50")
    file = JobFile(name="notebook", job_id="50", counts={"chief": 1, "ps": 1, "worker": 2})
    run.write(replace(file, process=Process.of(os.getpid()), versions={"tf4slurm": tf4slurm.__version__}))
    slurm.set_queue(j50="RUNNING")
    slurm.fake("sbatch", f"cat > {slurm.directory}/script; echo 51")
    options: dict[str, Any] = {"nodes": 2, "mem": "32G", "partition": "gpu", "time": "1h", "cpus_per_task": 4}
    more: dict[str, Any] = {"sbatch": ("hint=nomultithread", "nodelist=n1"), "env": ("A=1",), "site": "none"}
    cluster = tf4slurm.SlurmCluster(1, 2, **options, **more)
    cluster.run_directory, cluster.cluster = run, {"worker": ["n1:1", "n1:2"]}
    cluster.scale(4, partition="preempt", mem="8G")
    script = (slurm.directory / "script").read_text()
    found = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    expected = {"--array=0-1", "--partition=preempt", "--mem=8G", "--time=1:00:00", "--cpus-per-task=4"}
    assert {*expected, "--hint=nomultithread"} <= found
    assert not [line for line in found if line.startswith(("--nodes", "--nodelist"))]
    assert "export A=1" in script
    with pytest.raises(OptionError, match="'nodes' is not an option of tf4slurm grow"):
        cluster.scale(4, nodes=2)


def test_notebook_shows_why_the_job_is_pending_and_when_it_starts(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = tf4slurm.SlurmCluster(site="none", pending_timeout_seconds=0)
    assert cluster._repr_html_() == "<pre>SlurmCluster(a new cluster: not started)</pre>"
    line = "50|PENDING|Priority|0:00|1:00|2026-11-27T10:21:07|"
    slurm.fake("squeue", f"echo '{line}'")
    monkeypatch.setattr(batch_job.BatchJob, "end", lambda job, is_started: None)  # it stays pending
    with pytest.raises(RendezvousTimeoutError):
        cluster.start()
    page = cluster._repr_html_()
    assert page.startswith("<b>notebook-50</b> PENDING<br>Priority: jobs with a higher priority are first. Expected")
    assert "Expected start: 2026-11-27T10:21:07.<pre>" in page


def test_notebook_shows_state_node_and_step_of_each_task(slurm: FakeSlurm) -> None:
    run = slurm.run("notebook-50")
    tasks = [
        TaskStatus("ps/0", 0, node="n1", state="running"),
        TaskStatus("worker/0", 1, node="n2", state="importing"),
        TaskStatus("worker/1", 3, has_joined=True, node="n3", state="running"),
        TaskStatus("chief/0", 2, node="login", state="running", step=7, steps_per_second=2.5),
    ]
    run.write(StatusFile(time=time.time(), tasks=tuple(tasks)))
    slurm.set_queue(j50="RUNNING")
    cluster = tf4slurm.SlurmCluster(site="none")
    cluster.run_directory = run
    lines = cluster._repr_html_().partition("<pre>")[2].splitlines()
    words = ["task node state step step/s", "ps/0 n1 running", "worker/0 n2 importing", "worker/1 (joined) n3 running"]
    assert [" ".join(line.split()) for line in lines] == [*words, "chief/0 login running 7 2.5</pre>"]


def test_cluster_here_needs_an_allocation_and_has_no_script(slurm: FakeSlurm) -> None:
    cluster = tf4slurm.SlurmCluster(here=True, site="none")
    with pytest.raises(OptionError, match="no batch script"):
        cluster.script()
    with pytest.raises(
        RendezvousError, match=r"this process is in none\. .*salloc --ntasks=3 jupyter lab.* omit here=True"
    ):
        cluster.start()
    assert slurm.calls("sbatch") == slurm.calls("srun") == []
