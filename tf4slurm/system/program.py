"""The start and end of tf4slurm's programs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from tf4slurm.errors import Tf4SlurmError
from tf4slurm.system.output import LogHandler


def run_program(main: Callable[[Mapping[str, str]], object]) -> NoReturn:
    """Run `main(environ)` and exit with its exit code; print a `Tf4SlurmError` without a traceback.

    `environ` is a copy of os.environ for child processes. Afterwards this function changes os.environ, to silence
    gRPC's messages about clients that fail the TLS handshake or send invalid data, and to turn off its fork handlers.
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
