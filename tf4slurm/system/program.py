"""Run the main functions of tf4slurm's programs with one form of error messages, and read other programs' output."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from tf4slurm.errors import EXIT_PREFLIGHT, SettingsError, Tf4SlurmError
from tf4slurm.system.output import LogHandler

logger = logging.getLogger(__name__)

_LOG_VARIABLE = "TF4SLURM_LOG"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ESCAPE = "tf4slurm.escape"
_STANDARD_OUTPUT = "<stdout>"


def run_program(main: Callable[[Mapping[str, str]], object]) -> NoReturn:
    """Call `main(environ)`, and exit with the exit code that it returns (None is 0).

    A `Tf4SlurmError` is printed as a sentence, and the exit code is that of the error. An OSError or ValueError is
    printed as a sentence, too, and the exit code is 3. `environ` is a copy of os.environ, for child processes. After
    the copy, this function changes os.environ, to silence gRPC's messages about clients that send invalid data, and to
    turn off gRPC's fork handlers.
    """
    environ = dict(os.environ)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # the handlers abort children that Python 3.10 starts by fork
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.pop("GRPC_TRACE", None)  # traces show the token
    codecs.register_error(_ESCAPE, _escape)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # after `>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        getattr(sys, name).reconfigure(errors=_ESCAPE)
    sys.stdout = _StandardOutput.replacing(sys.stdout)
    message = ""
    exit_code = None
    try:
        _start_log(environ)
        exit_code = main(environ)
    except Tf4SlurmError as error:
        message, exit_code = str(error), error.exit_code
    except (OSError, ValueError) as error:
        logger.debug("the error:", exc_info=True)
        message, exit_code = explain(error), EXIT_PREFLIGHT
    except SystemExit as end:  # also raised by click
        exit_code = end.code
    if message:
        with contextlib.suppress(OSError):
            print(f"tf4slurm: {message}", file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has exited (`| head`), which does not change the exit code
            stream.flush()
    # Skip exit handlers, because a thread may wait for a paused terminal.
    os._exit(exit_code if isinstance(exit_code, int) else int(exit_code is not None))


class _StandardOutput(io.TextIOWrapper):
    """Standard output. An OSError of this stream has the file name "<stdout>"."""

    @classmethod
    def replacing(cls, stream: Any) -> _StandardOutput:
        options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        return cls(stream.detach(), **options)

    def write(self, text: str, /) -> int:
        with naming_standard_output():
            return super().write(text)

    def flush(self) -> None:
        with naming_standard_output():
            super().flush()


@contextlib.contextmanager
def naming_standard_output() -> Iterator[None]:
    """In a `with` block, set the file name of an OSError to "<stdout>", so that `explain` names standard output."""
    try:
        yield
    except OSError as error:
        error.filename = _STANDARD_OUTPUT
        raise


def _start_log(environ: Mapping[str, str]) -> None:
    level = (environ.get(_LOG_VARIABLE) or "WARNING").upper()
    if level not in _LEVELS:
        text = f"{_LOG_VARIABLE} is {environ[_LOG_VARIABLE]!r}. Expected one of {', '.join(_LEVELS)}."
        raise SettingsError(text, source=_LOG_VARIABLE)
    handlers = (LogHandler(sys.stderr),)
    logging.basicConfig(handlers=handlers, level=level, format="tf4slurm: %(levelname)s: %(message)s")


def explain(error: OSError | ValueError) -> str:
    """Return the text to print for an OSError or ValueError that no other code of tf4slurm has handled."""
    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        return "The working directory does not exist any more. Change to an existing one with cd."
    hint = f"{_LOG_VARIABLE}=DEBUG shows where."
    if isinstance(error, OSError) and error.filename is _STANDARD_OUTPUT:
        return f"Standard output cannot be written: {error.strerror}. Free some space, or write to another place."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}. {hint}"
    if isinstance(error, UnicodeError):
        return f"A text cannot be read or written in this locale: {error}. Choose UTF-8: export LC_ALL=C.UTF-8. {hint}"
    return f"{type(error).__name__}: {error}. {hint}"


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace a character that a stream cannot encode. This is an error handler for `codecs.register_error`.

    Return the replacement, and the position at which the encoding continues. Undecodable bytes of a file name are
    written unchanged. Other characters are written as escape sequences.
    """
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


def main_command(module: str, argument: object = "") -> tuple[str, ...]:
    """Return a Python command that calls the function `main` of a module of tf4slurm, such as "doctor.smoke_test".

    `argument` is the argument of the call, as Python source. By default `main` gets none.
    """
    # Not "-m", with which a json.py in the user's directory would replace Python's json module.
    code = f"import sys; sys.path[:1] == [''] and sys.path.pop(0); from tf4slurm.{module} import main; main({argument})"
    return (sys.executable, "-c", code)


def read_output(*command: str, timeout_seconds: float = 20.0) -> str | None:
    """Return the standard output of a program, or None if it fails, does not exist or times out (default 20 s)."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds
        )
        return done.stdout.decode(errors="replace")
    return None


def read_line(output: str, begin: str) -> Any:
    """Return the JSON value of the last line of `output` that starts with `begin` and is valid JSON.

    `begin` is the start of the JSON text, such as "{". Other lines are ignored, because the start-up files of a site's
    Python may print some.

    Raises:
        ValueError: No line that starts with `begin` is valid JSON.
    """
    for line in reversed(output.splitlines()):
        if line.startswith(begin):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    raise ValueError(f"no line of its output is an answer: {output[-300:]!r}")
