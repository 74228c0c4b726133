"""The report of real jobs, and that no content of a run directory can break it or add markup."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import sys
import time
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
from tf4slurm.reports.comparison import make_comparison
from tf4slurm.reports.picture import make_picture
from tf4slurm.reports.report import make_report, read_template
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
    for expected in ("COMPLETED", "digits", "python train.py --epochs 150", "55 s", "1 chief, 1 ps, 2 workers"):
        assert expected in words
    for expected in ("3,303", "training", "restarting", "Steps per second", "loss", "Memory per task"):
        assert expected in words
    assert "last 4.58e-05, best 4.58e-05 at step 3,303" in words
    titles = [value for name, value in page_of(RUNS / "digits").attributes if name == "title"]
    assert any(title.startswith("worker/1: restarting for") for title in titles)
    assert "A task was restarted: worker/1 on laptop restart 1 in place." in words
    assert "restarted in place" in words
    assert "connection lost" not in words  # the legend has only marks that occur


def test_report_of_a_failed_job_shows_the_reason_first() -> None:
    words = page_of(RUNS / "broken").words
    cause, timeline = words.index("Why the job failed"), words.index("Timeline")
    block = words[cause:timeline]
    assert cause < timeline
    assert "chief/0 on laptop exited with code 1." in block
    headline = "ValueError: images of shape (64, 8, 8, 1) expected, got (64, 28, 28, 1) (train_broken.py:193, chief/0)"
    assert block.startswith(f"Why the job failed\n{headline}\n")
    assert "chief-0.1.log" in block


def test_chart_of_steps_per_second_has_the_rates_between_reports() -> None:
    charts = [json.loads(value) for name, value in page_of(RUNS / "broken").attributes if name == "data-chart"]
    (chart,) = [chart for chart in charts if chart["title"] == "Steps per second"]
    (table,) = chart["tables"]
    # step 66 at 22.37 s, 286 at 24.37 s, 462 at 26.37 s, 572 at 27.97 s; the first two may have tracing between them
    assert table["xs"] == pytest.approx([26.37, 27.97], abs=0.001)
    assert [(line["name"], line["ys"]) for line in table["lines"]] == [("chief/0", [88, 68.75])]


def test_metric_with_one_value_is_a_line_of_text_and_has_no_chart(run: Path) -> None:
    (path,) = (run / "metrics").glob("chief-0.*.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1].replace('"loss"', '"final_accuracy"')]) + "\n")
    page = page_of(run)
    titles = [json.loads(value)["title"] for name, value in page.attributes if name == "data-chart"]
    assert "loss" in titles
    assert "final_accuracy" not in titles
    assert re.search(r"single value, which have no chart:\s+final_accuracy: last ", page.words)
    samples = (run / "samples.jsonl").read_text().splitlines()
    (run / "samples.jsonl").write_text(samples[-1] + "\n")
    path.write_text(lines[0] + "\n")
    page = page_of(run)
    assert "data-chart" not in [name for name, _ in page.attributes]
    assert "Drag over a chart" not in page.words
    assert "loss: last " in page.words
    path.unlink()
    assert "Metrics and resources" not in page_of(run).words


def test_running_job_has_its_steps_per_second_with_an_explanation(run: Path) -> None:
    explanation = "divided by the time between the script's reports of them, over the last 20 s"
    words = " ".join(page_of(run).words.split())
    assert "steps per second 9" not in words
    assert explanation not in words
    assert "Each point of steps per second is the new steps since the point before" in words
    (run / "result.json").unlink()
    status = json.loads((run / "status.json").read_text())
    status["tasks"][0].update(step=572, steps_per_second=98.7)
    (run / "status.json").write_text(json.dumps(status))
    words = " ".join(page_of(run).words.split())
    assert "steps per second98.7" in words.replace("steps per second 98.7", "steps per second98.7")
    assert f"Steps per second are new steps {explanation}" in words


def test_page_loads_nothing() -> None:
    text = make_report(JobSummary(RunDirectory(RUNS / "digits")))
    text = text.replace("https://github.com/leeoniya/uPlot", "", 1)  # in the first line of the library
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


@pytest.mark.parametrize(
    ("phase", "word"),
    [
        ("rendezvous", "Forming the cluster"),
        ("checking", "Checking addresses"),
        ("importing", "Importing"),
        ("running", "Running"),
        ("training", "Training"),
        ("stopping", "Stopping"),
        ("terminating", "Ending"),
        ("ended", "Ending"),
        (None, "Starting"),
    ],
)
def test_page_of_a_running_job_has_its_phase_and_no_recommendation(
    tmp_path: Path, phase: str | None, word: str
) -> None:
    run = Path(shutil.copytree(RUNS / "digits", tmp_path / "digits"))
    assert "Recommendations" in page_of(run).words
    (run / "result.json").unlink()
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "phase": phase, "time": time.time()}))
    words = page_of(run).words
    assert words.strip().startswith(f"digits: {word}")
    assert not [
        each for each in ("Recommendations", "Missing information", "Why the job", "its launcher") if each in words
    ]


def test_running_job_has_the_warnings_that_still_hold(run: Path) -> None:
    (run / "result.json").unlink()
    with (run / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": 1e9, "seconds": 2.0, "kind": "warning", "text": "No server has started."}) + "\n"
        )
    status = {**json.loads((run / "status.json").read_text()), "time": time.time()}
    for warnings in ([], ["The ps do not answer."]):
        (run / "status.json").write_text(json.dumps({**status, "warnings": warnings}))
        words = page_of(run).words
        assert ("The ps do not answer." in words) == bool(warnings)
        assert "No server has started." not in words


def cells_of(run: Path) -> list[list[str]]:
    """Return the rows of the table of resource usage."""
    text = make_report(JobSummary(RunDirectory(run))).partition("Resource usage</h2>")[2].partition("</table>")[0]
    return [re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in text.split("</tr>")[:-1]]


def test_usage_of_a_real_job() -> None:
    # Cores: from 20.36 s to 24.37 s, chief 1.22, ps 1.63, workers 1.47 and 1.87 processor seconds.
    assert cells_of(RUNS / "broken")[1:] == [
        ["chief", "1", "0.304", "0.304", "652 MB", "–", "–"],
        ["ps", "1", "0.406", "0.406", "644 MB", "22.2 MB", "1.61 MB"],
        ["worker", "2", "0.416", "0.466", "669 MB", "22.3 MB", "1.73 MB"],
        ["job", "4", "1.54", "", "2.63 GB", "44.5 MB", "3.33 MB"],
    ]


def test_usage_has_gpu_columns_only_if_a_gpu_was_measured(run: Path) -> None:
    header, chief, ps, worker, job = cells_of(run)
    assert header == ["role", "tasks", "cores, mean", "cores, busiest task", "memory, peak", "sent", "received"]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for number, sample in enumerate(samples):
        sample.update(gpu_percent=[None, None, 40, 60], gpu_memory_bytes=[None, None, 10**9, 10**9 * (1 + number % 2)])
        sample.update(sent_bytes=[None] * 4)
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    header, chief, ps, worker, job = cells_of(run)
    assert header[5:7] == ["GPU use, mean", "GPU memory, peak"]
    assert [row[5:8] for row in (chief, ps)] == [["–", "–", "–"]] * 2
    assert [row[5:8] for row in (worker, job)] == [["50 %", "2 GB", "–"], ["50 %", "3 GB", "–"]]


def test_without_measurements_there_is_no_usage(run: Path) -> None:
    (run / "samples.jsonl").write_text('{"seconds": 1.0, "memory_bytes": [null, null, null, null]}\n')
    assert "Resource usage" not in page_of(run).words


def test_missing_files_are_named(run: Path) -> None:
    for name in FILES[2:4]:
        (run / name).unlink()
    words = page_of(run).words
    assert "events.jsonl is missing" in words
    assert re.search("The launcher has written nothing for [^:]*: it is stopped, its host failed, or the", words)
    empty = RunDirectory.create(run, "empty").path
    assert page_of(empty).words.strip().startswith("empty: UNKNOWN")


def test_last_lines_come_from_the_log_without_a_tail(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "tail": [], "log": "/elsewhere/logs/chief-0.1.log"}))
    assert "ValueError: images" in page_of(run).words
    (run / "result.json").write_text(json.dumps({**result, "tail": [], "log": "/etc/passwd"}))
    assert "root:x" not in page_of(run).words


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
    reports = run / "metrics" / "chief-0.1.jsonl"
    reports.write_text(reports.read_text().replace('"loss"', json.dumps(HOSTILE)))
    page = page_of(run)
    assert page.words.count("<script>evil()</script>") >= 5
    assert {*page.elements} <= {*usual.elements, "ul", "li"}
    assert page.elements.count("script") == usual.elements.count("script") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    text = make_report(JobSummary(RunDirectory(run)))
    assert "\x00" not in text
    assert "\u202e" not in text
    text.encode()  # no half of a surrogate pair
    ElementTree.fromstring(make_picture(JobSummary(RunDirectory(run)), "svg"))


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
    assert (
        "20 of 1,000 tasks have a row of their own: small roles, and tasks with the most events. The other 980" in words
    )
    assert words.strip().startswith("large-1000: COMPLETED")
    assert re.search(r"1,0\d\d restarts in place", words)
    assert re.search(r"grouped by role.*Events of \d+ grouped tasks are only in events.jsonl", words)
    assert "180 of 360 samples are drawn" in words
    assert "ps/0 transferred" in words
    assert len(text) < 1_000_000


def test_large_job_is_drawn_in_few_lines(tmp_path: Path) -> None:
    page = Page(make_report(JobSummary(write_large_run(tmp_path))))
    charts = [json.loads(value) for name, value in page.attributes if name == "data-chart"]
    names = [[line["name"] for table in chart["tables"] for line in table["lines"]] for chart in charts]
    assert ["chief/0", "16 ps (mean)", "983 workers (mean)"] in names
    assert names[0] == ["chief/0"]
    assert charts[0]["title"] == "loss"
    assert max(map(len, names)) == 3


def test_page_contains_the_unchanged_library_and_its_licence() -> None:
    text = make_report(JobSummary(RunDirectory(RUNS / "digits")))
    library = read_template("vendor/uPlot-1.6.32.min.js")
    assert hashlib.sha256(library.encode()).hexdigest().startswith("19c8d4c6ad88929a79f4ae49d6f71615")
    assert library in text
    assert "The MIT License (MIT)\n\nCopyright (c) 2022 Leon Sorokin" in text


def test_picture_is_an_svg_file() -> None:
    root = ElementTree.fromstring(make_picture(JobSummary(RunDirectory(RUNS / "digits")), "svg"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(ElementTree.tostring(root)) > 50_000


def test_png_has_bars_and_text(run: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["report", str(run), "-o", str(tmp_path / "report.png")], obj={}).exit_code == 0
    colors = count_colors(tmp_path / "report.png")
    assert colors[bytes.fromhex("56b4e9")] > 1_000, "no bar of the state importing"
    assert colors[bytes.fromhex("000000")] > 500, "no text"


def test_picture_of_thousand_tasks_has_bands(tmp_path: Path) -> None:
    (tmp_path / "report.png").write_bytes(make_picture(JobSummary(write_large_run(tmp_path)), "png"))
    assert count_colors(tmp_path / "report.png")[bytes.fromhex("009e73")] > 20_000


def test_picture_without_matplotlib_names_the_package(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = CliRunner().invoke(cli, ["report", str(run), "-o", str(tmp_path / "report.png")], obj={})
    assert isinstance(refused.exception, MissingDependencyError)
    assert 'pip install "tf4slurm[plot]"' in str(refused.exception)
    assert not (tmp_path / "report.png").exists()


def test_command_writes_the_file_and_prints_its_path(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["report", str(run)], obj={})
    assert (result.exit_code, result.stdout) == (0, f"{run / 'report.html'}\n")
    assert "Why the job failed" in (run / "report.html").read_text()
    drawing = tmp_path / "report.svg"
    assert CliRunner().invoke(cli, ["report", str(run), "-o", str(drawing)], obj={}).exit_code == 0
    assert "<svg " in drawing.read_text()
    refused = CliRunner().invoke(cli, ["report", str(run), "-o", "report.pdf"], obj={})
    assert isinstance(refused.exception, RunDirectoryError)
    assert "is no format of a report" in str(refused.exception)
    assert CliRunner().invoke(cli, ["report", str(run), "-o", "-"], obj={}).stdout.startswith("<!DOCTYPE html>")


def test_links_to_logs_are_relative_to_the_file(run: Path, tmp_path: Path) -> None:
    (run / "logs" / "worker-0.1.log").touch()
    for path, link in (
        ("report.html", "logs/chief-0.1.log"),
        (str(tmp_path / "here.html"), "broken/logs/chief-0.1.log"),
    ):
        CliRunner().invoke(cli, ["report", str(run), "-o", str(run / path)], obj={}, catch_exceptions=False)
        page = Page((run / path).read_text())
        links = [value for name, value in page.attributes if name == "href" and value != "data:,"]
        assert links == [link, link, link.replace("chief", "worker")]
        assert all(((run / path).parent / each).is_file() for each in links)
    text = CliRunner().invoke(cli, ["report", str(run), "-o", "-"], obj={}).stdout
    assert "/logs/chief-0.1.log" in text


def test_comparison_shows_both_jobs(run: Path, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "digits", tmp_path / "digits")
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "digits"), str(run)], obj={}, catch_exceptions=False)
    path = tmp_path / "digits" / "comparison.html"
    assert result.stdout == f"{path}\n"
    page = Page(path.read_text())
    rows = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td></tr>", path.read_text())
    facts = {name: (first, second) for name, first, second in rows}
    assert facts["outcome"] == ("COMPLETED", "FAILED")
    assert facts["duration"] == ("55 s", "28 s")
    # 3,061 steps from 22.37 s to 54.47 s, and 396 from 22.37 s to 26.37 s, the last sample before the outcome
    assert facts["steps per second, mean"] == ("95.4", "99")
    assert facts["cores in use, mean"] == ("1.4", "1.54")
    assert facts["loss"] == ("last 4.58e-05, best 4.58e-05 at step 3,303", "last 0.00348, best 0.00348 at step 572")
    assert facts["command"] == ("python train.py --epochs 150 --seed 1", "python train_broken.py --epochs 60")
    assert "Python" not in facts  # it does not differ
    charts = [json.loads(value) for name, value in page.attributes if name == "data-chart"]
    assert [line["name"] for table in charts[0]["tables"] for line in table["lines"]] == [
        "digits: chief/0",
        "broken: chief/0",
    ]
    assert charts[1]["end"] == pytest.approx(55.1, abs=0.1)


def test_comparison_escapes_text_of_a_job(run: Path, tmp_path: Path) -> None:
    job = json.loads((run / "job.json").read_text())
    job.update(command=[HOSTILE], options={HOSTILE: {HOSTILE: [HOSTILE]}}, versions={HOSTILE: HOSTILE})
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (run / "job.json").write_text(json.dumps(job))
    usual = Page(make_comparison(*[JobSummary(RunDirectory(other))] * 2))
    page = Page(make_comparison(JobSummary(RunDirectory(run)), JobSummary(RunDirectory(other))))
    assert {*page.elements} <= {*usual.elements, "table", "thead", "tbody", "tr", "th", "td"}
    assert page.words.count("<script>evil()</script>") >= 3
    assert "Nothing differs." in usual.words


def test_versions_and_the_git_commit_are_shown(run: Path) -> None:
    job = json.loads((run / "job.json").read_text())
    versions = {"tf4slurm": "0.1.0", "python": "3.11.7", "tensorflow": "2.21.0", "keras": "3.12.0"}
    job.update(versions=versions, commit="0123456789abcdef", is_dirty=True)
    (run / "job.json").write_text(json.dumps(job))
    shown = "tf4slurm 0.1.0 · Python 3.11.7 · TensorFlow 2.21.0 · Keras 3.12.0 · git commit 0123456789 with uncommitted"
    assert shown in page_of(run).words


def test_several_jobs_have_one_page_and_no_picture(run: Path) -> None:
    done = CliRunner().invoke(cli, ["report", *[str(run)] * 3], obj={})
    assert done.stdout == f"{run / 'comparison.html'}\n"
    assert "3 runs" in (run / "comparison.html").read_text()
    refused = CliRunner().invoke(cli, ["report", *[str(run)] * 2, "-o", "a.svg"], obj={})
    assert isinstance(refused.exception, RunDirectoryError)
    assert "'.svg' is no format of a comparison" in str(refused.exception)
