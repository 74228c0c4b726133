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

from tests.browser import Browser
from tests.jobs import ROLES, Job
from tests.processes import wait_until
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import StatusFile
from tf4slurm.reports.live_page import serve_page
from tf4slurm.reports.report import make_body, make_page, make_report, read_template
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
        assert wait_until(lambda: bool(addresses), 10)
        yield addresses[0], ends
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def test_report_of_a_completed_job(browser: Browser, tmp_path: Path) -> None:
    url = write_page(RUNS / "digits", tmp_path / "good.html")
    words = browser.words(url)
    assert words.startswith("Completed digits")
    assert "worker/1: restarting for" in words
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


@pytest.mark.long
def test_values_under_the_pointer_are_shown(browser: Browser, tmp_path: Path) -> None:
    hand = """
    const chart = document.querySelector("svg.chart"), frame = chart.getBoundingClientRect();
    const where = { bubbles: true, clientX: frame.left + frame.width * 0.8, clientY: frame.top + 20 };
    chart.dispatchEvent(new PointerEvent("pointermove", where));
    """
    body = make_body(JobSummary(RunDirectory(RUNS / "digits")))
    page = tmp_path / "pointed.html"
    page.write_text(make_page("pointed", body, read_template("page.js") + hand))
    dom = browser.dom(page.as_uri())
    (reading,) = re.findall(r'<span class="reading">([^<]+)</span>', dom)
    assert re.fullmatch(r"at 4[0-9.]+ s: chief/0 [0-9.]+", reading)
    assert dom.count('class="cursor axis"') == 1


def test_text_of_a_job_is_never_run_as_script(browser: Browser, tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUNS / "broken", tmp_path / "run"))
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    for name in ("job.json", "result.json"):
        content = json.loads((run / name).read_text())
        content.update(name=evil, reason=evil, command=[evil], tail=[evil, "</pre>" + evil])
        (run / name).write_text(json.dumps(content))
    dom = browser.dom(write_page(run, tmp_path / "evil.html"))
    assert "<title>run: failed</title>" in dom
    assert "&lt;script&gt;" in dom
    planted = tmp_path / "planted.html"  # the page's policy forbids scripts even if markup got into it
    planted.write_text((tmp_path / "evil.html").read_text().replace("<main>", f"<main>{evil}", 1))
    dom = browser.dom(planted.as_uri())
    assert "<img src" in dom
    assert "<title>run: failed</title>" in dom


def test_live_page_updates_itself_and_ends_with_the_job(browser: Browser, job: Job, tmp_path: Path) -> None:
    script, end = tmp_path / "reports.py", tmp_path / "end"
    script.write_text(REPORTS)
    job.start(*ROLES, command=(sys.executable, str(script), str(end)))
    assert wait_until(lambda: any((job.directory / "runs").glob("*/status.json")), 20)
    run = RunDirectory(job.run_directory)
    assert wait_until(
        lambda: any(task.steps_per_second for task in (run.read(StatusFile) or StatusFile()).tasks[:1]), 40
    )

    def steps(dom: str) -> int:
        return int(re.findall(r"<dt>step</dt><dd>([\d,]+)</dd>", dom)[0].replace(",", ""))

    with served(run) as (address, ends):
        first = browser.dom(address, 40)  # the page updates at least every 30 s
        assert int(re.findall(r'data-updates="(\d+)"', first)[0]) >= 2
        assert "Training</p>" in first
        assert "Live: updated at" in first
        assert wait_until(lambda: steps(browser.dom(address)) > steps(first), 30)
        assert browser.colors(address)[TRAINING] > 100
        end.touch()
        assert job.wait() == 0
        words: list[str] = []  # the first request may get a page that was made before

        def is_completed() -> bool:
            words.append(browser.words(address))
            return "Completed" in words[-1]

        assert wait_until(is_completed, 30), words
        assert "The job has ended. This page is final." in words[-1]
        assert wait_until(lambda: ends == ["The job has ended."], 10)


def test_loss_that_is_nan_is_named(job: Job, tmp_path: Path) -> None:
    code, end = REPORTS.replace("1 / (step + 1)", "float('nan')"), tmp_path / "end"
    job.start("--ps", "0", "--workers", "0", command=(sys.executable, "-c", code, str(end)))
    assert wait_until(lambda: any("loss" in path.read_text() for path in tmp_path.rglob("samples.jsonl")), 30)
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
