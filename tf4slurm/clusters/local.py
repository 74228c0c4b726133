"""`LocalCluster`: ps and workers on this host, with a notebook as their chief."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from tf4slurm.clusters.base import NotebookCluster
from tf4slurm.errors import JobStateError, RendezvousError, RendezvousTimeoutError
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Process
from tf4slurm.system.exec_child import NOW_SIGNAL
from tf4slurm.system.variables import ANSWER_VARIABLE

_END_SECONDS = 15.0
_POLL_SECONDS = 0.05
_MAX_OUTPUT_BYTES = 2_000
_SERVER = (sys.executable, "-m", "tf4slurm.tensorflow.server_program")


class LocalCluster(NotebookCluster):
    """ps and workers on this host, whose chief is this process, from `start` to `close` or during a `with` block.

    Example:
        cluster = tf4slurm.LocalCluster(ps=1, workers=2).start()
        strategy, coordinator = tf4slurm.tensorflow.parameter_server_strategy()
        …  # in this cell or in others
        cluster.close()

    The tasks belong to an ordinary job, with logs and a report in its `run_directory`. They end with this process, also
    if it is killed. Variables and models can be used in all cells until `close`. TensorFlow can connect a process to
    one cluster only: for another one, restart the notebook's kernel.

    Attributes:
        cluster: The cluster spec, such as {"chief": ["127.0.0.1:40123"], "ps": […], "worker": […]}. Empty before
            `start`.
        run_directory: The run directory of the job, or None before `start`.
    """

    def __init__(
        self,
        ps: int = 1,
        workers: int = 2,
        *,
        start_timeout_seconds: float = 120.0,
        runs_directory: str | os.PathLike[str] = "runs",
    ) -> None:
        """Store the arguments. `start` starts the tasks.

        Args:
            ps: Number of ps (default 1).
            workers: Number of workers (default 2).
            start_timeout_seconds: Timeout in seconds for the start of the tasks (default 120). The same timeout begins
                again when a strategy is created, for the tasks' servers.
            runs_directory: Parent of the job's run directory (default "runs").
        """
        super().__init__(start_timeout_seconds)
        self._counts = (ps, workers)
        self._runs_directory = runs_directory
        self._launcher: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._attached: Process | None = None  # the launcher of a job that this process has not started

    @classmethod
    def attach(cls, job: str, *, start_timeout_seconds: float = 120.0) -> LocalCluster:
        """Join a running cluster of this host as its next chief, after its chief has called `restart`.

        The result is as after `start`: `close` ends the job.

        Args:
            job: The name of the job, or its run directory. `restart` prints it.
            start_timeout_seconds: As for `LocalCluster`.

        Raises:
            UnknownJobError: There is no such job.
            JobStateError: The job has ended, has a chief, or is no cluster of this host. The message says which.
            RunDirectoryError, UntrustedFileError: The files of the job cannot be read or trusted.
            RendezvousError, RendezvousTimeoutError: As for `start`.
        """
        from tf4slurm.joining.attach import check_attachable  # imported here: it imports asyncio

        directory, file = check_attachable(find_job(job, os.environ))
        if file.job_id is not None:
            text = f"{directory.path.name} is job {file.job_id} of Slurm, and no cluster of local processes."
            raise JobStateError(text, job=directory.path.name, state="RUNNING")
        cluster = cls(
            file.counts.get("ps", 0),
            file.counts.get("worker", 0),
            start_timeout_seconds=start_timeout_seconds,
            runs_directory=directory.path.parent,
        )
        cluster._attached = file.process
        cluster._attach(directory)
        return cluster

    def _launch(self) -> RunDirectory:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - read until the end of the launcher
        readable, writable = os.pipe()
        try:
            self._launcher = subprocess.Popen(
                self._command(),
                env={**os.environ, ANSWER_VARIABLE: f"/dev/fd/{writable}"},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(writable,),
                start_new_session=True,  # else the signal by which Jupyter interrupts a cell would end the job
            )
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

    def _command(self) -> list[str]:
        ps, workers = self._counts
        run = ["run", "--local", "--external-chief", "--ps", str(ps), "--workers", str(workers), "--name", "notebook"]
        options = ["--runs-directory", str(self._runs_directory), "--start-timeout", f"{self._timeout_seconds:g}"]
        return [sys.executable, "-m", "tf4slurm", *run, *options, "--", *_SERVER]

    def _has_launcher_ended(self) -> bool:
        if self._attached is not None:
            return not self._attached.is_alive()
        return self._launcher is not None and self._launcher.poll() is not None

    def _describe_launch(self) -> str:
        if self._output is None:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - _MAX_OUTPUT_BYTES)
        return os.pread(self._output.fileno(), _MAX_OUTPUT_BYTES, start).decode(errors="replace")

    def _end_launcher(self, *, is_started: bool) -> None:
        """Wait for the end of the launcher. Kill it after 15 s: its agents then exit."""
        if self._attached is not None:
            _end_process(self._attached)
        if self._launcher is None:
            return
        if not is_started:
            self._launcher.send_signal(NOW_SIGNAL)
        try:
            self._launcher.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()


def _end_process(process: Process) -> None:
    """Wait for the end of a process of this host. Kill it after 15 s."""
    deadline = time.monotonic() + _END_SECONDS
    while process.is_alive():
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.id, signal.SIGKILL)
            return
        time.sleep(_POLL_SECONDS)
