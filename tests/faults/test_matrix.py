"""The fault matrix on four hosts of a real Slurm, with real TensorFlow: no case hangs, each has its outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import CASES, Case
from tests.faults.trial import run_trial
from tests.slurm.lab import SlurmLab

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


_BUSY_SECONDS = 5.0
"""Added to the bounds of quick cases, which run beside other tests; the others run alone (`make test-faults`)."""


def _parameter(case: Case) -> Any:
    marks = [] if case.is_quick else [pytest.mark.long]
    return pytest.param(case, id=case.name.replace(", ", "-").replace(" ", "-"), marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [_parameter(case) for case in CASES])
def test_fault_has_its_expected_outcome_within_its_bounds(
    case: Case, lab: SlurmLab, tmp_path: Path, process_mark: str
) -> None:
    """A late case is measured once more, since the machine may be busy; any other error fails at once."""
    added = _BUSY_SECONDS if case.is_quick else 0.0
    for number in (1, 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        measured = run_trial(case, lab, directory, process_mark)
        assert measured
        print(case.name, measured)
        if all(each.seconds < each.bound + added for each in measured):
            return
    pytest.fail(f"late twice: {measured}", pytrace=False)
