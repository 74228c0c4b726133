"""The result of a job without a launcher, written by another task than rank 0."""

from __future__ import annotations

from pathlib import Path

from tf4slurm.cluster import Address
from tf4slurm.control.client import ControlClient
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.launch.task_program import _write_result
from tf4slurm.spec.job_spec import JobSpec


def test_result_of_rank_0_is_kept_and_one_task_alone_removes_control_file(tmp_path: Path) -> None:
    def never(_: Address) -> None:
        raise AssertionError

    directory = RunDirectory.open(tmp_path / "job")
    member = ControlClient(lambda: None, never, JobSpec(start_timeout_seconds=1))  # type: ignore[arg-type]
    directory.write_control({"munge": "s"})
    directory.write_result(ResultFile(exit_code=3))
    assert [_write_result(member, directory) for _ in range(2)] == [True, False]
    assert directory.read(ResultFile) == ResultFile(exit_code=3)
