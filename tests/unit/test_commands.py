"""Command lines and error messages of srun, and failures of sattach, with a fake one.

Real output of sattach is in tests/slurm/test_layouts.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tf4slurm.errors import LaunchError, LayoutError
from tf4slurm.slurm import commands
from tf4slurm.slurm.commands import (
    exited_tasks,
    layout_of,
    query_accounting,
    query_exit_codes,
    query_layout,
    query_queue,
    signal_batch,
    srun_command,
    srun_on_each_node_command,
)
from tf4slurm.slurm.environ import HetComponent, SlurmAllocation, SlurmStep
from tf4slurm.slurm.job_id import JobId

ALWAYS = ("--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL", "--input=none")
ARBITRARY = {
    "SLURM_JOB_ID": "999999",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURMD_NODENAME": "n1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_DISTRIBUTION": "arbitrary",
}
SATTACH = '#!/bin/sh\n[ "$*" = "--layout 999999.0" ] || exit 9\n'


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        (SlurmAllocation(JobId(38), 7, None), ("srun", "--ntasks=4", *ALWAYS, "python", "-m", "x")),
        (
            SlurmAllocation(JobId(38), None, 6),
            ("srun", "--ntasks=4", *ALWAYS, "--cpus-per-task=6", "python", "-m", "x"),
        ),
    ],
)
def test_srun(allocation: SlurmAllocation, expected: tuple[str, ...]) -> None:
    assert srun_command(allocation, 4, ["python", "-m", "x"]) == expected


def test_srun_on_the_components_of_a_heterogeneous_job() -> None:
    allocation = SlurmAllocation(JobId(38), 3, None, (HetComponent(1, 2), HetComponent(2, None)))
    assert srun_command(allocation, 3, ["python"], ["--mem=1G"]) == (
        *("srun", "--het-group=0", "--ntasks=1", *ALWAYS, "--cpus-per-task=2", "--mem=1G", "python"),
        *(":", "--het-group=1", "--ntasks=2", *ALWAYS, "--mem=1G", "python"),
    )


def test_srun_once_on_each_node() -> None:
    command = srun_on_each_node_command(3, ["hostname"])
    assert command[:5] == ("srun", "--label", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1")
    assert command[-1] == "hostname"
    assert "--input=none" not in command, "what srun reads goes to all tasks"


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("srun: error: r1-n9: task 1: Exited with exit code 2", {1}),
        ("srun: error: r1-n[2,9]: tasks 0,2-3: Exited with exit code 2", {0, 2, 3}),
        ("srun: error: gpu-09: task 0: Killed", {0}),
        ("srun: error: Unable to create step for job 3: Invalid node name", set()),
        ("slurmstepd: error: execve(): /usr/bin/python: No such file or directory", set()),
        ("", set()),
    ],
)
def test_exited_tasks(line: str, ranks: set[int]) -> None:
    assert exited_tasks(line) == ranks


def with_sattach(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> SlurmStep:
    """Put a fake sattach first on PATH."""
    program = directory / "sattach"
    program.write_text(SATTACH + body)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return SlurmStep.from_environ(ARBITRARY)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo sattach: error: no such job >&2; exit 1", "exited with code 1: sattach: error: no such job"),
        ("exit 1", "exited with code 1: it wrote no error message"),
        ("echo Job step layout:", "printed no layout: 'Job step layout"),
        (r"printf '\tNode 0 (n1), 2 task(s): 0 \n'", "printed no layout"),
    ],
)
def test_error_contains_the_output_of_a_failed_sattach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str
) -> None:
    step = with_sattach(tmp_path, monkeypatch, body)
    with pytest.raises(LaunchError) as caught:
        query_layout(step)
    assert expected in str(caught.value)
    assert caught.value.command == ("sattach", "--layout", "999999.0")


def test_sattach_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = with_sattach(tmp_path, monkeypatch, "exec sleep 60")
    with pytest.raises(LaunchError, match=r"timed out after 0\.5 s") as caught:
        query_layout(step, timeout_seconds=0.5)
    assert caught.value.command == ("sattach", "--layout", "999999.0")


def test_layout_that_contradicts_the_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = with_sattach(tmp_path, monkeypatch, r"printf '\tNode 0 (n2), 1 task(s): 0 \n'")
    with pytest.raises(LayoutError, match="its node is 'n1', but 'n2' in the layout"):
        layout_of(step)


def test_without_sattach_layout_error_of_the_environment_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LayoutError, match="does not determine the node of each rank"):
        layout_of(SlurmStep.from_environ(ARBITRARY))
    with pytest.raises(LaunchError, match="cannot be started"):
        query_layout(SlurmStep.from_environ(ARBITRARY))


def test_long_list_of_jobs_is_queried_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One argument of all ids would be too long for Linux."""
    ids = [JobId(1234567890, (number,)) for number in range(10_000)]
    squeue = tmp_path / "squeue"
    squeue.write_text(
        '#!/bin/bash\nids="$*"; ids=${ids##*-j }; ids=${ids%% -o*}\n'
        "[ $ids = $gone ] && { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }\n"
        'for id in ${ids//,/ }; do echo "$id|RUNNING|None|1:00|2:00|N/A|n1"; done\n'
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("gone", ",".join(map(str, ids[1000:2000])))
    assert [entry.job_id for entry in query_queue(ids)] == ids[:1000] + ids[2000:]


def with_scancel(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a fake scancel first on PATH. It appends its arguments to the file `calls`."""
    program = directory / "scancel"
    program.write_text(f'#!/bin/sh\necho "$*" >> {directory}/calls\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


TRANSITIONAL = 'echo "scancel: Job is in transitional state, retrying" >&2'


@pytest.mark.parametrize(
    "body",
    [
        f"{TRANSITIONAL}; exec sleep 60",
        f"({TRANSITIONAL}; sleep 60; echo again >> calls)",  # a wrapper whose child is the real scancel
        f"echo scancel: Signal 2 to batch job 19_3 >&2; {TRANSITIONAL}; sleep 60; echo again >> calls",
    ],
)
def test_scancel_that_would_send_a_signal_again_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    with_scancel(tmp_path, monkeypatch, body)
    monkeypatch.setattr(commands, "_TIMEOUT_SECONDS", 30.0)
    monkeypatch.setenv("SCANCEL_QUIET", "1")  # would hide the answer
    started = time.monotonic()
    signal_batch(JobId(19, (3,)), "INT")
    assert time.monotonic() - started < 20
    assert (tmp_path / "calls").read_text() == "--verbose --signal=INT --batch 19_3\n"


def test_error_of_scancel_has_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_scancel(tmp_path, monkeypatch, "echo 'scancel: error: Kill job error on job id 19_3: Invalid job' >&2; exit 1")
    with pytest.raises(
        LaunchError, match="exited with code 1: scancel: error: Kill job error on job id 19_3"
    ) as caught:
        signal_batch(JobId(19, (3,)), "INT")
    assert (caught.value.returncode, "Kill job error" in caught.value.stderr) == (1, True)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LaunchError, match=r"scancel .* cannot be started"):
        signal_batch(JobId(19, (3,)), "INT")


@pytest.mark.parametrize("body", ["exec sleep 60", "(sleep 60)", "echo words >&2; sleep 60; exit 0"])
def test_scancel_that_hangs_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    with_scancel(tmp_path, monkeypatch, body)
    monkeypatch.setattr(commands, "_TIMEOUT_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"timed out after 0\.5 s"):
        signal_batch(JobId(19, (3,)), "INT")
    assert time.monotonic() - started < 20


def test_accounting_and_exit_codes_of_all_elements_come_from_one_query_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in {
        "sacct": ("19_0|COMPLETED|0:0", "19_1|CANCELLED by 1000|0:15", "19_[2-3%2]|PENDING|0:0"),
        "scontrol": (
            "JobId=20 ArrayJobId=19 ArrayTaskId=0 JobName=train",
            "   JobState=COMPLETED ExitCode=0:0",
            "",
            "JobId=19 ArrayJobId=19 ArrayTaskId=1 JobName=train",
            "   JobState=FAILED ExitCode=7:0",
            "",
            "JobId=22 ArrayJobId=19 ArrayTaskId=2-3%2 JobName=train",
            "   JobState=PENDING ExitCode=0:0",
            "",
            "JobId=31 HetJobId=30 HetJobOffset=1 JobName=train",
            "   JobState=FAILED ExitCode=0:9",
        ),
    }.items():
        (tmp_path / name).write_text("#!/bin/sh\ncat <<END\n{}\nEND\n".format("\n".join(lines)))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert query_accounting(JobId(19)) == {
        JobId(19, (0,)): ("COMPLETED", 0),
        JobId(19, (1,)): ("CANCELLED", 143),
        JobId(19, (2, 3)): ("PENDING", 0),
    }
    assert query_exit_codes(JobId(19)) == {JobId(19, (0,)): 0, JobId(19, (1,)): 7, JobId(30, component=1): 137}
