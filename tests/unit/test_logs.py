"""The logs of a job: search, order, and reading from a position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.jobs.logs import LogReader, find_logs, merge
from tf4slurm.jobs.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def write(run: RunDirectory, name: str, text: str, times: str = "") -> None:
    (run.path / "logs" / f"{name}.log").write_text(text)
    (run.path / "logs" / f"{name}.times").write_text(times)


def reader(run: RunDirectory, **limits: Any) -> LogReader:
    return LogReader(find_logs([run])[0], **limits)


def texts(reader: LogReader, *, is_final: bool = True) -> list[str]:
    return [line.text for line in reader.read(is_final=is_final)]


def test_logs_are_found_by_pattern_and_sorted(run: RunDirectory, tmp_path: Path) -> None:
    for name in ("worker-10.1", "worker-2.1", "chief-0.2", "chief-0.1", "ps-0.1", "data-worker-0.1"):
        write(run, name, "")
    (run.path / "logs" / "notes.log").touch()
    again = RunDirectory.create(tmp_path, "run")
    write(again, "chief-0.1", "")
    found = find_logs([run, again])
    assert [(str(log.task), log.run, log.attempt) for log in found] == [
        ("chief/0", 1, 1),
        ("data-worker/0", 1, 1),
        ("ps/0", 1, 1),
        ("worker/2", 1, 1),
        ("worker/10", 1, 1),
        ("chief/0", 1, 2),
        ("chief/0", 2, 1),
    ]
    assert [str(log.task) for log in find_logs([run], ["worker/*"])] == ["worker/2", "worker/10"]
    assert [str(log.task) for log in find_logs([run], ["worker"])] == ["worker/2", "worker/10"]
    assert [str(log.task) for log in find_logs([run], ["data-worker", "worker/2"])] == ["data-worker/0", "worker/2"]
    assert find_logs([run], ["work"]) == []
    assert find_logs([RunDirectory(tmp_path / "gone")]) == []


def test_lines_have_the_times_of_the_index(run: RunDirectory) -> None:
    write(run, "chief-0.1", "a\nbb\nc\n", "0 100.0\n5 200.0\ncut")
    assert [(line.time, line.text) for line in reader(run).read()] == [(100.0, "a"), (100.0, "bb"), (200.0, "c")]
    write(run, "chief-0.1", "a\n")
    assert [line.time for line in reader(run).read()] == [0.0]


def test_lines_of_several_tasks_are_sorted_by_time(run: RunDirectory) -> None:
    write(run, "chief-0.1", "first\nthird\n", "0 100.0\n6 300.0\n")
    write(run, "worker-0.1", "second\nfourth\n", "0 200.0\n7 400.0\n")
    merged = merge([LogReader(log) for log in find_logs([run])])
    assert [line.text for line in merged] == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize(("since", "expected"), [(0.0, ["a", "b", "c"]), (150.0, ["c"]), (200.0, ["c"]), (201.0, [])])
def test_older_lines_are_left_out(run: RunDirectory, since: float, expected: list[str]) -> None:
    write(run, "chief-0.1", "a\nb\nc\n", "0 100.0\n4 200.0\n")
    assert texts(reader(run, since=since)) == expected


def test_growing_log_is_continued_without_an_unfinished_line(run: RunDirectory) -> None:
    write(run, "chief-0.1", "a\nhal")
    log = reader(run)
    assert texts(log, is_final=False) == ["a"]
    write(run, "chief-0.1", "a\nhalf\nb")
    assert texts(log, is_final=False) == ["half"]
    assert texts(log) == ["b"]
    assert texts(log) == []


def test_growing_index_is_read_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_file = Path.open

    def count(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.suffix)
        return open_file(path, *arguments, **options)

    number = 50_000
    write(run, "chief-0.1", "a\n" * number, "".join(f"{2 * line} {1000.0 + line}\n" for line in range(number)))
    log = reader(run, tail=2)
    assert [line.time for line in log.read(is_final=False)] == [50_998.0, 50_999.0]
    monkeypatch.setattr(Path, "open", count)
    assert texts(log, is_final=False) == []
    assert ".times" not in opened  # nothing new was printed
    paths = [run.path / "logs" / f"chief-0.1.{suffix}" for suffix in ("log", "times")]
    for entry in range(3):
        for path, text in zip(paths, ("b\n", f"{2 * (number + entry)} {2000.0 + entry}\n"), strict=True):
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
        assert [(line.time, line.text) for line in log.read(is_final=False)] == [(2000.0 + entry, "b")]
        assert len(log._index[0]) < 10  # earlier entries are forgotten
    assert log._index_bytes == paths[1].stat().st_size


def test_unfinished_entry_of_the_index_is_read_when_it_is_complete(run: RunDirectory) -> None:
    write(run, "chief-0.1", "a\nb\n", "0 100.0\n2 20")
    log = reader(run)
    assert [line.time for line in log.read(is_final=False)] == [100.0, 100.0]
    write(run, "chief-0.1", "a\nb\nc\n", "0 100.0\n2 200.0\n4 300.0\n")
    assert [line.time for line in log.read(is_final=False)] == [300.0]


@given(
    lines=st.lists(st.text("ab\x00é", max_size=6).map(lambda text: text.encode()), max_size=30),
    number=st.integers(0, 40),
    ends=st.booleans(),
)
def test_tail_has_the_last_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], number: int, ends: bool
) -> None:
    run = RunDirectory.create(tmp_path_factory.mktemp("tail"), "run")
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    (run.path / "logs" / "chief-0.1.log").write_bytes(data)
    everything = texts(reader(run))
    assert texts(reader(run, tail=number)) == everything[len(everything) - min(number, len(everything)) :]


def test_tail_of_a_large_log_is_found_without_reading_all_of_it(run: RunDirectory) -> None:
    write(run, "chief-0.1", "".join(f"line {number:06}\n" for number in range(100_000)))
    assert texts(reader(run, tail=7_000)) == [f"line {number:06}" for number in range(93_000, 100_000)]
