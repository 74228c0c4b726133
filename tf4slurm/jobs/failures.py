"""Find in the output of a script what ended it: the exception, the signal or the exit code.

The rules never read this. Recognized are the tracebacks of Python (chained ones and exception groups too), of IPython,
of faulthandler, and the errors of TensorFlow that carry a traceback of another function or process in their message.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from tf4slurm.control.script_failure import ScriptFailure
from tf4slurm.jobs.boilerplate import BoilerplateFilter
from tf4slurm.jobs.formatting import shorten_in_the_middle, without_colors
from tf4slurm.jobs.tracebacks import (
    DIRECT_CAUSE,
    EXCEPTION,
    FRAME,
    HEADER,
    MESSAGE_END,
    Traceback,
    find_tracebacks,
    innermost_frame,
    without_logs,
)

_MESSAGE_CHARACTERS = 400
_FEW_LINES = 5
_CRASHES = tuple(-number for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
_ABORTS = (-signal.SIGABRT, 128 + signal.SIGABRT)
_MAX_LINES_AFTER = 50  # lines that programs print at their exit, after the traceback; more show that the script went on

# The lines before a traceback that does not end the process.
_IN_BACKGROUND = re.compile(r"^(Exception in thread |Process \S+:$)")
_IGNORED = re.compile(r"^(Exception ignored |Error in (?:atexit|sys\.excepthook))")
_QUOTES = '"""'  # around the traceback of a process pool's worker

# Crashes: of Python's faulthandler, of C++, of TensorFlow's LOG(FATAL)
_FAULT = re.compile(r"^Fatal Python error: (?P<message>.*)$")
_CPP_EXCEPTION = re.compile(r"^terminate called after throwing an instance of '(?P<type>.*)'")
_CPP_WHAT = re.compile(r"^ *what\(\): +(?P<message>.*)$")
_FATAL_LOG = re.compile(r"^(?:\d{4}-\d\d-\d\d [\d:.]+: F \S+|F\d{4} [\d:.]+ +\d+ \S+)\] (?P<message>.*)$")

# Messages of slurmstepd, which srun prints. Sources: https://github.com/nextflow-io/nextflow/issues/5932,
# https://github.com/ZettaAI/zetta_utils/issues/671
_SLURM_KILLS = (
    (re.compile(r"[Dd]etected \d+ oom.kill event|[Ee]xceeded (?:job|step) memory limit"), "Slurm's memory limit"),
    (re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT"), "Slurm's time limit"),
)

# The messages of TensorFlow's errors, produced with TensorFlow 2.16 and 2.21.
_IN_USER_CODE = re.compile(r"in user code:$")
_DETECTED = re.compile(r"^Detected at node .* defined at \(most recent call last\):$|^Original stack trace for '")
_NO_MESSAGE = re.compile(
    r"^(Graph execution error:|From /job:\S+:$|Recent warning and error logs:|<stack traces unavailable>"
    r"|\d+ root error\(s\) found\.|Node: '.*'|\d+ (?:successful operations|derived errors ignored)\."
    r"|Errors may have originated from|Input Source operations |Function call stack:"
    r"|Traceback \(most recent call last\):|Original stack trace for )"
)
_PREFIXES = re.compile(
    r"^\s*(\(\d+\) (?:[A-Z_]+|\w+ error): +|\{\{function_node \S+\}\} *|\{\{node \S+\}\} *"
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+:? *"
    r"|assertion failed: (?=\[\])|(?:from )?/job:\S+:(?=\s) *)"
)
_SUFFIXES = re.compile(r"(\s*\[\[\{\{node .*|\s*\[Op:\S+\].*|\s*\[type\.googleapis\.com/.*)$")
_FROM_TASK = re.compile(r"^From /job:(?P<type>\w+)/replica:\d+/task:(?P<index>\d+):$")
_REMOTE_CALL = re.compile(
    r"remote target /job:(?P<type>\w+)/replica:\d+/task:(?P<index>\d+)\S* while calling "
    r"/tensorflow\.(?P<method>[\w./]+)"
)


def find_failure(lines: Sequence[str], returncode: int, directory: str | None = None) -> ScriptFailure:
    """Return what ended a script, from the end of its output and its exit code.

    Args:
        lines: The last lines of the output. The more lines, the better: a traceback with TensorFlow's message may have
            hundreds.
        returncode: The exit code, or minus the number of the signal that ended the script.
        directory: The script's working directory, by default that of this process.
    """
    clean = [without_colors(line).rstrip() for line in lines]
    directory = directory or _find_working_directory()
    failure = _find_exception(without_logs(clean), returncode)
    if failure is None:
        failure = _find_crash(clean, returncode) or _describe_exit(clean, returncode)
    file = None if failure.file is None else _shorten_path(failure.file, directory)
    return replace(
        failure,
        type=failure.type.rpartition(".")[2] if "exit code" not in failure.type else failure.type,
        message=shorten_in_the_middle(" ".join(failure.message.split()), _MESSAGE_CHARACTERS),
        file=file,
    )


def _find_working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _shorten_path(file: str, directory: str) -> str:
    """Return the path of a file below `directory` relative to it, and any other path unchanged."""
    prefix = directory.rstrip("/") + "/"
    return file[len(prefix) :] if directory and file.startswith(prefix) else file


def find_slurm_kill(lines: Sequence[str]) -> ScriptFailure | None:
    """Return why Slurm has killed a step, from the output of srun. None if srun does not say so."""
    for line in lines:
        for pattern, limit in _SLURM_KILLS:
            if pattern.search(line):
                return ScriptFailure(limit, shorten_in_the_middle(line.strip(), _MESSAGE_CHARACTERS))
    return None


# Exceptions


def _find_exception(lines: list[str], returncode: int) -> ScriptFailure | None:
    """Return the failure of the last exception that can have ended the script, or None.

    A signal from outside (SIGKILL, SIGTERM and others) is never the consequence of an exception.
    """
    if returncode < 0 and returncode not in _CRASHES:
        return None
    found = [each for each in find_tracebacks(lines) if not _IGNORED.match(each.before)]
    fatal = [each for each in found if not _IN_BACKGROUND.match(each.before)]
    if not found:
        return None
    last = (fatal or found)[-1]
    after = _without_boilerplate(lines[last.end :])
    # Python exits with 1 after an exception. With another code, a traceback is the cause if no other output follows.
    max_lines_after = _MAX_LINES_AFTER if returncode in (1, *map(abs, _CRASHES), *_CRASHES) else 0
    if len(after) > max_lines_after and not _is_of_tensorflow(last):
        return _describe_exit_after(last, lines, returncode) if returncode == 1 and not fatal else None
    if returncode < 0 and any(map(_FAULT.match, after)):
        return None
    earlier = found[: found.index(last)]
    previous = earlier[-1] if earlier and _is_cause(earlier[-1], last) else None
    return _to_failure(last, previous)


def _describe_exit_after(last: Traceback, lines: list[str], returncode: int) -> ScriptFailure:
    """Return the failure of a script that went on after an exception in a thread, and then exited with 1."""
    cause = _to_failure(last, None)
    text = shorten_in_the_middle(f"{cause.type.rpartition('.')[2]}: {cause.message}", _MESSAGE_CHARACTERS)
    return replace(_describe_exit(lines, returncode), file=cause.file, line=cause.line, caused_by=text)


def _is_cause(one: Traceback, other: Traceback) -> bool:
    """Return whether `one` is the direct cause of `other`, the next traceback, or made by a program that it ran."""
    if other.before == DIRECT_CAUSE:
        return True
    return other.type.endswith("CalledProcessError") and other.start - one.end < _FEW_LINES


def _to_failure(last: Traceback, previous: Traceback | None) -> ScriptFailure:
    failure = _read_message(last)
    file, line = failure.file, failure.line
    caused_by = ""
    if previous is not None:
        cause = _read_message(previous)
        if previous.before == _QUOTES:  # of a process pool: the same exception, where it was raised
            file, line = (cause.file, cause.line) if cause.file else (file, line)
        else:
            caused_by = shorten_in_the_middle(f"{cause.type.rpartition('.')[2]}: {cause.message}", _MESSAGE_CHARACTERS)
    return replace(failure, file=file, line=line, caused_by=caused_by)


# Messages


def _read_message(traceback: Traceback) -> ScriptFailure:
    """Return the failure of a traceback: if its message carries the error of another function, then that error."""
    message = traceback.message
    file, line = innermost_frame(traceback.frames)
    failure = ScriptFailure(traceback.type, _first_paragraph(message), file, line)
    if traceback.type.endswith("CellExecutionError"):  # nbconvert; the notebook's traceback follows
        return failure
    python = _read_nested(message)
    nested = python or _read_user_code(message) or _read_graph_error(traceback)
    if nested is None:
        return failure
    if nested.file is None:
        nested = replace(nested, file=file, line=line)
    worker = _find_worker(message)
    return replace(nested, worker=worker, ran_in_task=worker is not None and nested is python)


def _first_paragraph(message: Sequence[str]) -> str:
    """Return the first line of a message. If it only introduces the next lines, return these too."""
    lines = [line.strip() for line in message]
    if not lines:
        return ""
    if lines[0].startswith("Exception encountered when calling "):  # Keras 3
        rest = [line for line in lines[1:] if line]
        return f"{lines[0]} {rest[0]}" if rest else lines[0]
    count = 1
    while count < min(len(lines), 4) and lines[count] and (not lines[0] or lines[0].endswith((":", ","))):
        count += 1
    return " ".join(filter(None, lines[:count]))


def _read_nested(message: Sequence[str]) -> ScriptFailure | None:
    """Read the exception of a Python function that TensorFlow has called, as tf.py_function and from_generator do."""
    for index, line in enumerate(message):
        if line.strip() == HEADER and message[index + 1 : index + 2] == [""]:
            frames = []
            for text in message[index + 1 :]:
                if match := FRAME.match(text):
                    frames.append((match["file"], int(match["line"])))
                elif text and not text.startswith(" ") and (error := EXCEPTION.match(text)):
                    return ScriptFailure(
                        error["type"], error["message"] or "", *innermost_frame(frames, only_users=True)
                    )
    return None


def _read_user_code(message: Sequence[str]) -> ScriptFailure | None:
    """Read the exception that autograph repeats below "in user code:"."""
    start = next((index for index, line in enumerate(message) if _IN_USER_CODE.search(line)), None)
    if start is None:
        return None
    frames = []
    for index in range(start + 1, len(message)):
        line = message[index]
        if match := FRAME.match(line):
            frames.append((match["file"], int(match["line"])))
        elif re.match(r"^    [A-Za-z_]", line) and (error := EXCEPTION.match(line.strip())) and ":" in line:
            paragraph = _first_paragraph([error["message"] or "", *message[index + 1 :]])
            return ScriptFailure(error["type"], _clean(paragraph), *innermost_frame(frames, only_users=True))
    return None


def _is_of_tensorflow(traceback: Traceback) -> bool:
    """Return whether a message is that of an operation, which may have hundreds of lines."""
    marks = (_NO_MESSAGE, MESSAGE_END, _PREFIXES)
    has_mark = any(mark.match(line) for line in traceback.message for mark in marks)
    return has_mark or _SUFFIXES.search(traceback.message[0]) is not None


def _read_graph_error(traceback: Traceback) -> ScriptFailure | None:
    """Read an error of an operation: the message of the operation, and where the script has made it."""
    message = traceback.message
    if not _is_of_tensorflow(traceback):
        return None
    frames: list[tuple[str, int]] = []
    text = ""
    is_in_stack = False
    for line in message:
        if _DETECTED.match(line):
            is_in_stack = True
        elif match := FRAME.match(line):
            frames.append((match["file"], int(match["line"])))
        elif is_in_stack and (not line.strip() or line.startswith(" ")) and not re.match(r" *\(\d+\)", line):
            continue
        elif not text and line.strip() and not _NO_MESSAGE.match(line) and not MESSAGE_END.match(line):
            is_in_stack = False
            text = _clean(line)
    return ScriptFailure(traceback.type, text, *innermost_frame(frames, only_users=True)) if text else None


def _clean(text: str) -> str:
    """Return TensorFlow's message of an operation without the names of nodes, devices and iterators around it."""
    while (shorter := _PREFIXES.sub("", text)) != text:
        text = shorter
    return _SUFFIXES.sub("", text).strip()


def _find_worker(message: Sequence[str]) -> str | None:
    """Return the task on which an operation has failed, such as "worker/1". None if the message names none.

    The chief's call of a worker ("EagerService/Enqueue") names the worker of a closure.
    """
    calls = [match for line in message for match in _REMOTE_CALL.finditer(line)]
    calls.sort(key=lambda match: (match["method"] != "eager.EagerService/Enqueue", match["type"] != "worker"))
    found = [*calls, *filter(None, map(_FROM_TASK.match, message))]
    return f"{found[0]['type']}/{found[0]['index']}" if found and found[0]["type"] in ("worker", "ps") else None


# Crashes and exit codes


def _find_crash(lines: list[str], returncode: int) -> ScriptFailure | None:
    """Return the failure of a script that a signal has ended, or that printed a crash report. Otherwise return None."""
    message, file, line = "", None, None
    frames: list[tuple[str, int]] = []
    for index, text in enumerate(lines[-200:], max(len(lines) - 200, 0)):
        if match := _FAULT.match(text):
            message = message or match["message"]
            frames = _read_crash_frames(lines[index:])
        elif returncode in _ABORTS and (match := _FATAL_LOG.match(text)):
            message = match["message"]
        elif match := _CPP_EXCEPTION.match(text):
            what = next(filter(None, map(_CPP_WHAT.match, lines[index : index + 3])), None)
            message = f"{match['type']}: {what['message']}" if what else match["type"]
    if returncode >= 0 and not message:
        return None
    if frames:
        frames.reverse()  # faulthandler prints the innermost frame first
        file, line = innermost_frame(frames)
    name = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
    return ScriptFailure(name, message, file, line)


def _read_crash_frames(lines: list[str]) -> list[tuple[str, int]]:
    """Return the frames of the thread that crashed, in the report of faulthandler. The innermost is the first."""
    start = next((index for index, line in enumerate(lines) if line.startswith("Current thread ")), 0)
    end = next((index for index in range(start + 1, len(lines)) if not lines[index]), len(lines))
    return [(match["file"], int(match["line"])) for match in map(FRAME.match, lines[start:end]) if match]


def _describe_exit(lines: list[str], returncode: int) -> ScriptFailure:
    """Return the failure of a script that ended without a traceback: its exit code, and its last line."""
    shown = _without_boilerplate(lines)
    return ScriptFailure(f"exit code {returncode}", shown[-1].strip() if shown else "")


def _without_boilerplate(lines: Sequence[str]) -> list[str]:
    """Return the lines without empty ones and without TensorFlow's start-up messages."""
    boilerplate = BoilerplateFilter()
    return [line for line in lines if not boilerplate.is_boilerplate(line) and line.strip()]
