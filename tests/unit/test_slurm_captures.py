"""Recorded steps of a real Slurm: each task computes the correct layout, or refuses it for a known reason."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.captures import CAPTURES, Capture, capture_of
from tf4slurm.errors import LayoutError
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.slurm.gpus import gpu_environ


def steps_of(capture: Capture) -> list[SlurmStep]:
    return [SlurmStep.from_environ(environ) for environ in capture.environs]


def may_refuse(capture: Capture, step: SlurmStep) -> bool:
    """Return whether other layouts give this task the same environment: see `layout.py`."""
    groups = [set(group) & set(step.nodes) for group in step.het_groups.values()]
    components = [nodes for nodes in groups if nodes]
    known = [len(nodes) == 1 or (len(nodes) == 2 and step.node_name in nodes) for nodes in components]
    return "arbitrary" in capture.layout or (len(components) > 1 and not all(known))


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_every_task_computes_the_correct_layout_or_refuses(capture: Capture) -> None:
    for step in steps_of(capture):
        if may_refuse(capture, step):
            with pytest.raises(LayoutError):
                _ = step.nodes_by_rank
            step.check_own_place(capture.nodes_by_rank)
        else:
            assert step.nodes_by_rank == capture.nodes_by_rank


def test_number_of_captures() -> None:
    steps = [(capture, step) for capture in CAPTURES for step in steps_of(capture)]
    assert len(CAPTURES) == 64
    assert len(steps) == 314
    assert sum(may_refuse(capture, step) for capture, step in steps) == 30


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_rank_and_node_of_every_task(capture: Capture) -> None:
    for rank, step in enumerate(steps_of(capture)):
        assert step.rank == rank
        assert step.node_name == capture.nodes_by_rank[rank]
        assert step.node_ranks[step.local_rank] == rank
        assert sum(step.tasks_per_node) == step.num_tasks == len(capture.nodes_by_rank)
        assert set(step.nodes) == set(capture.nodes_by_rank)
    for node, count in Counter(capture.nodes_by_rank).items():
        assert sorted(step.local_rank for step in steps_of(capture) if step.node_name == node) == [*range(count)]


def test_wrong_layout_is_refused_by_a_misplaced_task() -> None:
    capture = capture_of("uneven-n7-cyclic")
    wrong = tuple(sorted(capture.nodes_by_rank))
    for step in steps_of(capture):
        with pytest.raises(LayoutError, match=f"contradicts rank {step.rank}: "):
            step.check_own_place(wrong)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gres-gpu2", ["0", "1", "-1", "0,1"]),  # all tasks of a node see both; the third is a ps
        ("gpu-two-jobs-second", ["2", "3"]),  # 0 and 1 are another job's
        ("gpus-total3", ["0", "1", "0"]),  # two on one node, one on the other
        ("gpus-per-task1", ["0", "1", "2", "0"]),  # divided by Slurm
        ("gpu-bind-map", ["3", "2", "1", "0"]),
        ("ntasks-per-gpu", ["0", "1", "0", "1"]),
        ("gpu-two-steps-worker", ["1,2,3"]),
        ("gpu-het-ps0-worker2", ["-1", "0,1", "0,1"]),
    ],
)
def test_gpus_are_those_of_slurm(name: str, expected: list[str]) -> None:
    is_ps = {"gres-gpu2": 2, "gpu-het-ps0-worker2": 0}
    seen = []
    for step in steps_of(capture_of(name)):
        sees_gpus = [rank != is_ps.get(name) for rank in step.node_ranks]
        environ = gpu_environ(step.visible_devices, step.gpus_on_node, step.local_rank, sees_gpus)
        assert set(step.visible_devices) <= set(environ)
        assert len({environ[variable] for variable in step.visible_devices}) <= 1
        seen.append(environ["CUDA_VISIBLE_DEVICES"])
    assert seen == expected
