"""Jobs with --external-chief: the roles of ranks, and the number of tasks that are started."""

from __future__ import annotations

import pytest

from tf4slurm.cluster import Task
from tf4slurm.errors import OptionError, PlacementError
from tf4slurm.placement import SPREAD
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.submission.batch_script import make_script

COMMAND = ("python", "server.py")


@pytest.mark.parametrize(
    ("placement", "others"),
    [
        ("pack", ["ps", "worker", "worker"]),
        (SPREAD, ["ps", "worker", "worker"]),
        ("worker,ps,worker", ["worker", "ps", "worker"]),
    ],
)
def test_external_chief_has_the_last_rank(placement: str, others: list[str]) -> None:
    spec = JobSpec(COMMAND, ps=1, workers=2, external_chief=True, placement=placement)
    tasks = spec.place(spec.counts, ["a", "a", "b", "notebook"])
    assert [task.task_type for task in tasks[:-1]] == others
    assert tasks[-1] == Task("chief", 0)
    assert (spec.num_tasks, spec.num_spawned) == (4, 3)


def test_workers_are_the_tasks_that_slurm_provides_beside_the_ps() -> None:
    spec = JobSpec(COMMAND, ps=1, external_chief=True)
    assert spec.for_tasks(5).counts == {"chief": 1, "ps": 1, "worker": 4, "evaluator": 0}
    with pytest.raises(PlacementError, match="1 ps \\+ 2 worker need 3 tasks, but Slurm gives 4"):
        JobSpec(COMMAND, ps=1, workers=2, external_chief=True).for_tasks(4)


def test_batch_script_requests_no_task_for_the_chief() -> None:
    text = make_script(BatchSpec(COMMAND, ps=1, workers=2, external_chief=True))
    assert "#SBATCH --ntasks=3\n" in text
    assert " --external-chief " in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chief": False}, "--external-chief and --no-chief exclude each other"),
        ({"max_attempts": 2}, "--external-chief and --max-attempts 2 exclude each other"),
        ({"requeue": 1}, "--external-chief and --requeue 1 exclude each other"),
        ({"ps": 0}, "--external-chief needs ps and workers"),
        ({"workers": 0}, "--external-chief needs ps and workers"),
    ],
)
def test_options_that_an_external_chief_excludes(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        JobSpec(COMMAND, **{"ps": 1, "workers": 1, "external_chief": True, **options})  # type: ignore[arg-type]
