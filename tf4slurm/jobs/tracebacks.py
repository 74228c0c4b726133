"""Read the tracebacks in the output of a script.

Recognized are the formats of Python (also of exception groups, and of syntax errors, which Python prints without a
header) and of IPython. TensorFlow's tracebacks inside of messages are left to `failures.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

HEADER = "Traceback (most recent call last):"
_HEADER = re.compile(rf"^(?: *\+ Exception Group | *\| )?{re.escape(HEADER)}$")
_GROUP = re.compile(rf"^(?: *\+ Exception Group | *\| ){re.escape(HEADER)}$")
_MARGIN = re.compile(r"^ *(?:\+-?)?[|+] ?(?:[| ]*[|] ?)*")
FRAME = re.compile(r'^(?: *\| *| *)File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in .*)?')
EXCEPTION = re.compile(r"^(?P<type>[^\W\d][\w.]*(?:<locals>\.[\w.]+)?)(?:: ?(?P<message>.*))?$")
_GROUP_MEMBER = re.compile(r"^-+ \d+ -+$")
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
_NOTEBOOK_HEADER = re.compile(r"^(?P<type>[A-Za-z_][\w.]*) +Traceback \(most recent call last\)$")
_NOTEBOOK_FRAME = re.compile(
    r"^(?:File (?P<file>[^\s:]+):(?P<line>\d+)|(?P<cell>Cell In\[\d+\]), line (?P<cell_line>\d+))"
)
# A message that TensorFlow's C++ code logs. Another thread may print one between the lines of a traceback.
_LOG = re.compile(r"(?:\d{4}-\d\d-\d\d [\d:.]+: [IWE] |[IWE]\d{4} [\d:]{8,}\.\d+ +\d+ )\S+:\d+\] ")
MESSAGE_END = re.compile(r"^(Additional GRPC error information|:(?:\{|UNKNOWN:)|\t ?\[\[|\t*\[\[\{\{node)")
"""Lines after the text of TensorFlow's message of an operation."""
DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"
# Lines that end a message: they come before another traceback, or before the report of a crash.
_NEXT = re.compile(
    rf"^({re.escape(DIRECT_CAUSE)}|During handling of the above exception, another exception occurred:"
    r"|Exception ignored |Error in (?:atexit|sys\.excepthook)|Exception in thread |Process \S+:$|Fatal Python error: )"
)


@dataclass
class Traceback:
    """One traceback of the output.

    Attributes:
        frames: File and line of each frame, the innermost last.
        message: The lines of its message. Other output may follow in them, because nothing marks the end of a message.
        start, end: The indices of its first line, and of the line after the first of its message.
        before: The last line before it that is not empty.
    """

    type: str
    message: list[str]
    frames: list[tuple[str, int]]
    start: int
    end: int
    before: str = ""


def is_users_file(file: str) -> bool:
    """Return whether a file of a traceback belongs to the user, not to Python, a package or tf4slurm."""
    if file.startswith("<") or "__autograph_generated_file" in file or file.startswith(f"{_PACKAGE}/"):
        return False
    return not re.search(r"/(?:site|dist)-packages/|/lib(?:64)?/(?:python|pypy)\d[\d.]*/|^/usr/lib/python", file)


def innermost_frame(
    frames: Sequence[tuple[str, int]], *, only_users: bool = False
) -> tuple[str, int] | tuple[None, None]:
    """Return file and line of the innermost frame in the user's code.

    If there is none, return the innermost frame or, with `only_users`, (None, None).
    """
    users = [frame for frame in frames if is_users_file(frame[0])]
    known = users or ([] if only_users else frames)
    return known[-1] if known else (None, None)


def find_tracebacks(lines: list[str]) -> list[Traceback]:
    """Return the tracebacks in the output, in their order. Those inside of messages are not included."""
    found: list[Traceback] = []
    index = 0
    while index < len(lines):
        read = _read_group if _GROUP.match(lines[index]) else _read_traceback
        traceback = None
        if _starts_traceback(lines, index):
            traceback = read(lines, index)
        elif match := _NOTEBOOK_HEADER.match(lines[index]):
            traceback = _read_notebook_traceback(lines, index, match["type"])
        elif FRAME.match(lines[index]):
            traceback = _read_syntax_error(lines, index)
        if traceback is None:
            index += 1
            continue
        traceback.before = next((line for line in reversed(lines[:index]) if line.strip()), "")
        found.append(traceback)
        index = max(traceback.end, index + 1)
    return found


def without_logs(lines: Sequence[str]) -> list[str]:
    """Return the output without the messages that TensorFlow's C++ code logs, except those of fatal errors.

    TensorFlow writes each in one piece, but Python a traceback in many, so that a message may stand between any two
    lines of a traceback, and inside of a line. A message with the error of a Python function has the function's
    traceback, with an empty line before each frame. The error of an operation on another host ends with further lines.
    """
    kept = []
    begun = ""  # the beginning of a line that a message has interrupted
    index = 0
    while index < len(lines):
        line = begun + lines[index]
        index += 1
        match = _LOG.search(line)
        if match is None:
            kept.append(line)
            begun = ""
            continue
        begun = line[: match.start()]
        if lines[index : index + 2] == [HEADER, ""]:
            end = next((each for each in range(index + 1, len(lines)) if EXCEPTION.match(lines[each])), len(lines) - 1)
            index = end + 1
            while index < len(lines) and not lines[index]:
                index += 1
        while index < len(lines) and MESSAGE_END.match(lines[index]):
            index += 1
        if begun and index < len(lines) and _starts_traceback(list(lines[index : index + 2]), 0):
            kept.append(begun)
            begun = ""
    return [*kept, begun] if begun else kept


def _next(lines: list[str], index: int) -> str:
    return lines[index + 1] if index + 1 < len(lines) else ""


def _read_traceback(lines: list[str], start: int) -> Traceback | None:
    """Read the traceback whose header is `lines[start]`. Return None if its output has been cut off."""
    frames = []
    for index in range(start + 1, len(lines) + 1):
        line = lines[index] if index < len(lines) else ""
        if index == len(lines) or _starts_traceback(lines, index):
            return None
        frame = FRAME.match(line)
        if frame is not None:
            frames.append((frame["file"], int(frame["line"])))
        elif line and not line.startswith((" ", "\t")):
            break
    match = EXCEPTION.match(lines[index])
    if match is None:
        return None
    end = index + 1
    while end < len(lines) and not _ends_message(lines, end):
        end += 1
    if match["type"] in _SYNTAX_ERRORS:
        frames = frames[-1:]  # the file with the error, also if it is not the user's
    message = [match["message"] or "", *lines[index + 1 : end]]
    return Traceback(match["type"], message, frames, start, index + 1)


def _ends_message(lines: list[str], index: int) -> bool:
    """Return whether a line begins something else than a message: another traceback, or the text before one."""
    return _starts_traceback(lines, index) or _NEXT.match(lines[index]) is not None


def _starts_traceback(lines: list[str], index: int) -> bool:
    """Return whether a line is the header of a traceback of Python. The first frame follows such a header at once."""
    return _HEADER.match(lines[index]) is not None and FRAME.match(_next(lines, index)) is not None


def _read_group(lines: list[str], start: int) -> Traceback | None:
    """Read an exception group. The result is its first exception that is no group."""
    end = start
    while end < len(lines) and re.match(r"^ *[|+]", lines[end]):
        end += 1
    inner = [_MARGIN.sub("", line) for line in lines[start + 1 : end]]
    for index, line in enumerate(inner):
        if line.strip() == HEADER:
            found = _read_traceback(inner, index)
            if found is not None and not found.type.endswith("Group"):
                return replace(found, start=start, end=end, message=found.message[:1])
        elif _GROUP_MEMBER.match(line.strip()) and (match := EXCEPTION.match(_next(inner, index))):  # it was not raised
            frames = [(frame["file"], int(frame["line"])) for frame in map(FRAME.match, inner[:index]) if frame]
            return Traceback(match["type"], [match["message"] or ""], frames, start, end)
    head = _read_traceback(["Traceback (most recent call last):", *inner], 0)
    return None if head is None else replace(head, start=start, end=end, message=head.message[:1])


def _read_syntax_error(lines: list[str], start: int) -> Traceback | None:
    """Read a syntax error of the main script, which Python prints without "Traceback"."""
    frame = FRAME.match(lines[start])
    assert frame is not None
    for index in range(start + 1, min(start + 5, len(lines))):
        match = EXCEPTION.match(lines[index])
        if match is not None and match["type"] in _SYNTAX_ERRORS:
            place = (frame["file"], int(frame["line"]))
            return Traceback(match["type"], [match["message"] or ""], [place], start, index + 1)
    return None


def _read_notebook_traceback(lines: list[str], start: int, kind: str) -> Traceback | None:
    """Read a traceback of IPython, as nbconvert and papermill print it."""
    frames = []
    for index in range(start + 1, len(lines)):
        if match := _NOTEBOOK_FRAME.match(lines[index]):
            place = (match["file"], match["line"]) if match["file"] else (match["cell"], match["cell_line"])
            frames.append((place[0], int(place[1])))
        elif lines[index].startswith(f"{kind}:") or lines[index] == kind:
            message = lines[index].removeprefix(kind).removeprefix(":").strip()
            return Traceback(kind, [message], frames, start, index + 1)
    return None
