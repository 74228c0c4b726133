"""The launcher of a cluster's job on this host, which starts the tasks here or in the allocation of this process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tf4slurm.errors import RendezvousError, RendezvousTimeoutError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Process
from tf4slurm.system.exec_child import NOW_SIGNAL
from tf4slurm.system.variables import ANSWER_VARIABLE

SERVER_PROGRAM = ("-m", "tf4slurm.tensorflow.server_program")
"""The arguments of Python for the tasks of a cluster, which only run a TensorFlow server."""

_END_SECONDS = 15.0
_POLL_SECONDS = 0.05
_MAX_OUTPUT_BYTES = 2_000


class LauncherProcess:
    """A process of `tf4slurm run --external-chief` and its output."""

    def __init__(self, command: Sequence[str], timeout_seconds: float) -> None:
        """`timeout_seconds` is the timeout for its run directory."""
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read until the end of the launcher
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._launcher: subprocess.Popen[bytes] | None = None

    def launch(self) -> RunDirectory:
        """Start the launcher. Return its run directory, as soon as it exists."""
        readable, writable = os.pipe()
        try:
            environ = {**os.environ, ANSWER_VARIABLE: f"/dev/fd/{writable}"}
            self._launcher = start_process(self._command, self.output, environ, (writable,))
        finally:
            os.close(writable)
        with open(readable, "rb", buffering=0) as answer:
            if not select.select([answer], [], [], self._timeout_seconds)[0]:
                raise RendezvousTimeoutError(
                    f"The cluster did not start within {self._timeout_seconds:g} s. Raise start_timeout_seconds, or "
                    "see the launcher's output:"
                )
            path = answer.read(65536)
        if not path:
            returncode = self._launcher.wait()
            raise RendezvousError(f"The cluster could not be started (exit {returncode}):")
        return RunDirectory(Path(os.fsdecode(path)))

    def has_ended(self) -> bool:
        """Return whether the launcher has exited."""
        return self._launcher is not None and self._launcher.poll() is not None

    def describe(self) -> str:
        """Return the end of the launcher's output."""
        size = os.fstat(self.output.fileno()).st_size
        start = max(0, size - _MAX_OUTPUT_BYTES)
        return os.pread(self.output.fileno(), _MAX_OUTPUT_BYTES, start).decode(errors="replace")

    def end(self, *, is_started: bool) -> None:
        """Wait for the end of the launcher. Kill it after 15 s: its agents then exit.

        `is_started` is whether its cluster has formed. If not, the launcher is asked to end.
        """
        if self._launcher is None:
            return
        if not is_started:
            self._launcher.send_signal(NOW_SIGNAL)
        end_processes([self._launcher])


class AttachedLauncher:
    """A launcher of this host that another process has started."""

    output = subprocess.DEVNULL

    def __init__(self, process: Process) -> None:
        self._process = process

    def has_ended(self) -> bool:
        """Return whether the launcher has exited."""
        return not self._process.is_alive()

    def describe(self) -> str:
        """Return "": its output went to the other process."""
        return ""

    def end(self, *, is_started: bool) -> None:
        """Wait for the end of the launcher. Kill it after 15 s. `is_started` does not matter."""
        deadline = time.monotonic() + _END_SECONDS
        while self._process.is_alive():
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.id, signal.SIGKILL)
                return
            time.sleep(_POLL_SECONDS)


def start_process(
    command: Sequence[str],
    output: IO[bytes] | int,
    environ: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process of a cluster, in a session of its own. `environ` are its variables, by default those of this one.

    Else the signal by which Jupyter interrupts a cell would end the job.
    """
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def end_processes(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait for the ends of processes. Kill each that has not ended after 15 s."""
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
