"""What ended a script is found in its output: of scripts run here, and in outputs of TensorFlow 2.16 and 2.21."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.failing.scripts import PLAIN, SCRIPTS
from tests.failing.test_failing_scripts import check
from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.jobs.failures import find_failure, find_slurm_kill
from tf4slurm.jobs.formatting import shorten_in_the_middle
from tf4slurm.jobs.tracebacks import find_tracebacks, without_logs

OUTPUTS = Path(__file__).parents[1] / "data" / "outputs"
RECORDED = sorted(OUTPUTS.glob("*/*.txt"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no such"))
        if name in ("exception group", "notes")
        else name
        for name in PLAIN
        if name != "worker before its server"  # needs a job
    ],
)
def test_failure_of_plain_script(name: str, tmp_path: Path) -> None:
    script = PLAIN[name]
    done = subprocess.run(
        script.write(tmp_path, sys.executable),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    failure = find_failure(done.stdout.splitlines(), done.returncode, str(tmp_path))
    check({**vars(failure), "task": "chief/0"}, script)


@pytest.mark.parametrize("path", RECORDED, ids=[f"{path.parent.name}-{path.stem}" for path in RECORDED])
def test_failure_in_recorded_output(path: Path) -> None:
    """The first line of a recorded output has the task and its exit code."""
    script = next(script for name, script in SCRIPTS.items() if name.replace(" ", "-") == path.stem)
    facts, *lines = path.read_text().splitlines()
    task, returncode = facts.split()
    failure = find_failure(lines, int(returncode), "/home/ana/train")
    worker = None if failure.worker == task else failure.worker
    check({**vars(failure), "task": task, "worker": worker}, script)


def test_outputs_of_both_versions_are_recorded() -> None:
    assert len(RECORDED) >= 36
    assert {path.parent.name for path in RECORDED} == {"2.16", "2.21"}


# The texts are those of glibc, of TensorFlow's LOG(FATAL), and of a GPU's allocator (bfc_allocator.cc).
@pytest.mark.parametrize(
    ("lines", "returncode", "expected"),
    [
        (
            ["terminate called after throwing an instance of 'std::out_of_range'", "  what():  vector::_M_range_check"],
            -6,
            ScriptFailure("SIGABRT", "std::out_of_range: vector::_M_range_check"),
        ),
        (
            ["2025-03-10 15:55:25.474408: F tensorflow/core/framework/tensor.cc:844] Check failed: 2 == 1"],
            -6,
            ScriptFailure("SIGABRT", "Check failed: 2 == 1"),
        ),
        (
            ["F0000 00:00:1795737434.704835   13748 tensor.cc:844] Check failed: 2 == 1"],
            134,
            ScriptFailure("exit code 134", "Check failed: 2 == 1"),
        ),
        (
            [
                "Traceback (most recent call last):",
                '  File "/home/ana/train.py", line 7, in <module>',
                "    model.fit(x)",
                "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:",
                "",
                "Detected at node 'MatMul' defined at (most recent call last):",
                "<stack traces unavailable>",
                "OOM when allocating tensor with shape[90000,90000] and type float on /job:localhost/replica:0/task:0"
                "/device:GPU:0 by allocator GPU_0_bfc",
                "\t [[{{node MatMul}}]]",
            ],
            1,
            ScriptFailure(
                "ResourceExhaustedError",
                "OOM when allocating tensor with shape[90000,90000] and type float on /job:localhost/replica:0/task:0"
                "/device:GPU:0 by allocator GPU_0_bfc",
                "train.py",
                7,
            ),
        ),
        ([], 3, ScriptFailure("exit code 3")),
        ([], -9, ScriptFailure("SIGKILL")),
        ([], -15, ScriptFailure("SIGTERM")),
        (["Traceback (most recent call last):"], 1, ScriptFailure("exit code 1", "Traceback (most recent call last):")),
        (["\x1b[31mValueError\x1b[0m"], 1, ScriptFailure("exit code 1", "ValueError")),
    ],
)
def test_failure_without_script(lines: list[str], returncode: int, expected: ScriptFailure) -> None:
    assert find_failure(lines, returncode, "/home/ana") == expected


def test_log_line_before_the_exception_hides_nothing() -> None:
    log = "2026-11-27 10:00:00.123456: W tensorflow/core/x.cc:1] INVALID_ARGUMENT: the loss : Tensor had NaN values"
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/ana/train.py", line 7, in <module>',
        "    step()",
        log,
        "\t [[{{node CheckNumerics}}]]",
        "ValueError: bad",
    ]
    assert find_failure(lines, 1, "/home/ana") == ScriptFailure("ValueError", "bad", "train.py", 7)


def test_crash_names_the_line_of_the_thread_that_crashed(tmp_path: Path) -> None:
    code = """
import ctypes, threading, time
def load():
    time.sleep(100)
threading.Thread(target=load, daemon=True).start()
ctypes.string_at(0)
"""
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-X", "faulthandler", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    failure = find_failure(done.stderr.splitlines(), done.returncode, str(tmp_path))
    assert failure == ScriptFailure("SIGSEGV", "Segmentation fault", "train.py", 6)


@pytest.mark.parametrize("num_lines", [60, 3000])
def test_exception_of_a_thread_is_named_although_the_script_went_on(num_lines: int) -> None:
    lines = [
        "Exception in thread loader:",
        "Traceback (most recent call last):",
        '  File "/home/ana/train.py", line 12, in load',
        "RuntimeError: cannot decode image 17.png",
        *(f"waiting for data {number}" for number in range(num_lines)),
    ]
    failure = find_failure(lines, 1, "/home/ana")
    last = f"waiting for data {num_lines - 1}"
    cause = "RuntimeError: cannot decode image 17.png"
    assert failure == ScriptFailure("exit code 1", last, "train.py", 12, caused_by=cause)
    assert failure.headline() == f"exit code 1: {last}, because of {cause} (train.py:12)"


@pytest.mark.parametrize("code", [2, 3])
def test_handled_exception_is_not_the_cause_of_a_later_exit(code: int) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/ana/a.py", line 1, in f',
        "OSError: x",
        "bad settings",
    ]
    assert find_failure(lines, code, "/home/ana") == ScriptFailure(f"exit code {code}", "bad settings")
    assert find_failure(lines[:3], code, "/home/ana") == ScriptFailure("OSError", "x", "a.py", 1)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_exception_group_of_exceptions_that_were_never_raised() -> None:
    code = "raise ExceptionGroup('two', [ValueError('one'), KeyError('other')])"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60)
    failure = find_failure(done.stderr.splitlines(), done.returncode)
    assert (failure.type, failure.message, failure.line) == ("ValueError", "one", 1)


def test_exception_whose_name_is_not_ascii() -> None:
    lines = ["Traceback (most recent call last):", '  File "/home/ana/a.py", line 1, in f', "__main__.Überfehler: x"]
    assert find_failure(lines, 1, "/home/ana") == ScriptFailure("Überfehler", "x", "a.py", 1)


def test_removed_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    lines = ["Traceback (most recent call last):", '  File "/home/ana/a.py", line 1, in f', "OSError: x"]
    assert find_failure(lines, 1).file == "/home/ana/a.py"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "lines",
    [
        [" " * 1_900 + "x"] * 4_000,
        ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "W0000 00:00:1.2   14458 x.cc:1] y"]
        * 1_300,
        ["| " * 900 + "x"] * 4_000,
        ["a." * 900 + ":"] * 4_000,
    ],
)
def test_no_output_takes_long(lines: list[str]) -> None:
    """The agent reports the exit of a second start only after this."""
    find_failure(lines, 1, "/home/ana")


LOGS = (
    ["W0000 00:00:1795737471.882256   14458 op_kernel.cc:1845] INVALID_ARGUMENT: assertion failed: [too large]"],
    [
        "2026-11-27 01:10:15.379201: W tensorflow/core/framework/op_kernel.cc:1827] INVALID_ARGUMENT: OSError: damaged",
        "Traceback (most recent call last):",
        "",
        '  File "/home/ana/other.py", line 14, in read',
        '    raise OSError("damaged")',
        "",
        "OSError: damaged",
        "",
        "",
        "\t [[{{node PyFunc}}]]",
    ],
    [
        "W0000 00:00:1795766386.991013   29999 destroy_tensor_handle_node.h:59] Ignoring an error encountered when "
        "deleting remote tensors handles: INVALID_ARGUMENT: Unable to find the relevant tensor remote_handle: Op ID: 7",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling "
        "/tensorflow.eager.EagerService/Enqueue:",
        ':UNKNOWN:Error received from peer  {grpc_status:3, grpc_message:"Unable to find the relevant tensor"}',
    ],
)


@pytest.mark.parametrize("path", RECORDED, ids=[f"{path.parent.name}-{path.stem}" for path in RECORDED])
@pytest.mark.parametrize("log", LOGS, ids=["line", "traceback", "remote"])
def test_message_of_another_thread_between_two_lines_of_a_traceback_changes_nothing(path: Path, log: list[str]) -> None:
    """Python writes each header and each message of an exception in one piece, a line between them in many."""
    facts, *printed = path.read_text().splitlines()
    lines = without_logs(printed)
    expected = find_failure(lines, int(facts.split()[1]), "/home/ana/train")
    for traceback in find_tracebacks(lines):
        for index in range(traceback.start, traceback.end):
            output = [*lines[:index], *log, *lines[index:]]
            assert find_failure(output, int(facts.split()[1]), "/home/ana/train") == expected, index
            line = lines[index]
            before, after = line[: len(line) // 2], line[len(line) // 2 :]
            if index > traceback.start and before:
                output = [*lines[:index], before + log[0], *log[1:], after, *lines[index + 1 :]]
                assert find_failure(output, int(facts.split()[1]), "/home/ana/train") == expected, index


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the tasks were OOM Killed.", "memory"),
        ("slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***", "time"),
    ],
)
def test_kill_by_slurm(line: str, kind: str) -> None:
    assert find_slurm_kill(["srun: x", line]) == ScriptFailure(f"Slurm's {kind} limit", line)
    assert find_slurm_kill(["srun: error: n1: task 0: Killed"]) is None


@pytest.mark.parametrize(
    ("failure", "headline"),
    [
        (ScriptFailure("ValueError", "bad", "train.py", 3, "chief/0"), "ValueError: bad (train.py:3, chief/0)"),
        (ScriptFailure("ValueError", "bad", "a.py", 3, "chief/0", "worker/1"), "ValueError: bad (a.py:3, worker/1)"),
        (ScriptFailure("E", "m", None, None, "chief/0", "worker/1", ran_in_task=True), "E: m (chief/0 for worker/1)"),
        (ScriptFailure("exit code 3", "", task="ps/0"), "exit code 3 (ps/0)"),
        (ScriptFailure("E", "m: no room.", caused_by="OSError: no room"), "E: m: no room."),
        (ScriptFailure("E", "Look.", caused_by="OSError: no room"), "E: Look, because of OSError: no room"),
        (ScriptFailure("E", "m", caused_by="KeyError"), "E: m, because of KeyError"),
        (ScriptFailure("E", "m", caused_by="KeyError: 'x'"), "E: m, because of KeyError: 'x'"),
    ],
)
def test_headline(failure: ScriptFailure, headline: str) -> None:
    assert failure.headline() == headline


def test_long_text_is_shortened_in_the_middle() -> None:
    assert shorten_in_the_middle("a" * 50 + "b" * 50, 30) == "a" * 19 + "…" + "b" * 10
    assert shorten_in_the_middle("short", 5) == "short"
