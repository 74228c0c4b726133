"""The schema of a job's files: tolerant reading, strict JSON, and versions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.cluster import Task
from tf4slurm.control.script_metrics import StepMetrics
from tf4slurm.errors import SchemaVersionError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import (
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


@pytest.mark.parametrize(
    "value",
    [
        JobFile("a", "7", ("true",), counts={"ps": 1}, options={"ports": [1]}, process=Process("n1", 5, 6)),
        StatusFile(time=1.5, tasks=(TaskStatus("ps/0", metrics={"loss": 0.5, "high": None}), TaskStatus())),
        ResultFile("COMPLETED", 0, "done", tail=("x",), tasks=(TaskStatus("ps/0", returncode=-9),)),
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
    assert from_json(Sample, {"step": [1, "x", None], "metrics": 3}) == Sample(step=(1, None, None))
    assert from_json(StepMetrics, {"step": "x", "metrics": {"a": 1.5, "b": []}}) == StepMetrics(
        metrics={"a": 1.5, "b": None}
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
    run.append_sample(Sample(cpu_seconds=(value,)))
    run.write_metrics(Task("ps", 0), 1, [StepMetrics(0, metrics={"loss": value})], is_appended=True)
    assert "NaN" not in (tmp_path / "status.json").read_text()
    status = run.read(StatusFile)
    assert status is not None
    assert status.tasks[0].metrics == {"loss": None, "accuracy": 0.5}
    assert run.read_lines(Sample) == [Sample(cpu_seconds=(None,))]
    assert run.read_metrics() == {("ps/0", 1): [StepMetrics(0, metrics={"loss": None})]}
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
