"""The fault matrix on four hosts of a real Slurm, with real TensorFlow: no case hangs, each ends as it has to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cases import CASES, Case
from tests.faults.trial import run_trial
from tests.slurm.lab import SlurmLab

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(", ", "-").replace(" ", "-"))
def test_a_fault(case: Case, lab: SlurmLab, tmp_path: Path, process_mark: str) -> None:
    measured = run_trial(case, lab, tmp_path, process_mark)
    assert measured
    print(case.name, measured)
    late = [each for each in measured if not each.is_kept]
    assert not late, measured
