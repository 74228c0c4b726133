"""Random interruptions, kills and restarts of a notebook with a LocalCluster: no call hangs, no process stays."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.notebook import Notebook, kernel
from tests.processes import marked_processes, wait_until, wait_until_gone
from tests.tensorflow.test_local_cluster import RESUMED_CELL
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.spec.job_spec import JobSpec

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

NUM_FAULTS = 25
LOCAL = "tf4slurm.LocalCluster(ps=1, workers=2)"
KILL = """
import psutil
for process in psutil.process_iter(["environ"]):
    environ = process.info["environ"] or {{}}
    is_in_job = environ.get("TF4SLURM_RUN_DIRECTORY") == str(cluster.run_directory.path)
    if is_in_job and environ.get("TF4SLURM_TASK") == {task!r}:
        process.kill()
"""


class Session:
    """A person with a notebook: a cluster in its kernel, and faults."""

    def __init__(
        self, notebook: Notebook, directory: Path, chance: random.Random, mark: str, cluster: str = LOCAL
    ) -> None:
        """`cluster` is the expression that makes a cluster of a ps and two workers."""
        self._notebook, self._directory, self._chance, self._mark = notebook, directory, chance, mark
        self._cluster = cluster
        self._worker_kills = self._interrupts = 0
        self.start()

    @property
    def _run(self) -> RunDirectory:
        return RunDirectory(Path(self._notebook.run("print(cluster.run_directory.path)").split()[-1]))

    def start(self) -> None:
        self._begin(f"{self._cluster}.start()")

    def _begin(self, cluster: str) -> None:
        self._worker_kills = 0
        self._notebook.run(f"import os, tf4slurm\ncluster = {cluster}\n{RESUMED_CELL}")

    def train(self) -> None:
        assert self._notebook.run("print(train(int(step) + 20))").split()[-1] == "True"

    def interrupt(self) -> None:
        self._interrupts += 1
        begun = self._directory / f"begun-{self._interrupts}"
        error = self._notebook.interrupt(f"open({begun.name!r}, 'w').close(); train(10**9)", begun)
        assert error == "KeyboardInterrupt"

    def kill_worker(self) -> None:
        if self._worker_kills < JobSpec.max_worker_restarts:
            self._worker_kills += 1
            self._notebook.run(KILL.format(task="worker/0"))
        self.train()

    def scale(self) -> None:
        self._notebook.run(f"cluster.scale({self._chance.choice((2, 3))})")
        self.train()

    def restart(self) -> None:
        attach = self._notebook.run("cluster.restart(timeout_seconds=120)").partition("call ")[2].partition(" there")[0]
        self._notebook.restart(now=self._chance.random() < 0.5)
        self._begin(attach)

    def kill_ps(self) -> None:
        self._notebook.run(KILL.format(task="ps/0"))
        assert self._notebook.fail("train(10**9)").startswith("ParameterServerLostError")
        self.restart()

    def close(self) -> None:
        directory = self._run
        self._notebook.run("cluster.close()")
        self._expect(directory, "COMPLETED", 0)

    def kill_kernel(self) -> None:
        directory = self._run
        os.kill(int(self._notebook.run("print(os.getpid())")), signal.SIGKILL)
        self._expect(directory, "FAILED", 7)

    def suffer(self, num_faults: int) -> None:
        """Let random faults happen, and train in the end."""
        faults = [self.train, self.interrupt, self.kill_worker, self.scale, self.restart, self.kill_ps]
        faults += [self.restart, self.kill_ps, self.close, self.kill_kernel]
        for number in range(num_faults):
            fault, begin = self._chance.choice(faults), time.monotonic()
            fault()
            print(f"{number}: {fault.__name__} {time.monotonic() - begin:.1f} s", flush=True)
        self.train()

    def _expect(self, directory: RunDirectory, state: str, exit_code: int) -> None:
        """Wait for the end of the cluster, and start another one in a new kernel."""
        self._notebook.restart(now=True)
        assert not wait_until_gone_except_kernel(self._mark, self._notebook)
        result = directory.read(ResultFile)
        assert result is not None
        assert (result.state, result.exit_code) == (state, exit_code)
        self.start()


def wait_until_gone_except_kernel(mark: str, notebook: Notebook) -> list[int]:
    """Return the processes of the test that stay beside the new kernel."""
    kernel_id = int(notebook.run("import os; print(os.getpid())"))

    def find_left() -> list[int]:
        return [each.pid for each in marked_processes(mark) if each.pid != kernel_id]

    wait_until(lambda: not find_left(), JobSpec.heartbeat_timeout_seconds)
    return find_left()


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [37])
def test_random_faults_of_a_notebook_leave_no_hang_and_no_process(tmp_path: Path, process_mark: str, seed: int) -> None:
    chance = random.Random(seed)
    with kernel(tmp_path) as notebook:
        Session(notebook, tmp_path, chance, process_mark).suffer(NUM_FAULTS)
    assert not wait_until_gone(process_mark, 30)
