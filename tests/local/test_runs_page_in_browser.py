"""The page of many runs in a real browser: sorting by mouse and keyboard, runs named in plots, narrow screens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.browser import Browser, Page
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.runs import Run, read_run
from tf4slurm.reports.runs_page import make_runs_page

RUNS = Path(__file__).parents[1] / "data" / "runs"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
NAMES = "[...document.querySelectorAll('.runs tbody tr')].map((row) => row.cells[0].innerText)"
SORTED = "[...document.querySelectorAll('.runs th')].map((each) => each.getAttribute('aria-sort'))"
NAMED = "[...document.querySelectorAll('.named')].map((each) => each.textContent)"
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def make_runs(losses: Sequence[float | None]) -> list[Run]:
    runs = []
    for number, loss in enumerate(losses):
        labels = {"lr": f"1e-{number % 4}", "optimizer": ("sgd", "adam")[number % 2]}
        values = {} if loss is None else {"loss": loss}
        curves = {} if loss is None or math.isnan(loss) else {"loss": [(0.0, 1 + loss), (100.0, loss)]}
        best = {metric: value for metric, value in values.items() if not math.isnan(value)}
        runs.append(Run(f"run-{number}", labels, "COMPLETED", 0, "", 9.0, 100, values, best, curves))
    return runs


def write_page(tmp_path: Path, runs: Sequence[Run], title: str = "sweep") -> str:
    path = tmp_path / "runs.html"
    path.write_text(make_runs_page(title, runs, tmp_path), encoding="utf-8")
    return path.as_uri()


def middle_of(page: Page, element: str) -> tuple[float, float]:
    """Scroll to an element and return its middle in the window. `element` is a JavaScript expression."""
    page.evaluate(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
    box = f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
    x, y = page.evaluate(box)
    return x, y


def button(title: str) -> str:
    """Return a JavaScript expression for the button in the title of a column."""
    buttons = "[...document.querySelectorAll('.runs th button')]"
    return f"{buttons}.find((each) => each.innerText.startsWith({json.dumps(title)}))"


def click(page: Page, element: str) -> None:
    x, y = middle_of(page, element)
    page.mouse("Moved", x, y)
    page.mouse("Pressed", x, y)
    page.mouse("Released", x, y)


def press(page: Page, key: str, text: str = "") -> None:
    code = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Escape": 27}[key]
    page.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
    page.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


def test_table_is_sorted_by_click_with_numbers_as_numbers_and_missing_values_last(
    browser: Browser, tmp_path: Path
) -> None:
    with browser.open(write_page(tmp_path, make_runs([10.0, None, 9.0, math.nan, 1e-5, 2.0]))) as page:
        assert page.evaluate(NAMES) == [f"run-{n}" for n in range(6)]
        click(page, button("loss, last"))
        assert page.evaluate(NAMES) == ["run-4", "run-5", "run-2", "run-0", "run-1", "run-3"]
        assert page.evaluate(SORTED) == ["none"] * 5 + ["ascending"] + ["none"] * 2
        click(page, button("loss, last"))
        assert page.evaluate(NAMES) == ["run-0", "run-2", "run-5", "run-4", "run-1", "run-3"]
        assert page.evaluate(SORTED)[5] == "descending"
        click(page, button("lr"))
        assert page.evaluate(NAMES) == ["run-3", "run-2", "run-1", "run-5", "run-0", "run-4"]
        assert page.evaluate(SORTED) == ["none", "ascending"] + ["none"] * 6
        assert page.errors == []


def test_table_is_sorted_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write_page(tmp_path, make_runs([3.0, 1.0, 2.0]))) as page:
        page.evaluate(f"{button('loss, best')}.focus()")
        press(page, "Enter", "\r")
        assert page.evaluate(NAMES) == ["run-1", "run-2", "run-0"]
        press(page, "Enter", "\r")
        assert page.evaluate(NAMES) == ["run-0", "run-2", "run-1"]
        assert page.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "descending"
        assert page.evaluate("document.activeElement.closest('th').scope") == "col"


def test_names_with_numbers_are_sorted_by_the_numbers(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write_page(tmp_path, make_runs([1.0] * 12))) as page:
        click(page, button("run"))
        assert page.evaluate(NAMES) == [f"run-{n}" for n in range(12)]


def test_run_at_the_pointer_and_of_the_arrow_keys_is_named(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write_page(tmp_path, make_runs([1.0 + n for n in range(30)]))) as page:
        area = "document.querySelector('.area')"
        page.evaluate(f"{area}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = page.evaluate(
            f"(({{x, y, width, height}}) => [x, y, width, height])({area}.querySelector('svg').getBoundingClientRect())"
        )
        page.mouse("Moved", left + width - 1, top + 0.037 * height)  # the end of the curve of run 29 is near the top
        named = page.evaluate(NAMED)
        assert named[0] == "run-29: lr 1e-1, optimizer adam; last 30, best 30"
        assert named[1] == "run-29: lr 1e-1, optimizer adam; best loss 30"
        assert page.evaluate("document.querySelector('.runs tr.on').cells[0].innerText") == "run-29"
        page.mouse("Moved", 1, 1)
        assert {*page.evaluate(NAMED)} == {""}
        page.evaluate(f"{area}.focus()")
        for key, name in (("ArrowDown", "run-0"), ("ArrowDown", "run-1"), ("ArrowUp", "run-0"), ("ArrowUp", "run-29")):
            press(page, key)
            assert page.evaluate(NAMED)[0].startswith(f"{name}: ")
        press(page, "Escape")
        assert {*page.evaluate(NAMED)} == {""}
        page.mouse("Moved", *middle_of(page, "document.querySelector('.runs tbody tr:nth-child(5) td')"))
        assert all(text.startswith("run-4: ") for text in page.evaluate(NAMED))
        assert page.errors == []


@pytest.mark.parametrize("count", [6, 40])
def test_page_on_a_phone_is_not_wider_than_the_screen(browser: Browser, tmp_path: Path, count: int) -> None:
    with browser.open(write_page(tmp_path, make_runs([1e6 * (1 + n) for n in range(count)])), 400) as page:
        assert page.evaluate(OVERFLOW) == 0
        table = "document.querySelector('.runs').parentElement"
        assert page.evaluate(f"{table}.scrollWidth - {table}.clientWidth") > 0
        assert page.evaluate(f"getComputedStyle({table}).overflowX") == "auto"
        assert page.evaluate(f"{table}.tabIndex") == 0  # so that it can be scrolled by keyboard
        ends = "[...document.querySelectorAll('.xs span')].map((each) => each.getBoundingClientRect().right)"
        assert page.evaluate(f"Math.max(...{ends})") <= 400


def test_page_of_two_jobs_draws_their_comparison(browser: Browser, tmp_path: Path) -> None:
    runs = [read_run(RunDirectory(RUNS / name), name, {}, "FAILED", 1, "") for name in ("digits", "broken")]
    with browser.open(write_page(tmp_path, runs), 400) as page:
        drawn = page.evaluate("[...charts.values()].map((chart) => chart.plot.root.querySelectorAll('canvas').length)")
        assert drawn == [1] * 6
        assert page.evaluate(OVERFLOW) == 0
        click(page, button("duration"))
        assert page.evaluate(NAMES) == ["broken", "digits"]
        assert page.errors == []


def test_hostile_texts_neither_run_nor_widen_the_page(browser: Browser, tmp_path: Path) -> None:
    runs = [
        Run(EVIL + "x" * 500, {EVIL: EVIL, "w" * 300: str(n)}, EVIL, 1, EVIL, 1.0, 1, {EVIL: 1.0}, {EVIL: 1.0 + n})
        for n in range(4)
    ]
    with browser.open(write_page(tmp_path, runs, EVIL), 400) as page:
        assert page.evaluate("document.title") == EVIL
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate(OVERFLOW) == 0
        page.evaluate("document.querySelector('.area').focus()")
        press(page, "ArrowDown")
        assert page.evaluate(NAMED)[0].startswith(EVIL)
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate(OVERFLOW) == 0
        assert page.errors == []


def test_curves_have_other_colors_in_dark_mode_and_on_paper(browser: Browser, tmp_path: Path) -> None:
    stroke = "getComputedStyle(document.querySelector('.box path')).stroke"
    with browser.open(write_page(tmp_path, make_runs([1.0, 2.0]))) as page:
        assert page.evaluate(stroke) == "rgb(0, 114, 178)"
        page.prefer_dark()
        assert page.evaluate(stroke) == "rgb(74, 168, 224)"
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page.call("Emulation.setEmulatedMedia", media="print", features=[dark])
        assert page.evaluate(stroke) == "rgb(0, 114, 178)"
