"""Start and end of a program of tf4slurm: the command line, or an agent that srun has started."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from tf4slurm.errors import Tf4SlurmError
from tf4slurm.system.output import LogHandler


def silence_grpc() -> None:
    """Keep gRPC from writing lines to standard error for each client that fails its TLS handshake or sends garbage.

    Call it before gRPC starts. It keeps a verbosity that the user has set, but no traces, because they show the token.
    Children get the environment as it was before.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.pop("GRPC_TRACE", None)


def run_program(main: Callable[[Mapping[str, str]], object]) -> NoReturn:
    """Run `main(environ)` and exit with its exit code; print an error of tf4slurm as one line.

    `environ` is a copy of os.environ from before `silence_grpc` changes gRPC's variables; child processes get the copy.
    """
    environ = dict(os.environ)
    silence_grpc()
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
    except SystemExit as end:  # click raises it, too
        exit_code = end.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has exited (`| head`), which does not change the exit code
            stream.flush()
    # Without exit handlers, because a thread may wait for a terminal on hold.
    os._exit(exit_code if isinstance(exit_code, int) else int(exit_code is not None))
