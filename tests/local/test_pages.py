"""The report and the live page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.browser import Browser, Page
from tests.jobs import ROLES, Job
from tests.processes import wait_until
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import StatusFile
from tf4slurm.reports import live_page
from tf4slurm.reports.comparison import make_comparison
from tf4slurm.reports.live_page import serve_page
from tf4slurm.reports.report import make_report
from tf4slurm.reports.summary import JobSummary

RUNS = Path(__file__).parents[1] / "data" / "runs"
TRAINING, BAD, PAPER, DARK = (bytes.fromhex(color) for color in ("009e73", "b93a00", "ffffff", "12161d"))
DARK_TRAINING = bytes.fromhex("12a67c")
REPORTS = """
import os, sys, time, pathlib, tf4slurm
for step in range(10**6):
    if os.environ["TF4SLURM_TASK"] == "chief/0":
        tf4slurm.report(step=step, loss=1 / (step + 1))
    time.sleep(0.05)
    if pathlib.Path(sys.argv[1]).exists():
        break
"""


def write_page(run: Path, path: Path) -> str:
    path.write_text(make_report(JobSummary(RunDirectory(run))), encoding="utf-8", errors="replace")
    return path.as_uri()


@contextmanager
def served(run: RunDirectory) -> Iterator[tuple[str, list[str]]]:
    """Serve the live page of a run; yield its URL, and a list that receives why serving ended."""
    addresses: list[str] = []
    ends: list[str] = []
    stop = threading.Event()

    def serve() -> None:
        ends.append(serve_page(run, addresses.append, should_stop=stop.is_set))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert wait_until(lambda: bool(addresses), 60)
        yield addresses[0], ends
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def test_report_of_a_completed_job(browser: Browser, tmp_path: Path) -> None:
    url = write_page(RUNS / "digits", tmp_path / "good.html")
    words = browser.words(url)
    assert words.startswith("COMPLETED digits")
    colors = browser.colors(url)
    assert colors[PAPER] > 300_000
    assert colors[TRAINING] > 2_000
    dark = browser.colors(url, dark=True)
    assert dark[DARK] > 300_000
    assert dark[DARK_TRAINING] > 2_000
    assert len(colors) > 50


@pytest.mark.long
def test_report_of_a_failed_job(browser: Browser, tmp_path: Path) -> None:
    url = write_page(RUNS / "broken", tmp_path / "broken.html")
    words = browser.words(url)
    assert words.index("Why the job failed") < words.index("ValueError: images of shape") < words.index("Timeline")
    assert browser.colors(url)[BAD] > 500


RANGES = "[...charts.values()].map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max])"
TABLE_OVERFLOW = "(element) => element.scrollWidth - element.clientWidth"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def plot_box(page: Page, title: str) -> tuple[float, float, float, float]:
    """Return the left, top, width and height of a chart in the window, after scrolling to it."""
    plot = f"charts.get({json.dumps(title)}).plot"
    page.evaluate(f"{plot}.root.scrollIntoView({{block: 'center'}})")
    box = page.evaluate(f"(({{x, y, width, height}}) => [x, y, width, height])({plot}.over.getBoundingClientRect())")
    return box[0], box[1], box[2], box[3]


def legend(page: Page, title: str) -> str:
    rows = f"[...charts.get({json.dumps(title)}).plot.root.querySelectorAll('.u-series:not(.bound)')]"
    return str(
        page.evaluate(f"{rows}.map((row) => row.children[0].innerText + ': ' + row.children[1].innerText).join(' ')")
    )


def test_chart_zooms_by_dragging_with_all_charts_of_the_same_axis(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write_page(RUNS / "digits", tmp_path / "zoom.html")) as page:
        whole = page.evaluate(RANGES)
        assert page.evaluate("document.querySelectorAll('figure canvas').length") == len(whole) == 6
        left, top, width, height = plot_box(page, "Memory per task")
        middle = top + height / 2
        page.drag((left + width * 0.5, middle), (left + width * 0.75, middle))
        steps, *times = page.evaluate(RANGES)
        assert steps == whole[0]
        assert all(27 < low < 28 and 41 < high < 42 for low, high in times)
        page.double_click(left + width * 0.6, middle)
        assert page.evaluate(RANGES) == whole
        assert page.errors == []


def test_values_at_the_pointer_are_in_legend_and_tooltip(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write_page(RUNS / "digits", tmp_path / "pointed.html")) as page:
        assert legend(page, "Memory per task").startswith("time: last chief/0: 668 MB ps/0: 646 MB")
        left, top, width, height = plot_box(page, "Memory per task")
        page.mouse("Moved", left + width * 0.1, top + height / 2)
        assert re.fullmatch(r"time: [456][.\d]* s chief/0: 22.1 MB ps/0: 20.1 MB .*", legend(page, "Memory per task"))
        tooltip = page.evaluate("document.querySelector('.tooltip:not([hidden])').textContent")
        assert re.fullmatch(r"time: [456][.\d]* s\nchief/0: 22.1 MB\nps/0: 20.1 MB\n.*\n.*", tooltip)
        assert re.match(r"time: [456][.\d]* s", legend(page, "Processor cores used per task"))  # the cursor is common
        assert page.errors == []


def test_comparison_draws_both_jobs(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "compared.html"
    path.write_text(make_comparison(*(JobSummary(RunDirectory(RUNS / name)) for name in ("digits", "broken"))))
    with browser.open(path.as_uri(), 400) as page:
        assert legend(page, "loss") == "step: last digits: chief/0: 4.58e-05 broken: chief/0: 0.00348"
        assert page.evaluate(OVERFLOW) == 0
        assert page.errors == []


def test_printed_charts_have_light_colors(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write_page(RUNS / "digits", tmp_path / "printed.html"), 1800) as page:
        page.prefer_dark()
        width = "document.querySelector('canvas').clientWidth"
        screen = page.evaluate(width)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("color('paper') + color('worker')") == "#ffffff#009e73"
        assert page.evaluate(width) <= 660
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("color('paper') + color('worker')") == "#12161d#2fc296"
        assert page.evaluate(width) == screen


@pytest.mark.parametrize("name", ["digits", "broken"])
def test_page_on_a_phone_is_not_wider_than_the_screen(browser: Browser, tmp_path: Path, name: str) -> None:
    with browser.open(write_page(RUNS / name, tmp_path / "phone.html")) as page:
        wide = page.evaluate("document.querySelector('canvas').clientWidth")
        page.resize(400)
        assert wait_until(lambda: page.evaluate("document.querySelector('canvas').clientWidth") < wide, 60)
        assert page.evaluate(OVERFLOW) == 0
        clipped = (
            "[...document.querySelectorAll('.u-legend, .u-value')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
        )
        assert page.evaluate(f"{clipped}.length") == 0
    with browser.open((tmp_path / "phone.html").as_uri(), 400) as page:
        assert page.evaluate(OVERFLOW) == 0
        assert page.evaluate(f"Math.max(...[...document.querySelectorAll('.wide')].map({TABLE_OVERFLOW}))") < 20
        assert page.errors == []


def test_text_of_a_job_is_never_run_as_script(browser: Browser, tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUNS / "broken", tmp_path / "run"))
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    for name in ("job.json", "result.json"):
        content = json.loads((run / name).read_text())
        content.update(name=evil, reason=evil, command=[evil], tail=[evil, "</pre>" + evil])
        (run / name).write_text(json.dumps(content))
    dom = browser.dom(write_page(run, tmp_path / "evil.html"))
    assert "<title>run: FAILED</title>" in dom
    assert "&lt;script&gt;" in dom
    planted = tmp_path / "planted.html"  # the page's policy forbids scripts even if markup got into it
    planted.write_text((tmp_path / "evil.html").read_text().replace("<main>", f"<main>{evil}", 1))
    dom = browser.dom(planted.as_uri())
    assert "<img src" in dom
    assert "<title>run: FAILED</title>" in dom


def assert_zoom_survives_updates(browser: Browser, address: str) -> None:
    updates, title = "Number(document.documentElement.dataset.updates || 0)", "Memory per task"
    plot = f"charts.get({json.dumps(title)}).plot"
    with browser.open(address) as page:
        left, top, width, height = plot_box(page, title)
        page.drag((left + width * 0.2, top + height / 2), (left + width * 0.6, top + height / 2))
        page.evaluate(f"window.before = {plot}")
        zoomed = page.evaluate(f"[{plot}.scales.x.min, {plot}.scales.x.max]")
        last, count = page.evaluate(f"{plot}.data[0].at(-1)"), page.evaluate(updates)
        assert zoomed[1] < last
        assert wait_until(lambda: page.evaluate(updates) >= count + 2, 60)
        assert page.evaluate(f"[{plot}.scales.x.min, {plot}.scales.x.max]") == zoomed
        assert page.evaluate(f"{plot}.data[0].at(-1)") > last
        assert page.evaluate(f"{plot} === window.before && before.root.isConnected"), "drawn again: it would flicker"
        assert page.errors == []


def test_live_page_updates_itself_and_ends_with_the_job(
    browser: Browser, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "_LAST_REQUEST_SECONDS", 120)  # for a browser that a busy machine delays
    script, end = tmp_path / "reports.py", tmp_path / "end"
    script.write_text(REPORTS)
    job.start(*ROLES, command=(sys.executable, str(script), str(end)))
    assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 60)
    run = RunDirectory(job.run_directory)
    assert wait_until(
        lambda: any(task.steps_per_second for task in (run.read(StatusFile) or StatusFile()).tasks[:1]), 60
    )

    def steps(dom: str) -> int:
        return int(re.findall(r"<dt>step</dt><dd>([\d,]+)</dd>", dom)[0].replace(",", ""))

    with served(run) as (address, ends):
        first = browser.dom(address, 40)  # the page updates at least every 30 s
        assert int(re.findall(r'data-updates="(\d+)"', first)[0]) >= 2
        assert "Training</p>" in first
        assert "Live: updated at" in first
        assert wait_until(lambda: steps(browser.dom(address)) > steps(first), 60)
        assert browser.colors(address)[TRAINING] > 100
        assert_zoom_survives_updates(browser, address)
        with browser.open(address) as page:
            end.touch()
            assert job.wait() == 0
            words = "document.body.innerText"
            assert wait_until(lambda: "COMPLETED" in page.evaluate(words), 60), page.evaluate(words)
            assert "The job has ended. This page is final." in page.evaluate(words)
        assert wait_until(lambda: ends == ["The job has ended."], 60)


def test_loss_that_is_nan_is_named(job: Job, tmp_path: Path) -> None:
    code, end = REPORTS.replace("1 / (step + 1)", "float('nan')"), tmp_path / "end"
    job.start("--ps", "0", "--workers", "0", command=(sys.executable, "-c", code, str(end)))
    assert wait_until(lambda: any("loss" in path.read_text() for path in tmp_path.rglob("chief-0.1.jsonl")), 60)
    end.touch()
    assert job.wait() == 0
    assert "loss of chief/0 was NaN or infinite, first after" in make_report(
        JobSummary(RunDirectory(job.run_directory))
    )


def test_launcher_writes_the_report_at_the_end(job: Job) -> None:
    job.start(*ROLES)
    job.wait_for_child("worker-1")
    job.wait_for_child("ps-0")
    job.end_child("ps-0", 3)
    assert job.wait() == 3
    path = job.run_directory / "report.html"
    assert f"report: {path}\n" in job.stderr
    assert "ps/0 on " in path.read_text().partition("Why the job failed")[2]
    assert path.stat().st_mode & 0o077 == 0
