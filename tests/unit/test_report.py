"""The report of real jobs, and that no content of a run directory can break it or add markup."""

from __future__ import annotations

import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks.report import write_large_run
from tests.png import count_colors
from tf4slurm.cli.main import cli
from tf4slurm.errors import MissingDependencyError, RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.report import make_picture, make_report
from tf4slurm.reports.summary import JobSummary

RUNS = Path(__file__).parents[1] / "data" / "runs"
HOSTILE = "</script></title></style><script>evil()</script><img src=x onerror=evil()>\"'&\x00\u202e\ud800"
FILES = ("job.json", "status.json", "result.json", "events.jsonl", "samples.jsonl")


class Page(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data


def page_of(path: Path) -> Page:
    return Page(make_report(JobSummary(RunDirectory(path))))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a real job that failed."""
    return Path(shutil.copytree(RUNS / "broken", tmp_path / "broken"))


def test_report_of_a_completed_job() -> None:
    words = page_of(RUNS / "digits").words
    for expected in ("Completed", "digits", "python train.py --epochs 150", "55 s", "1 chief, 1 ps, 2 workers"):
        assert expected in words
    for expected in ("3,303", "training", "restarting", "Steps per second", "Reported metric: loss", "Memory per task"):
        assert expected in words
    assert "worker/1: restarting for" in words
    assert "worker/1 was restarted once." in words
    assert "failed" not in words.replace("failed or lost", "")


def test_report_of_a_failed_job_shows_the_reason_first() -> None:
    words = page_of(RUNS / "broken").words
    cause, timeline = words.index("Why the job failed"), words.index("Timeline")
    block = words[cause:timeline]
    assert cause < timeline
    assert "chief/0 on laptop exited with code 1." in block
    assert "ValueError: images of shape (64, 8, 8, 1) expected" in block
    assert "The script raised an exception" in block
    assert "chief-0.1.log" in block


def test_page_loads_nothing() -> None:
    text = make_report(JobSummary(RunDirectory(RUNS / "digits")))
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & {*page.elements} - {"link"}
    assert not [value for name, value in page.attributes if name in ("src", "href", "xlink:href") and value != "data:,"]
    assert not re.search(r"url\(|@import|https?://", text)
    assert len(text) < 100_000


@pytest.mark.parametrize("name", FILES)
def test_cut_or_missing_file_affects_only_its_part(run: Path, name: str) -> None:
    whole = (run / name).read_bytes()
    for length in (len(whole) * 2 // 3, len(whole) // 3, 1, 0):
        (run / name).write_bytes(whole[:length])
        assert "chief/0" in page_of(run).words
    (run / name).unlink()
    assert "chief/0" in page_of(run).words


def test_missing_files_are_named(run: Path) -> None:
    for name in FILES[2:4]:
        (run / name).unlink()
    words = page_of(run).words
    assert "events.jsonl is missing" in words
    assert "result.json is missing: the job still runs, or its launcher was killed. The last recorded" in words
    empty = RunDirectory.create(run, "empty").path
    assert "No phase was recorded." in page_of(empty).words


def test_last_lines_come_from_the_log_without_a_tail(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "tail": [], "log": "/elsewhere/logs/chief-0.1.log"}))
    assert "ValueError: images" in page_of(run).words
    (run / "result.json").write_text(json.dumps({**result, "tail": [], "log": "/etc/passwd"}))
    assert "root:" not in page_of(run).words


def test_no_text_of_a_job_becomes_markup(run: Path) -> None:
    usual = page_of(run)
    for name in ("job.json", "result.json", "status.json"):
        content = json.loads((run / name).read_text())
        content.update(name=HOSTILE, command=["python", HOSTILE], reason=HOSTILE, phase=HOSTILE, job_id=HOSTILE)
        content.update(cause=HOSTILE, tail=[HOSTILE], log=HOSTILE, collateral=[HOSTILE], started=HOSTILE)
        for task in content.get("tasks", ()):
            task.update(node=HOSTILE, task=task["task"] + HOSTILE)
        (run / name).write_text(json.dumps(content))
    for name in ("events.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        for line in lines:
            line["text"] = HOSTILE
            if line.get("task"):
                line["task"] += HOSTILE
            line["metrics"] = {"0": {HOSTILE: 1.0}}
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run)
    assert page.words.count("<script>evil()</script>") >= 5
    assert {*page.elements} <= {*usual.elements, "ul", "li"}
    assert page.elements.count("script") == usual.elements.count("script") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    text = make_report(JobSummary(RunDirectory(run)))
    assert "\x00" not in text
    assert "\u202e" not in text
    text.encode()  # no half of a surrogate pair
    ElementTree.fromstring(make_picture(JobSummary(RunDirectory(run))))


def test_damaged_run_directory_has_a_report(run: Path) -> None:
    chance = random.Random(5)
    values = ["null", "-1", "1e999", "[]", "{}", '"x"', "true", "9" * 400, "[[1]]", '{"a": []}', "NaN"]
    originals = {name: (run / name).read_text() for name in FILES}
    for _ in range(300):
        for name, text in originals.items():
            pieces = re.split(r'("(?:[^"\\]|\\.)*"|-?\d+\.?\d*|null|true|false)', text)
            for _ in range(chance.choice((0, 1, 3, 30))):
                pieces[chance.randrange(len(pieces))] = chance.choice(values)
            (run / name).write_text("".join(pieces))
        assert make_report(JobSummary(RunDirectory(run))).endswith("</html>\n")


def test_thousand_tasks_are_grouped(tmp_path: Path) -> None:
    run = write_large_run(tmp_path)
    text = make_report(JobSummary(run))
    words = Page(text).words
    assert "20 of 1,000 tasks, those with the most events, have a row of their own" in words
    assert re.search(r"grouped by role.*Events of \d+ grouped tasks are only in events.jsonl", words)
    assert "180 of 360 samples are drawn" in words
    assert "ps/0 transferred" in words
    assert len(text) < 1_000_000


def test_picture_is_an_svg_file() -> None:
    root = ElementTree.fromstring(make_picture(JobSummary(RunDirectory(RUNS / "digits"))))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Memory per task" in "".join(root.itertext())
    assert "var(" not in ElementTree.tostring(root, encoding="unicode")


def test_png_has_bars_and_text(run: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["report", str(run), "-o", str(tmp_path / "report.png")], obj={}).exit_code == 0
    colors = count_colors(tmp_path / "report.png")
    assert colors[bytes.fromhex("56b4e9")] > 1_000, "no bar of the state importing"
    assert colors[bytes.fromhex("1c2330")] > 500, "no text"


def test_png_without_a_font_is_an_error(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.reports.report._FONTS", ("No Such Font",))
    refused = CliRunner().invoke(cli, ["report", str(run), "-o", str(tmp_path / "report.png")], obj={})
    assert isinstance(refused.exception, MissingDependencyError)
    assert not (tmp_path / "report.png").exists()


def test_command_writes_the_file_and_prints_its_path(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["report", str(run)], obj={})
    assert (result.exit_code, result.stdout) == (0, f"{run / 'report.html'}\n")
    assert "Why the job failed" in (run / "report.html").read_text()
    drawing = tmp_path / "report.svg"
    assert CliRunner().invoke(cli, ["report", str(run), "-o", str(drawing)], obj={}).exit_code == 0
    assert drawing.read_text().startswith("<svg ")
    refused = CliRunner().invoke(cli, ["report", str(run), "-o", "report.pdf"], obj={})
    assert isinstance(refused.exception, RunDirectoryError)
    assert "is no format of a report" in str(refused.exception)
    assert CliRunner().invoke(cli, ["report", str(run), "-o", "-"], obj={}).stdout.startswith("<!DOCTYPE html>")
