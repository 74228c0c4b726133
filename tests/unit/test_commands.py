"""Command lines and error messages of srun, and failures of sattach, with a fake one.

Real output of sattach is in tests/slurm/test_layouts.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tf4slurm.errors import LaunchError, LayoutError
from tf4slurm.slurm.commands import (
    exited_tasks,
    layout_of,
    query_layout,
    query_queue,
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
