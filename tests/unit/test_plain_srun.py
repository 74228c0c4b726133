from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch.plain_srun import claim


def test_one_of_many_tasks_ends_the_step(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "train")
    run.control.touch()
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(claim, [run] * 100)) == 1


def test_each_task_ends_the_step_if_none_can_remove_the_file(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "train")
    run.control.mkdir()  # like a file in a directory that is not writable, it cannot be removed
    assert [claim(run) for _ in range(2)] == [True, True]
