"""`LocalCluster`: ps and workers on this host, with a notebook as their chief.

`python -m tf4slurm.tensorflow.local_cluster DIRECTORY` is the program of each task. A ps or worker runs a TensorFlow
server. The chief's task represents the notebook: it writes DIRECTORY/cluster.json, and exits when the notebook creates
DIRECTORY/end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tf4slurm.errors import RendezvousError, RendezvousTimeoutError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.system import exec_child
from tf4slurm.system.files import open_private, replacing
from tf4slurm.system.variables import RUN_DIRECTORY_VARIABLE

_POLL_SECONDS = 0.05
_END_SECONDS = 15.0
_MAX_OUTPUT_CHARACTERS = 2_000
_running: list[LocalCluster] = []


class LocalCluster:
    """Runs local ps and workers during a `with` block. This process is their chief.

    The tasks belong to an ordinary job with logs in its `run_directory`. They end with this process, even if it is
    killed. TensorFlow can connect a process to one cluster only: for another one, restart the notebook's kernel.

    Attributes:
        cluster: The cluster spec, such as {"chief": ["127.0.0.1:40123"], "ps": […], "worker": […]}. It is empty before
            the `with` block.
        run_directory: The run directory of the job, or None before the `with` block.
    """

    def __init__(
        self,
        ps: int = 1,
        workers: int = 2,
        *,
        start_timeout_seconds: float = 120.0,
        runs_directory: str | os.PathLike[str] = "runs",
    ) -> None:
        """Store the arguments. `__enter__` starts the tasks.

        Args:
            ps: Number of ps (default 1).
            workers: Number of workers (default 2).
            start_timeout_seconds: Timeout in seconds for the start of the tasks (default 120). The same timeout begins
                again when a strategy is created, for the tasks' servers.
            runs_directory: Parent of the job's run directory (default "runs").
        """
        self.cluster: dict[str, list[str]] = {}
        self.run_directory: RunDirectory | None = None
        self._counts = (ps, workers)
        self._timeout_seconds = start_timeout_seconds
        self._runs_directory = runs_directory

    def __enter__(self) -> LocalCluster:
        """Start the tasks.

        Raises:
            RendezvousError: The job could not be started. The message has the launcher's output.
            RendezvousTimeoutError: The job did not start in time.
        """
        self._job = self._run()
        self._job.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End all tasks. If they still run after 15 s, kill the launcher, whose agents then exit."""
        self._job.__exit__(*error)

    def strategy(self, *, placement: str = "bytes", **options: Any) -> Any:
        """Return a tf.distribute.ParameterServerStrategy for this cluster. `options` are its further arguments.

        Args:
            placement: As for `parameter_server_strategy`.

        Raises:
            ValueError: `placement` is unknown.
            RendezvousError: The `with` block has not been entered.
            RendezvousTimeoutError: Servers did not start in time. The message names them and a log file.
        """
        if not self.cluster:
            raise RendezvousError("The cluster is not running. Use it as: with LocalCluster() as cluster: …")
        from tf4slurm.network.reachability import bypass_proxies  # imported here, because a task does not need it
        from tf4slurm.tensorflow.keras.limits import install_keras_limits
        from tf4slurm.tensorflow.servers import connect_parameter_server_strategy
        from tf4slurm.tensorflow.variable_placement import check_placement, place_variables

        check_placement(placement)
        os.environ["TF_GRPC_REUSE_PORT"] = "true"  # the agent holds the chief's port
        os.environ.update(bypass_proxies(os.environ, ["127.0.0.1"]))
        install_keras_limits()
        strategy = connect_parameter_server_strategy(self.cluster, self.run_directory, self._timeout_seconds, **options)
        place_variables(strategy, placement, len(self.cluster["ps"]), None)
        return strategy

    @contextlib.contextmanager
    def _run(self) -> Iterator[None]:
        """Start the job, and end it after the `with` block."""
        with tempfile.TemporaryDirectory(prefix="tf4slurm-") as name:
            directory = Path(name)
            command = self._command(directory)
            with open(directory / "output", "wb", opener=open_private) as output:
                launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            _running.append(self)
            try:
                self._wait_for_cluster(launcher, directory)
                described = json.loads((directory / "cluster.json").read_text())
                self.cluster = described["cluster"]
                self.run_directory = RunDirectory(Path(described["run_directory"]))
                yield
            finally:
                _running.remove(self)
                (directory / "end").touch(0o600)
                try:
                    launcher.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    launcher.kill()  # the agents then exit
                    launcher.wait()

    def _wait_for_cluster(self, launcher: subprocess.Popen[bytes], directory: Path) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not (directory / "cluster.json").exists():
            output = (directory / "output").read_text(errors="replace")[-_MAX_OUTPUT_CHARACTERS:]
            if launcher.poll() is not None:
                raise RendezvousError(f"The cluster could not be started (exit {launcher.returncode}):\n{output}")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"The cluster did not start within {self._timeout_seconds:g} s. Raise start_timeout_seconds, or "
                    f"see the launcher's output:\n{output}"
                )
            time.sleep(_POLL_SECONDS)

    def _command(self, directory: Path) -> list[str]:
        """Return the command of a launcher whose tasks run `main(directory)`.

        The kernel terminates the launcher when this process exits.
        """
        ps, workers = self._counts
        bound = [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), "0"]
        run = ["run", "--local", "--ps", str(ps), "--workers", str(workers), "--name", "notebook"]
        options = ["--runs-directory", str(self._runs_directory), "--start-timeout", f"{self._timeout_seconds:g}", "--"]
        task = [sys.executable, "-m", "tf4slurm.tensorflow.local_cluster", str(directory)]
        return [*bound, sys.executable, "-m", "tf4slurm", *run, *options, *task]


def running_cluster() -> LocalCluster | None:
    """Return the LocalCluster whose `with` block this process is in, or None."""
    return _running[-1] if _running else None


def main(directory: Path) -> None:
    """Run the task that TF_CONFIG names until the LocalCluster ends. The module's docstring describes `directory`."""
    current = current_server_dictionary()
    if current.task_type != "chief":
        from tf4slurm.tensorflow.servers import run_server

        run_server(current, None)
    with replacing(directory / "cluster.json") as file:
        content = {"cluster": current.cluster, "run_directory": os.environ[RUN_DIRECTORY_VARIABLE]}
        file.write(json.dumps(content).encode())
    while not (directory / "end").exists():
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
