"""`LocalCluster`: ps and workers on this host, with a notebook as their chief."""

from __future__ import annotations

import os
import subprocess
import sys

from tf4slurm.api import own_command
from tf4slurm.clusters.base import NotebookCluster
from tf4slurm.clusters.launcher_process import (
    SERVER_PROGRAM,
    AttachedLauncher,
    LauncherProcess,
    end_processes,
    start_process,
)
from tf4slurm.errors import JobStateError
from tf4slurm.jobs.registry import find_job
from tf4slurm.jobs.run_directory import RunDirectory


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
        self._launcher: LauncherProcess | AttachedLauncher | None = None
        self._added: list[subprocess.Popen[bytes]] = []  # the joined workers, without those that were asked to leave
        self._leaving: list[subprocess.Popen[bytes]] = []

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
            name = directory.path.name
            text = f"{name} runs in job {file.job_id} of Slurm: call tf4slurm.SlurmCluster.attach({name!r})."
            raise JobStateError(text, job=directory.path.name, state="RUNNING")
        cluster = cls(
            file.counts.get("ps", 0),
            file.counts.get("worker", 0),
            start_timeout_seconds=start_timeout_seconds,
            runs_directory=directory.path.parent,
        )
        assert file.process is not None
        cluster._launcher = AttachedLauncher(file.process)
        cluster._attach(directory)
        return cluster

    def _launch(self) -> RunDirectory:
        self._launcher = launcher = LauncherProcess(self._command(), self._timeout_seconds)
        return launcher.launch()

    def _command(self) -> list[str]:
        ps, workers = self._counts
        run = ["run", "--local", "--external-chief", "--ps", str(ps), "--workers", str(workers), "--name", "notebook"]
        options = ["--runs-directory", str(self._runs_directory), "--start-timeout", f"{self._timeout_seconds:g}"]
        return own_command(*run, *options, "--", sys.executable, *SERVER_PROGRAM)

    def _has_launcher_ended(self) -> bool:
        return self._launcher is not None and self._launcher.has_ended()

    def _describe_launch(self) -> str:
        return "" if self._launcher is None else self._launcher.describe()

    def _end_launcher(self, *, is_started: bool) -> None:
        if self._launcher is not None:
            self._launcher.end(is_started=is_started)
        end_processes([*self._added, *self._leaving])  # the launcher has ended them

    def _scale(self, num_added: int) -> None:
        assert self.run_directory is not None
        output = subprocess.DEVNULL if self._launcher is None else self._launcher.output
        self._added = [worker for worker in self._added if worker.poll() is None]
        while len(self._added) > num_added:
            self._leaving.append(self._added.pop())
            self._leaving[-1].terminate()
        while len(self._added) < num_added:
            command = own_command("join", str(self.run_directory.path))
            self._added.append(start_process(command, output))
