"""`LocalCluster`: ps and workers beside a notebook, which leads them as the chief."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tf4slurm.errors import RendezvousError, RendezvousTimeoutError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.reachability import bypass_proxies
from tf4slurm.system import exec_child
from tf4slurm.tensorflow.forming import lead_servers

_RUN_DIRECTORY = "run directory "  # as the launcher says it
_LOOK_SECONDS = 0.05
_END_SECONDS = 15.0
_TAIL_CHARACTERS = 2_000
_running: list[LocalCluster] = []


class LocalCluster:
    """Local ps and workers for as long as a `with` block lasts; this process is their chief.

    They are the tasks of an ordinary job of tf4slurm: its `run_directory` has their logs, and they end with this
    process, whatever ends it. TensorFlow keeps what it knows of a cluster until a process ends: for another one, start
    another process (in a notebook, restart the kernel).

    Attributes:
        cluster: The addresses of each role, such as {"chief": ["127.0.0.1:40123"], "ps": […], "worker": […]}.
        run_directory: The run directory of the job.
    """

    def __init__(
        self,
        ps: int = 1,
        workers: int = 2,
        *,
        start_timeout_seconds: float = 120.0,
        runs_directory: str | os.PathLike[str] = "runs",
    ) -> None:
        """Nothing is started yet."""
        self.cluster: dict[str, list[str]] = {}
        self.run_directory: RunDirectory | None = None
        self._counts = (ps, workers)
        self._timeout_seconds = start_timeout_seconds
        self._runs_directory = Path(runs_directory)
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> LocalCluster:
        """Start them.

        Raises:
            RendezvousError: They could not be started; the text holds what the launcher said.
            RendezvousTimeoutError: They did not start in time.
        """
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tf4slurm-")))
            with (directory / "output").open("wb") as output:
                launcher = subprocess.Popen(
                    self._command(directory), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
            stack.callback(_end, launcher, directory)
            deadline = time.monotonic() + self._timeout_seconds
            while not (directory / "tf_config").exists():
                said = (directory / "output").read_text(errors="replace")[-_TAIL_CHARACTERS:]
                if launcher.poll() is not None:
                    raise RendezvousError(f"The cluster could not be started (exit {launcher.returncode}):\n{said}")
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(
                        f"The cluster did not start within {self._timeout_seconds:g} s. Raise start_timeout_seconds, "
                        f"or see what was said:\n{said}"
                    )
                time.sleep(_LOOK_SECONDS)
            self.cluster = json.loads((directory / "tf_config").read_text())["cluster"]
            said = (directory / "output").read_text(errors="replace")
            self.run_directory = RunDirectory(Path(said.partition(_RUN_DIRECTORY)[2].partition("\n")[0]))
            _running.append(self)
            stack.callback(_running.remove, self)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them all."""
        self._cleanup.close()

    def strategy(self, **options: Any) -> Any:
        """Return a tf.distribute.ParameterServerStrategy over this cluster; `options` are its own.

        Raises:
            RendezvousTimeoutError: A server did not come up in time; the text names each, and its log.
        """
        if not self.cluster:
            raise RendezvousError("The cluster is not running. Use it as: with LocalCluster() as cluster: …")
        os.environ["TF_GRPC_REUSE_PORT"] = "true"  # the agent holds the chief's port, too
        os.environ.update(bypass_proxies(os.environ, ["127.0.0.1"]))
        from tf4slurm.tensorflow.keras_limits import tell_keras_limits

        tell_keras_limits()
        return lead_servers(self.cluster, self.run_directory, self._timeout_seconds, **options)

    def _command(self, directory: Path) -> list[str]:
        """Return the command of the job; the kernel ends its launcher with this process."""
        ps, workers = self._counts
        owned = [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), "0"]
        run = ["run", "--local", "--ps", str(ps), "--workers", str(workers), "--name", "notebook"]
        where = ["--runs-directory", str(self._runs_directory), "--start-timeout", f"{self._timeout_seconds:g}"]
        where += ["--heartbeat-timeout", "3", "--heartbeat-interval", "0.5", "--"]
        seat = [sys.executable, "-m", "tf4slurm.tensorflow.seat", str(directory)]
        return [*owned, sys.executable, "-m", "tf4slurm", *run, *where, *seat]


def running_cluster() -> LocalCluster | None:
    """Return the LocalCluster in whose block this process is; None if there is none."""
    return _running[-1] if _running else None


def _end(launcher: subprocess.Popen[bytes], directory: Path) -> None:
    (directory / "end").touch()
    try:
        launcher.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()  # its agents end by themselves
        launcher.wait()
