"""`python -m benchmarks faults [WORD…]`: the fault matrix as a table; cases and trials are those of tests/faults."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from tests.faults.cases import CASES, Case
from tests.faults.trial import Measured, run_trial
from tests.processes import MARK_VARIABLE, kill_leftovers
from tests.slurm.lab import SlurmLab

_RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Row:
    """Result of one case: the measured times, or its failure."""

    case: Case
    measured: Sequence[Measured]
    failure: str = ""

    @property
    def is_kept(self) -> bool:
        return not self.failure and all(each.is_kept for each in self.measured)

    def to_markdown(self) -> str:
        """Return one line of the table for each measured time."""
        came = self.case.outcome.value
        if self.case.exit_code:
            came += f", exit code {self.case.exit_code}"
        cells = [
            (each.what, f"{each.bound:g}", f"{each.seconds:.2f}{'' if each.is_kept else ' **late**'}")
            for each in self.measured
        ]
        if self.failure:
            cells.append(("**failed**", "", self.failure.splitlines()[0]))
        return "\n".join(f"| {self.case.name} | {came} | {' | '.join(cell)} |" for cell in cells)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "outcome": self.case.outcome.value,
            "exit_code": self.case.exit_code,
            "measured": [asdict(each) for each in self.measured],
            "failure": self.failure,
        }


def measure_faults(words: Sequence[str]) -> int:
    """Run the cases that have one of these words in their name (without words, all), print and store them.

    Replaces their rows in the table in results/; the rows of other cases stay. Returns the number of cases that failed
    or were late.
    """
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    rows = []
    with SlurmLab() as lab:
        for case in cases:
            rows.append(_run(case, lab))
            print(rows[-1].to_markdown(), flush=True)
            _keep(rows)
    missed = sum(not row.is_kept for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} cases as they have to be.")
    return missed


def _keep(fresh: Sequence[Row]) -> None:
    rows = {row.case.name: row for row in (*_kept_rows(), *fresh)}
    kept = [rows[case.name] for case in CASES if case.name in rows]
    heading = "| case | what comes of it | measured | bound (s) | seconds |\n|---|---|---|---:|---:|\n"
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = "\n".join(row.to_markdown() for row in kept)
    text = f"# The fault matrix\n\n`python -m benchmarks faults`, on: {facts}.\n\n{heading}{table}\n"
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / "faults.md").write_text(text)
    content = {"machine": machine(), "cases": [row.to_json() for row in kept]}
    (_RESULTS / "faults.json").write_text(json.dumps(content, indent=2) + "\n")


def _kept_rows() -> list[Row]:
    """Return the rows of earlier runs for cases that still exist."""
    path = _RESULTS / "faults.json"
    cases = {case.name: case for case in CASES}
    content = json.loads(path.read_text()) if path.exists() else {"cases": []}
    return [
        Row(cases[row["case"]], [Measured(**each) for each in row["measured"]], row["failure"])
        for row in content["cases"]
        if row["case"] in cases
    ]


def _run(case: Case, lab: SlurmLab) -> Row:
    mark = os.environ[MARK_VARIABLE] = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        try:
            lab.wait_idle()
            row = Row(case, run_trial(case, lab, Path(directory), mark))
        except Exception as error:
            row = Row(case, (), str(error) or type(error).__name__)
        leftovers = kill_leftovers(mark, timeout_seconds=3)
    return Row(case, row.measured, f"left behind: {leftovers}") if leftovers else row
