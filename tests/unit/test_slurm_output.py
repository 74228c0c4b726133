"""Jobs that ended without a result: Slurm's output is shown, and the end is kept. Slurm's programs are fakes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.fake_slurm import FakeSlurm
from tf4slurm import api
from tf4slurm.cli.jobs import status as status_verb
from tf4slurm.cli.jobs import wait
from tf4slurm.cli.results import report
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.errors import NoLogsError, RunDirectoryError
from tf4slurm.jobs.registry import KnownJob, find_job, register_job
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.jobs.slurm_output import read_slurm_output
from tf4slurm.jobs.status import FORGOTTEN
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.points import ArrayElement
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.submit import find_outputs, submit_again

NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
ERROR = "bash: /no/such/bin/activate: No such file or directory"


@pytest.fixture
def slurm(fake_slurm: FakeSlurm) -> FakeSlurm:
    return fake_slurm


@pytest.fixture
def failed(slurm: FakeSlurm) -> KnownJob:
    """A job whose batch script has failed before it started tf4slurm."""
    path = slurm.runs / "slurm-%j.out"
    (slurm.runs / "slurm-19.out").write_text(f"hello\n\n{ERROR}\n")
    job = register_job("train-19", slurm.runs, os.environ, "19", outputs=[str(path)])
    slurm.set_queue(j19="FAILED")
    slurm.set_jobs("JobId=19 JobState=FAILED Partition=p ExitCode=3:0")
    return job


def shown_by(verb: object, *words: str) -> str:
    done = CliRunner().invoke(verb, words, obj={})  # type: ignore[arg-type]
    return done.output


def test_verbs_show_the_end_of_slurms_output(slurm: FakeSlurm, failed: KnownJob) -> None:
    place = str(slurm.runs / "slurm-19.out")
    (status,) = StatusReader([failed], reads_output=True).read()
    assert (status.state, status.exit_code, status.slurm_output) == ("FAILED", 3, {place: ("hello", ERROR)})
    for verb in (status_verb, wait):
        text = shown_by(verb, "19")
        assert f"Slurm's output, {place}, ends with:" in text
        assert ERROR in text
        assert "tf4slurm logs" not in text
    for call in (api.make_report, api.render_report):
        with pytest.raises(RunDirectoryError) as found:
            call("19")
        assert "not started yet" not in str(found.value)
        assert "It is FAILED. Slurm's queue shows FAILED" in str(found.value)
        assert ERROR in str(found.value)
    with pytest.raises(NoLogsError, match=ERROR):
        list(api.logs("19"))


def test_list_reads_no_output(slurm: FakeSlurm, failed: KnownJob) -> None:
    assert [each.slurm_output for each in api.list_jobs()] == [{}]


def test_report_of_a_job_whose_launcher_was_killed_shows_the_output(
    slurm: FakeSlurm,
    failed: KnownJob,
) -> None:
    slurm.run("train-19")
    text = shown_by(report, "19")
    assert "train-19 has no result: it is FAILED." in text
    assert ERROR in text


def test_job_with_a_result_and_a_pending_one_show_no_output(slurm: FakeSlurm, failed: KnownJob) -> None:
    slurm.set_queue(j19="PENDING")
    assert api.status("19").slurm_output == {}
    with pytest.raises(RunDirectoryError, match="tf4slurm status 19"):
        api.make_report("19")
    slurm.set_queue(j19="FAILED")
    slurm.run("train-19", "FAILED", 7)
    assert api.status("19").slurm_output == {}


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ScriptFailure("ValueError", "bad rate", "train.py", 12, "chief/0"), "All output: tf4slurm logs 19"),
        (ScriptFailure("exit code 3", "", task="chief/0"), "To find the reason: tf4slurm logs 19"),
        (None, "To find the reason: tf4slurm logs 19"),
    ],
)
def test_status_asks_to_look_for_a_reason_only_if_it_shows_none(
    slurm: FakeSlurm, failure: ScriptFailure | None, line: str
) -> None:
    slurm.register("19")
    slurm.set_queue(j19="FAILED")
    run = slurm.run("train-19")
    run.write_result(ResultFile("FAILED", 1, "chief/0 on n0 exited with code 1.", failure=failure))
    assert shown_by(status_verb, "19").splitlines()[-1] == line


def test_path_of_an_unknown_output_is_that_of_slurm(slurm: FakeSlurm) -> None:
    slurm.register("19")
    (slurm.runs / "mine.txt").write_text(ERROR)
    slurm.set_jobs(f"JobId=19 BatchFlag=1 JobState=FAILED Partition=p ExitCode=3:0 StdOut={slurm.runs}/mine.txt")
    slurm.set_queue(j19="FAILED")
    assert api.status("19").slurm_output == {str(slurm.runs / "mine.txt"): (ERROR,)}


def test_array_shows_the_output_of_its_first_element_without_a_result(slurm: FakeSlurm) -> None:
    elements = [ArrayElement(index) for index in range(3)]
    register_job("train-19", slurm.runs, os.environ, "19", elements, outputs=[str(slurm.runs / "slurm-%A_%a.out")])
    for index in (1, 2):
        (slurm.runs / f"slurm-19_{index}.out").write_text(f"element {index}")
    slurm.run("train-19_0", "FAILED", 7)
    slurm.set_queue(j19_1="FAILED", j19_2="FAILED")
    assert list(api.status("19").slurm_output.values()) == [("element 1",)]
    assert list(api.status("19_2").slurm_output.values()) == [("element 2",)]


# The end is kept


def test_end_is_kept_when_slurm_has_forgotten_it(slurm: FakeSlurm, failed: KnownJob) -> None:
    seen = api.status("19")
    for program in ("set_queue", "no answer"):
        if program == "set_queue":
            slurm.set_queue()
        else:
            slurm.fake("squeue", NO_ANSWER)
        later = api.status("19")
        assert (later.state, later.exit_code, later.reason) == ("FAILED", 3, seen.reason)
        assert ERROR in shown_by(status_verb, "19")
        assert api.list_jobs()[0].state == "FAILED"
        (by_old_value,) = StatusReader([failed]).read()
        assert by_old_value.state == "FAILED"


def test_end_that_nobody_has_seen_is_forgotten_but_the_output_is_shown(
    slurm: FakeSlurm,
    failed: KnownJob,
) -> None:
    slurm.set_queue()
    assert api.status("19").state == FORGOTTEN
    assert ERROR in shown_by(status_verb, "19")


def test_job_that_runs_again_has_no_earlier_end(slurm: FakeSlurm, failed: KnownJob) -> None:
    assert api.status("19").state == "FAILED"
    slurm.set_queue(j19="RUNNING")
    assert api.status("19").state == "RUNNING"
    register_job("train-19", slurm.runs, os.environ, "19")  # by its launcher
    assert find_job("19", os.environ).outputs == failed.outputs
    slurm.set_queue()
    assert api.status("19").state == FORGOTTEN


def test_ends_of_ten_thousand_elements_are_kept_in_a_short_entry(slurm: FakeSlurm) -> None:
    slurm.register("19", range(10_000))
    before = sum(path.stat().st_size for path in (slurm.runs.parent / "state" / "tf4slurm" / "jobs").iterdir())
    slurm.set_queue(**{f"j19_{index}": "FAILED" if index % 2 else "COMPLETED" for index in range(10_000)})
    api.status("19")
    slurm.set_queue()
    found = [each.state for each in api.status("19").elements]
    assert found == ["COMPLETED", "FAILED"] * 5_000
    after = sum(path.stat().st_size for path in (slurm.runs.parent / "state" / "tf4slurm" / "jobs").iterdir())
    assert after - before < 100_000
    slurm.set_queue(j19_7="TIMEOUT")
    api.status("19_7")
    slurm.set_queue()
    assert [each.state for each in api.status("19").elements[6:9]] == ["COMPLETED", "STOPPED", "COMPLETED"]


# Paths


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["slurm-%j.out"]),
        ({"output": "out/%x-%4j.txt", "name": "a%b"}, ["out/a%%b-%4j.txt"]),
        ({"output": "/logs/%j", "sbatch": ("error=%j.err",)}, ["/logs/%j", "%j.err"]),
        ({"array": "0-3"}, ["slurm-%A_%a.out"]),
        ({"sbatch": ("chdir=/work",)}, ["/work/slurm-%j.out"]),
        ({"output": "%5x-%%x-%3j", "name": "a"}, ["a-%%x-%3j"]),
        ({"output": "a\\\\b-%j"}, ["a\\b-%%j"]),
    ],
)
def test_outputs_of_a_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], names: Sequence[str]
) -> None:
    place = tmp_path / "a%c"
    place.mkdir()
    monkeypatch.chdir(place)
    spec = BatchSpec(command=("true",), workers=1, **options)  # type: ignore[arg-type]
    assert find_outputs(spec) == tuple(str(tmp_path / "a%%c" / name) for name in names)


@pytest.mark.parametrize(
    ("pattern", "job_id", "files", "found"),
    [
        ("slurm-%j.out", "19", ["slurm-19.out"], "slurm-19.out"),
        ("slurm-%j.out", "19", ["slurm-19.out", "slurm-19.2.out", "slurm-19.10.out", "slurm-19.x.out"], "19.10.out"),
        ("slurm-%A_%a.out", "19_3", ["slurm-19_3.out", "slurm-19_30.out"], "slurm-19_3.out"),
        ("%4j-100%%", "19", ["0019-100%"], "0019-100%"),
        ("%99999999999j", "19", ["0000000019"], "0000000019"),
        ("%A-%3a", "19_3", ["19-003"], "19-003"),
        ("slurm-%j.out", "19_3", ["slurm-19.out"], None),
        ("%N.out", "19", ["n1.out", "%N.out"], None),
        ("slurm-%j.out", "19", [], None),
    ],
)
def test_file_of_a_pattern(tmp_path: Path, pattern: str, job_id: str, files: Sequence[str], found: str | None) -> None:
    for name in files:
        (tmp_path / name).write_text(name)
    job = KnownJob(job_id, "train", str(tmp_path), outputs=(str(tmp_path / pattern),))
    ends = read_slurm_output(job, asks_slurm=False)
    assert list(ends) == ([] if found is None else [str(tmp_path / next(each for each in files if found in each))])


def test_end_of_a_file_is_short_and_visible(tmp_path: Path) -> None:
    path = tmp_path / "slurm-19.out"
    path.write_bytes(b"x" * 10**6 + b"".join(b"%d\n" % number for number in range(100)) + b"\x1b[31mred\xff\n\n")
    job = KnownJob("19", "train", str(tmp_path), outputs=(str(path),))
    (lines,) = read_slurm_output(job, asks_slurm=False).values()
    assert lines == (*map(str, range(89, 100)), "\ufffd[31mred\ufffd")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("is_link", [False, True])
def test_files_of_other_users_are_not_read(tmp_path: Path, is_link: bool) -> None:
    path, other = tmp_path / "slurm-19.out", tmp_path / "other"
    other.write_text("planted")
    os.chown(other, 12345, 12345)
    if is_link:
        path.symlink_to(other)
    else:
        other.rename(path)
    job = KnownJob("19", "train", str(tmp_path), outputs=(str(path),))
    assert read_slurm_output(job, asks_slurm=False) == {}


def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slurm-19.out")
    job = KnownJob("19", "train", str(tmp_path), outputs=(str(tmp_path / "slurm-19.out"),))
    assert read_slurm_output(job, asks_slurm=False) == {}


def test_job_that_is_submitted_again_has_its_own_output(slurm: FakeSlurm, failed: KnownJob) -> None:
    failed.batch_script.write_text("#!/bin/bash\n")
    assert submit_again(failed, slurm.directory, os.environ).outputs == (str(slurm.directory / "slurm-%j.out"),)
    again = submit_again(failed, slurm.runs, os.environ)
    assert (again.slurm_id, again.outputs) == (JobId(50), failed.outputs)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"output": "out dir/%x-%j.txt"}, "out dir/train-50.txt"),
        ({"output": "out/100%%/%5j.txt"}, "out/100%/00050.txt"),
        ({"array": "0-3"}, "slurm-50_2.out"),
        ({"sbatch": ("chdir=work",)}, "work/slurm-50.out"),
        ({"output": "out/%j", "sbatch": ("chdir=work",)}, "work/out/50"),
    ],
)
def test_output_of_a_job_that_is_submitted_again_is_found(slurm: FakeSlurm, options: dict[str, Any], name: str) -> None:
    place = slurm.runs.parent / "a 100%j"
    (place / "work").mkdir(parents=True)
    failed = register_job("train-19", slurm.runs, os.environ, "19")
    spec = BatchSpec(command=("true",), name="train", workers=1, **options)
    failed.batch_script.write_text(make_script(spec))
    again = submit_again(failed, place, os.environ, (2,) if "array" in options else ())
    assert "%" in name or (place / name).parent.is_dir()
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(ERROR)
    job = again.element(2) if again.array else again
    assert read_slurm_output(job, asks_slurm=False) == {str(place / name): (ERROR,)}
