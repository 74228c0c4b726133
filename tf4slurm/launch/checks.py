"""Checks of a job's command before the job starts or is submitted."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tf4slurm.agent.container import check_bindable
from tf4slurm.errors import CommandError, OptionError
from tf4slurm.jobs.known_errors import RESOLVER
from tf4slurm.spec.job_spec import ACTIVE_ENVIRONMENT, JobSpec

logger = logging.getLogger(__name__)

_MAX_SHEBANG = 4096  # bytes; Linux reads 256
_SCRIPT_ENDINGS = (".py", ".sh")
_PRINTS_AND_EXITS = frozenset(("--help", "--version", "--help-all", "--help-env", "--help-xoptions"))
_TENSORFLOWS_RESOLVER = re.compile(
    r"^[^#\n]*\b(slurm_)?cluster_resolver(\.| import [\w, (]*)SlurmClusterResolver\b", re.MULTILINE
)


class _Meaning(enum.Enum):
    PROGRAM = "no script follows: the program is its value or its effect"
    INPUT = "the program is read from standard input"
    VALUE = "its value is the next word"
    FLAG = "it stands alone"


@dataclass(frozen=True)
class _Interpreter:
    """An interpreter, and the options that decide from where it reads its program.

    Attributes:
        name: Pattern of the interpreter's file name.
        program: Letters of options whose value is the program (-c CODE, -m MODULE), or that only print (-V).
        value: Letters of options with another value.
        value_words: Long options with another value.
        input: Letters of options that make the interpreter read the program from standard input.
        is_shell: Whether the interpreter is a shell. For a shell, a dash ends the options, + also starts an option, and
            a value is always a separate word. For Python, a dash is standard input.
    """

    name: re.Pattern[str]
    program: str
    value: str
    value_words: tuple[str, ...]
    input: str
    is_shell: bool


_INTERPRETERS = (
    _Interpreter(re.compile(r"(python|pypy)[\d.]*"), "cmVh?", "WX", ("--check-hash-based-pycs",), "", False),
    _Interpreter(re.compile(r"(ba|da|k|z)?sh"), "c", "oO", ("--rcfile", "--init-file"), "s", True),
)


def check_program_source(command: Sequence[str]) -> None:
    """Check that the command does not read its program from standard input, which is empty for every task.

    Raises:
        CommandError: The command is Python or a shell without a script, or with a dash instead of a script.
    """
    if _find_script(command) == "":
        raise CommandError(
            f"{shlex.join(command)!r} reads its program from standard input, which is empty for every task: nothing "
            f'would run. Name the script, such as "{command[0]} train.py", or give the program after -c.',
            command=command,
        )


def check_command(spec: JobSpec) -> None:
    """Check that the files that a job needs to start exist, and that its program is executable.

    These are the working directory, the archive of --stage-env, the program, and a script (.py or .sh) that the program
    runs if it is Python or a shell. With --container, the image is checked in place of the program and the script. The
    command of each element of a job array is checked.

    Raises:
        CommandError: The program, script, image or working directory does not exist, the program is not executable, or
            the path of a directory that the container needs contains "," or ":".
        OptionError: The archive of --stage-env does not exist.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "The working directory does not exist any more. Change to an existing one with cd."
        raise CommandError(text, command=spec.command) from None
    if spec.stage_env not in (None, ACTIVE_ENVIRONMENT) and not os.path.isfile(spec.stage_env):
        raise OptionError(
            f"The archive {spec.stage_env!r} of --stage-env does not exist. Give its path, or {ACTIVE_ENVIRONMENT!r}.",
            option="stage-env",
        )
    if spec.container:
        if "://" not in spec.container and not os.path.exists(spec.container):
            raise CommandError(f"The image {spec.container!r} of --container does not exist.", command=spec.command)
        check_bindable((Path.cwd(), spec.runs_directory.absolute() / spec.name), spec.command)
        return
    for command in {(each[0], _find_script(each)): each for each in spec.commands}.values():
        _check_program(command)
    if spec.data_workers:
        _check_program((spec.data_service_python,))


def warn_of_resolver(command: Sequence[str]) -> None:
    """Log a warning if a script uses TensorFlow's SlurmClusterResolver. Its cluster differs from that of tf4slurm."""
    for path in (Path(word) for word in command if word.endswith(".py")):
        with contextlib.suppress(OSError):
            if _TENSORFLOWS_RESOLVER.search(path.read_text(encoding="utf-8", errors="replace")):
                logger.warning("%s: %s", path, RESOLVER)
                return


def _check_program(command: Sequence[str]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        if os.path.exists(program):
            text = f'is not executable. Start it with its interpreter, such as "python {program}", or chmod +x it.'
        elif len(words := program.split()) > 1:
            line = shlex.join([*words, *command[1:]])
            text = f"does not exist: these are several words in quotes. Remove the quotes, such as -- {line}"
        else:
            text = "does not exist. Check its name, or the environment that should provide it."
        raise CommandError(f"The program {program!r} {text}", command=command)
    _check_line_endings(shutil.which(program) or program, command)
    check_script(command)


def check_script(command: Sequence[str]) -> None:
    """Check that the script (.py or .sh) exists that a command runs with Python or a shell.

    Raises:
        CommandError: The script does not exist.
    """
    script = _find_script(command)
    if script and script.endswith(_SCRIPT_ENDINGS) and not os.path.isfile(script):
        raise CommandError(f"The script {script!r} does not exist in {os.getcwd()}. Check its path.", command=command)


def _check_line_endings(path: str, command: Sequence[str]) -> None:
    """Refuse a program whose first line, such as "#!/usr/bin/env python3", ends with a carriage return.

    Linux takes that character for a part of the interpreter's name.
    """
    try:
        with open(path, "rb") as file:
            first = file.readline(_MAX_SHEBANG)
    except OSError:  # it may be executed, but not read
        return
    if first.startswith(b"#!") and first.endswith(b"\r\n"):
        raise CommandError(
            f"The script {command[0]!r} has the line endings of Windows (CRLF), so its first line names a program that "
            f"does not exist. Convert it: dos2unix {shlex.quote(path)}, or sed -i 's/\\r$//' {shlex.quote(path)}",
            command=command,
        )


def _find_script(command: Sequence[str]) -> str | None:
    """Return the script that a command runs with Python or a shell.

    Returns:
        The script, "" if the program is read from standard input, or None for any other command, such as `python -m`.
    """
    name = os.path.basename(command[0])
    interpreter = next((each for each in _INTERPRETERS if each.name.fullmatch(name)), None)
    if interpreter is None:
        return None
    words = iter(command[1:])
    for word in words:
        if word == "--" or (word == "-" and interpreter.is_shell):
            return next(words, "")
        if word == "-":
            return ""
        if not (word.startswith("-") or (word.startswith("+") and interpreter.is_shell)):
            return word
        meaning = _parse_option(word, interpreter)
        if meaning is _Meaning.PROGRAM:
            return None
        if meaning is _Meaning.INPUT:
            return ""
        if meaning is _Meaning.VALUE:
            next(words, None)
    return ""


def _parse_option(word: str, interpreter: _Interpreter) -> _Meaning:
    """Return what an option of Python or a shell means for the words after it (see `_Meaning`).

    The letters of several options may be combined, as in -um MODULE and -lc CODE.
    """
    if word.startswith("--"):
        is_program, has_value = word in _PRINTS_AND_EXITS, word in interpreter.value_words
        return _Meaning.PROGRAM if is_program else _Meaning.VALUE if has_value else _Meaning.FLAG
    for position, letter in enumerate(word[1:], 2):
        if letter in interpreter.program:
            return _Meaning.PROGRAM
        if letter in interpreter.input:
            return _Meaning.INPUT
        if letter in interpreter.value:
            is_in_word = not interpreter.is_shell and bool(word[position:])  # -Wignore
            return _Meaning.FLAG if is_in_word else _Meaning.VALUE
    return _Meaning.FLAG
