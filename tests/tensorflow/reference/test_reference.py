"""`fit`, `evaluate` and `predict` on clusters give what Keras gives in one process, or what a case says instead.

A mode trains all selected cases in one process (workers in step: in one each), once in a session of pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM
from tests.tensorflow.reference.case import Refused
from tests.tensorflow.reference.cases import CASES, GROUPS
from tests.tensorflow.reference.comparison import check
from tests.tensorflow.reference.table import PAGE, make_table, place_table

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

MODES = ("ps", "in_step", "asynchronous")
_SECONDS = 60, 40  # to start, and for a case, on a slow machine beside other tests
_LAUNCHERS: Mapping[str, Sequence[str]] = {
    "in_step": (TF4SLURM, "run", "--ps", "0", "--no-chief", "--workers", "2", "--")
}
_ROOT = Path(__file__).parents[3]


def limit_seconds(count: int) -> int:
    return _SECONDS[0] + count * _SECONDS[1]


@pytest.fixture(scope="module")
def results_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Return a function that trains the selected cases in a mode, once, and returns the results by task and case."""
    items = [each for each in request.session.items if each.path == Path(__file__)]
    selected = {each.callspec.params["name"] for each in items if hasattr(each, "callspec")}
    names = [name for name in CASES if name in selected]
    known: dict[str, dict[str, Any]] = {}

    def get(mode: str) -> dict[str, Any]:
        if mode not in known:
            known[mode] = train(mode, names, tmp_path_factory.mktemp(mode))
        return known[mode]

    return get


def train(mode: str, names: Sequence[str], directory: Path) -> dict[str, Any]:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(_ROOT)}
    environ.pop("TF_USE_LEGACY_KERAS", None)
    program = (sys.executable, "-m", "tests.tensorflow.reference.run", mode, str(directory / "results"), *names)
    with (directory / "output").open("wb") as output:
        subprocess.run(
            (*_LAUNCHERS.get(mode, ()), *program), cwd=directory, env=environ, stdout=output,
            stderr=subprocess.STDOUT, timeout=limit_seconds(len(names)), check=False,
        )  # fmt: skip
    lost = {"error": f"no result: {(directory / 'output').read_text(errors='replace')[-2000:]}"}
    found: dict[str, Any] = {}
    for task in (directory / "results").iterdir():
        paths = {name: task / f"{index}.json" for index, name in enumerate(CASES)}
        found[task.name] = {
            name: json.loads(paths[name].read_text()) if paths[name].exists() else lost for name in names
        }
    assert found, lost["error"]
    return found


@pytest.mark.timeout(4 * limit_seconds(len(CASES)))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if each.is_quick else pytest.mark.long) for name, each in CASES.items()]
)
def test_case(results_of: Callable[[str], dict[str, Any]], name: str, mode: str) -> None:
    case = CASES[name]
    (alone,) = results_of("alone").values()
    by_task = results_of(mode)
    assert len(by_task) == (2 if mode == "in_step" else 1)
    for index, (task, found) in enumerate(sorted(by_task.items())):
        wrong = check(case, getattr(case, mode), alone[name], found[name], is_first=index == 0)
        assert not wrong, "\n".join([f"{name} in the mode {mode}, {task}:", *wrong[:10]])


def test_each_group_has_cases_that_run_always_and_each_difference_has_words() -> None:
    assert len(CASES) >= 60
    assert sum(len(cases) for cases in GROUPS.values()) == len(CASES)
    for cases in GROUPS.values():
        assert any(each.is_quick for each in cases)
    for case in CASES.values():
        for mode in MODES:
            expected = getattr(case, mode)
            assert expected.words
            assert not isinstance(expected, Refused) or expected.error


def test_the_guide_has_the_table_of_these_cases() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == place_table(text, make_table()), "Run python -m tests.tensorflow.reference.table"
