"""The schema of a job's files: tolerant reading, strict JSON, versions, and its page in docs/."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tf4slurm.control.records import EVENT_KINDS
from tf4slurm.errors import SchemaVersionError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import (
    FILE_NAMES,
    SCHEMA_VERSION,
    Event,
    JobFile,
    Process,
    ResultFile,
    Sample,
    StatusFile,
    TaskStatus,
)
from tf4slurm.slurm.parsing import SlurmResources
from tf4slurm.system.typed_json import from_json, to_json

PAGE = Path(__file__).parent.parent.parent / "docs" / "job-files.md"


@pytest.mark.parametrize(
    "value",
    [
        JobFile("a", "7", ("true",), counts={"ps": 1}, options={"ports": [1]}, process=Process("n1", 5, 6)),
        StatusFile(time=1.5, tasks=(TaskStatus("ps/0", metrics={"loss": 0.5, "high": None}), TaskStatus())),
        ResultFile(0, "done", tail=("x",), tasks=(TaskStatus("ps/0", returncode=-9),)),
        SlurmResources(submitted=1.0, cpus=4),
    ],
)
def test_value_is_read_as_it_was_written(tmp_path: Path, value: Any) -> None:
    run = RunDirectory.open(tmp_path)
    (run.write_result if isinstance(value, ResultFile) else run.write)(value)
    assert run.read(type(value)) == value


def test_missing_mistyped_and_unknown_keys_are_tolerated() -> None:
    content = {
        "time": "noon",
        "seconds": 10**400,
        "phase": ["training"],
        "attempt": True,
        "reason": None,
        "colour": "red",
        "tasks": [3, {"task": "ps/0", "step": "x", "metrics": {"loss": "NaN", "accuracy": 1}}],
    }
    tasks = (TaskStatus(), TaskStatus("ps/0", metrics={"loss": None, "accuracy": 1}))
    assert from_json(StatusFile, content) == StatusFile(tasks=tasks)
    assert from_json(Sample, {"step": [1, "x", None], "metrics": {"0": {"a": 1.5}, "1": 3}}) == Sample(
        step=(1, None, None), metrics={"0": {"a": 1.5}}
    )
    assert from_json(JobFile, {"options": 3, "command": "true", "process": []}) == JobFile()


@pytest.mark.parametrize("text", ["", "[]", "3", '{"time": 3', "[" * 100_000])
def test_file_that_is_not_a_json_object_is_like_a_missing_one(tmp_path: Path, text: str) -> None:
    run = RunDirectory.open(tmp_path)
    (tmp_path / "status.json").write_text(text)
    assert run.read(StatusFile) is None


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "lost"}\n[1]\n\n{"kind": "exi')
    assert RunDirectory(tmp_path).read_lines(Event) == [Event(kind="lost")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_json_lacks_is_null(tmp_path: Path, value: float) -> None:
    run = RunDirectory.open(tmp_path)
    run.write(StatusFile(tasks=(TaskStatus(metrics={"loss": value, "accuracy": 0.5}),)))
    run.append_sample(Sample(cpu_seconds=(value,), metrics={"0": {"loss": value}}))
    assert "NaN" not in (tmp_path / "status.json").read_text()
    status = run.read(StatusFile)
    assert status is not None
    assert status.tasks[0].metrics == {"loss": None, "accuracy": 0.5}
    assert run.read_lines(Sample) == [Sample(cpu_seconds=(None,), metrics={"0": {"loss": None}})]
    assert json.loads(to_json([value, {"a": (value, 1)}])) == [None, {"a": [None, 1]}]


def test_newer_version_is_refused_and_older_is_read(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path)
    run.write(StatusFile(phase="training"))
    content = json.loads((tmp_path / "status.json").read_text())
    assert content["schema_version"] == SCHEMA_VERSION
    for version in (None, "new", 0, SCHEMA_VERSION):
        (tmp_path / "status.json").write_text(json.dumps({**content, "schema_version": version}))
        assert run.read(StatusFile) == StatusFile(phase="training")
    (tmp_path / "status.json").write_text(json.dumps({**content, "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(SchemaVersionError, match=f"has schema version {SCHEMA_VERSION + 1}") as caught:
        run.read(StatusFile)
    assert (caught.value.version, caught.value.path) == (SCHEMA_VERSION + 1, str(tmp_path / "status.json"))


def describe_schema() -> str:
    """Return docs/job-files.md: one table per file or part of a file."""
    kinds = [(f"`{name}`", kind) for kind, name in FILE_NAMES.items()]
    kinds += [(f"Part: {kind.__name__}", kind) for kind in (Process, TaskStatus)]
    sections = [describe(title, kind) + (describe_events() if kind is Event else "") for title, kind in kinds]
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


INTRODUCTION = f"""# Files of a job

The run directory of a job, `runs/<name>-<id>/`, has these JSON files. Files that end in `.jsonl` have one object per
line. The JSON is strict: NaN and infinite numbers are null. Every `.json` file has the key `schema_version`, now {
    SCHEMA_VERSION
}; tf4slurm refuses to read newer versions. When you read these files, ignore keys that you do not know.

`control.json` is internal. This page is generated from `tf4slurm/jobs/schema.py`, see `tests/unit/test_schema.py`."""


def describe(title: str, kind: type[Any]) -> str:
    """Return a heading, the first paragraph of the docstring, and a table of the fields."""
    head, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")
    names = [field.name for field in dataclasses.fields(kind)]
    found = re.findall(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {8,}.+)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.split()) for key, text in found for name in key.split(", ")}
    assert sorted(texts) == sorted(names), f"the docstring of {kind.__name__} describes other fields"
    hints = get_type_hints(kind)
    rows = [f"| `{name}` | {describe_type(hints[name])} | {texts[name]} |" for name in names]
    return "\n".join(
        [f"## {title}", "", " ".join(head.split()), "", "| key | type | meaning |", "|---|---|---|", *rows]
    )


def describe_events() -> str:
    """Return the table of the kinds of events."""
    rows = [
        f"| `{name}` | {kind.meaning} | {'yes' if kind.is_on_terminal else ''} |" for name, kind in EVENT_KINDS.items()
    ]
    return "\n".join(["\n", "| kind | meaning | printed by `tf4slurm run` |", "|---|---|---|", *rows])


def describe_type(hint: Any) -> str:
    text = str(hint) if hasattr(hint, "__args__") else hint.__name__
    text = re.sub(r"[a-z]\w*\.(?:\w+\.)*", "", text).replace(", ...]", "]").replace("| None", "or null")
    return text.replace("tuple[", "list[").replace("Mapping[", "object[")


def test_page_describes_the_schema() -> None:
    """`python -m tests.unit.test_schema` writes the page again."""
    assert PAGE.read_text(encoding="utf-8") == describe_schema()


if __name__ == "__main__":
    PAGE.write_text(describe_schema(), encoding="utf-8")
