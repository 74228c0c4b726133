"""What the programs of tf4slurm share: their start and end, and threads that do not block an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from tf4slurm.errors import Tf4SlurmError
from tf4slurm.system.output import LogHandler

_T = TypeVar("_T")


def run_program(main: Callable[[Mapping[str, str]], object]) -> NoReturn:
    """Run `main(environ)` and exit with its exit code; print a `Tf4SlurmError` without a traceback.

    `environ` is a copy of os.environ for child processes. Afterwards this function changes os.environ, to silence
    gRPC's messages about clients that fail the TLS handshake or send invalid data.
    """
    environ = dict(os.environ)
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


def in_thread(function: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
    """Run a function that may wait for a file system in a new thread, so that the event loop does not wait.

    A parallel file system may stall for 30 to 300 s during a failover, and a waiting thread cannot be ended: if the
    future is cancelled, the thread continues and its result is dropped. `asyncio.to_thread` is not
    used, because asyncio.run waits for its threads at the end.
    """
    thread = ThreadPoolExecutor(1)
    result = asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
    thread.shutdown(wait=False)
    return result
