"""The report as text: what it says of real jobs, and that nothing a job says can break or change it."""

from __future__ import annotations

import json
import random
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.report import write_large_run
from tests.png import count_colours
from tf4slurm.cli.main import cli
from tf4slurm.errors import MissingDependencyError, RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.job_summary import read_story
from tf4slurm.reports.picture import make_picture
from tf4slurm.reports.report import make_report

RUNS = Path(__file__).parents[1] / "data" / "runs"
HOSTILE = "</script></title></style><script>evil()</script><img src=x onerror=evil()>\"'&\x00\u202e\ud800"
FILES = ("job.json", "status.json", "result.json", "events.jsonl", "samples.jsonl")


class Page(HTMLParser):
    """What a browser would make of a page: its elements, attributes and words."""

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
    return Page(make_report(read_story(RunDirectory(path))))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a real job that failed."""
    return Path(shutil.copytree(RUNS / "broken", tmp_path / "broken"))


def test_a_good_job() -> None:
    words = page_of(RUNS / "digits").words
    for said in ("Completed", "digits", "python train.py --epochs 150", "55 s", "1 chief, 1 ps, 2 workers", "3,303"):
        assert said in words
    for said in ("training", "restarting", "Steps per second", "Reported: loss", "Memory of each task"):
        assert said in words
    assert "worker/1: restarting for" in words
    assert "worker/1 was restarted once." in words
    assert "failed" not in words.replace("failed or lost", "")


def test_a_failed_job_says_why_first() -> None:
    words = page_of(RUNS / "broken").words
    cause, timeline = words.index("Why it failed"), words.index("Timeline")
    block = words[cause:timeline]
    assert cause < timeline
    assert "chief/0 on laptop exited with code 1." in block
    assert "ValueError: images of shape (64, 8, 8, 1) expected" in block
    assert "The script raised an exception" in block
    assert "chief-0.1.log" in block


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = make_report(read_story(RunDirectory(RUNS / "digits")))
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & {*page.elements} - {"link"}
    assert not [value for name, value in page.attributes if name in ("src", "href", "xlink:href") and value != "data:,"]
    assert not re.search(r"url\(|@import|https?://", text)
    assert len(text) < 100_000


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_or_gone_costs_its_part_only(run: Path, name: str) -> None:
    whole = (run / name).read_bytes()
    for length in (len(whole) * 2 // 3, len(whole) // 3, 1, 0):
        (run / name).write_bytes(whole[:length])
        assert "chief/0" in page_of(run).words
    (run / name).unlink()
    assert "chief/0" in page_of(run).words


def test_what_is_not_known_is_said(run: Path) -> None:
    for name in FILES[2:4]:
        (run / name).unlink()
    words = page_of(run).words
    assert "There is no events.jsonl" in words
    assert "There is no result.json: the job still runs, or its launcher was killed; when it was last" in words
    empty = RunDirectory.create(run, "empty").path
    assert "it left no word" in page_of(empty).words


def test_the_last_lines_come_from_the_log_where_the_agent_could_not_tell_them(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "tail": [], "log": "/elsewhere/logs/chief-0.1.log"}))
    assert "ValueError: images" in page_of(run).words
    (run / "result.json").write_text(json.dumps({**result, "tail": [], "log": "/etc/passwd"}))
    assert "root:" not in page_of(run).words


def test_nothing_that_a_job_says_becomes_markup(run: Path) -> None:
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
    text = make_report(read_story(RunDirectory(run)))
    assert "\x00" not in text
    assert "\u202e" not in text
    text.encode()  # no half of a surrogate pair
    ElementTree.fromstring(make_picture(read_story(RunDirectory(run))))


def test_no_damage_to_a_run_directory_keeps_the_report_from_being_made(run: Path) -> None:
    chance = random.Random(5)
    values = ["null", "-1", "1e999", "[]", "{}", '"x"', "true", "9" * 400, "[[1]]", '{"a": []}', "NaN"]
    originals = {name: (run / name).read_text() for name in FILES}
    for _ in range(300):
        for name, text in originals.items():
            pieces = re.split(r'("(?:[^"\\]|\\.)*"|-?\d+\.?\d*|null|true|false)', text)
            for _ in range(chance.choice((0, 1, 3, 30))):
                pieces[chance.randrange(len(pieces))] = chance.choice(values)
            (run / name).write_text("".join(pieces))
        assert make_report(read_story(RunDirectory(run))).endswith("</html>\n")


def test_a_thousand_tasks_are_grouped_and_that_is_said(tmp_path: Path) -> None:
    run = write_large_run(tmp_path)
    text = make_report(read_story(run))
    words = Page(text).words
    assert "Of 1,000 tasks 20 have a row of their own" in words
    assert re.search(r"drawn together by role.*Marks of \d+ of them are not shown", words)
    assert "180 of 360 samples are not drawn" in words
    assert "ps/0 carried" in words
    assert len(text) < 1_000_000


def test_the_drawing_alone_is_an_svg_file() -> None:
    root = ElementTree.fromstring(make_picture(read_story(RunDirectory(RUNS / "digits"))))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Memory of each task" in "".join(root.itertext())
    assert "var(" not in ElementTree.tostring(root, encoding="unicode")


def test_a_png_has_the_bars_and_the_words(run: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["report", str(run), "-o", str(tmp_path / "life.png")], obj={}).exit_code == 0
    colours = count_colours(tmp_path / "life.png")
    assert colours[bytes.fromhex("56b4e9")] > 1_000, "no bar of a task that imports"
    assert colours[bytes.fromhex("1c2330")] > 500, "no ink, so no words"


def test_a_png_without_a_font_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf4slurm.reports.file._FONTS", ("No Such Font",))
    refused = CliRunner().invoke(cli, ["report", str(run), "-o", str(tmp_path / "life.png")], obj={})
    assert isinstance(refused.exception, MissingDependencyError)
    assert not (tmp_path / "life.png").exists()


def test_the_command_writes_and_prints_where(run: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["report", str(run)], obj={})
    assert (said.exit_code, said.stdout) == (0, f"{run / 'report.html'}\n")
    assert "Why it failed" in (run / "report.html").read_text()
    drawing = tmp_path / "life.svg"
    assert CliRunner().invoke(cli, ["report", str(run), "-o", str(drawing)], obj={}).exit_code == 0
    assert drawing.read_text().startswith("<svg ")
    refused = CliRunner().invoke(cli, ["report", str(run), "-o", "life.pdf"], obj={})
    assert isinstance(refused.exception, RunDirectoryError)
    assert "which is not made here" in str(refused.exception)
    assert CliRunner().invoke(cli, ["report", str(run), "-o", "-"], obj={}).stdout.startswith("<!DOCTYPE html>")
