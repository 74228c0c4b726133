"""The start and end of tf4slurm's programs, and the output of other programs."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from tf4slurm.errors import Tf4SlurmError
from tf4slurm.system.output import LogHandler


def run_program(main: Callable[[Mapping[str, str]], object]) -> NoReturn:
    """Run `main(environ)` and exit with its exit code; print a `Tf4SlurmError` without a traceback.

    `environ` is a copy of os.environ for child processes. Afterwards this function changes os.environ, to silence
    gRPC's messages about clients that send invalid data, and to turn off its fork handlers.
    """
    environ = dict(os.environ)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # the handlers abort children that Python 3.10 starts by fork
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.pop("GRPC_TRACE", None)  # traces show the token
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # after `>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    level = environ.get("TF4SLURM_LOG", "WARNING").upper()
    handlers = (LogHandler(sys.stderr),)
    logging.basicConfig(handlers=handlers, level=level, format="tf4slurm: %(levelname)s: %(message)s")
    try:
        exit_code = main(environ)
    except Tf4SlurmError as error:
        with contextlib.suppress(OSError):
            print(f"tf4slurm: {error}", file=sys.stderr)
        exit_code = error.exit_code
    except SystemExit as end:  # also raised by click
        exit_code = end.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has exited (`| head`), which does not change the exit code
            stream.flush()
    # Skip exit handlers, because a thread may wait for a paused terminal.
    os._exit(exit_code if isinstance(exit_code, int) else int(exit_code is not None))


def main_command(module: str, argument: object = "") -> tuple[str, ...]:
    """Return the command that calls `main(argument)` of a module of tf4slurm."""
    # Not "-m", with which a json.py in the user's directory would replace Python's json module.
    code = f"import sys; sys.path[:1] == [''] and sys.path.pop(0); from tf4slurm.{module} import main; main({argument})"
    return (sys.executable, "-c", code)


def read_output(*command: str, timeout_seconds: float = 20.0) -> str | None:
    """Return the output of a program; None if it fails, does not exist or takes too long."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds
        )
        return done.stdout.decode(errors="replace")
    return None
