"""The table of the cases in docs/guides/keras.md. `python -m tests.tensorflow.reference.table` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.tensorflow.reference.case import Case
from tests.tensorflow.reference.cases import GROUPS

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "keras.md"
_BEGIN, _END = "<!-- table of tests/tensorflow/reference -->\n", "<!-- end of the table -->\n"
_HEAD = ("", "one worker with ps", "two workers in step", "several workers with ps")


def make_table() -> str:
    """Return a row for each group and way in which its cases differ, with the names of the cases."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for group, cases in GROUPS.items():
        for case in cases:
            rows.setdefault((group, *_words(case)), []).append(case.name)
    lines = [_HEAD, ("---",) * len(_HEAD)]
    lines += [(f"**{group}**: {', '.join(names)}", *words) for (group, *words), names in rows.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def place_table(page: str, table: str) -> str:
    """Return the page with this table between the comments."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"


def _words(case: Case) -> tuple[str, str, str]:
    return case.ps.words, case.in_step.words, case.asynchronous.words


if __name__ == "__main__":
    PAGE.write_text(place_table(PAGE.read_text(encoding="utf-8"), make_table()), encoding="utf-8")
