"""tf4slurm.shutdown under plain srun, by the control service: ps exit when the last worker has finished or failed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

SCRIPT = """
import os, pathlib, sys, time
import tf4slurm
_, role, index = tf4slurm.get_server_dictionary({roles!r})
directory = pathlib.Path(sys.argv[1])
mine = directory / f"{{role}}-{{index}}"
mine.with_suffix(".draft").write_text(f"{{os.environ['SLURMD_NODENAME']}} {{os.getpid()}}")
mine.with_suffix(".draft").rename(mine)
if role == "ps":
    ending = tf4slurm.shutdown.wait_for_workers(timeout_seconds=150)
    print(role, index, "done", *map(str, ending.done), "failed", *map(str, ending.failed), flush=True)
    (directory / f"{{role}}-{{index}}-left").write_text(str(time.time()))
else:
    tf4slurm.shutdown.signal_at_exit()
    end = directory / f"{{role}}-{{index}}-end"
    while not end.exists():
        time.sleep(0.02)
    (directory / f"{{role}}-{{index}}-ended").write_text(str(time.time()))
    exec(end.read_text())
"""


class Step:
    """A running step of the script, one task per host."""

    def __init__(self, lab: SlurmLab, directory: Path, roles: list[str]) -> None:
        (directory / "script.py").write_text(SCRIPT.format(roles=roles))
        self.directory = directory
        self._output = (directory / "output").open("w+")
        self.process = lab.popen(
            *("srun", "-Q", "-K0", f"-n{len(roles)}", f"-N{len(roles)}"),
            *(sys.executable, str(directory / "script.py"), str(directory)),
            cwd=directory,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, *names: str, timeout_seconds: float = 60) -> None:
        for name in names:
            path = self.directory / name
            assert wait_until(path.exists, timeout_seconds), f"no {name}: {self.output}"

    def end(self, name: str, how: str = "") -> None:
        draft = self.directory / "draft"
        draft.write_text(how)
        draft.rename(self.directory / f"{name}-end")

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()


@pytest.fixture
def step(lab: SlurmLab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Step]:
    step = Step(lab, tmp_path, request.param)
    yield step
    step.close()


PS_FIRST = pytest.mark.parametrize("step", [["ps", "worker", "worker", "ps"]], indirect=True)
BOTH_ORDERS = pytest.mark.parametrize(
    "step", [["ps", "worker", "worker", "ps"], ["worker", "ps", "worker", "ps"]], indirect=True
)
ALL = ("ps-0", "ps-1", "worker-0", "worker-1")


@BOTH_ORDERS
def test_all_tasks_end_when_the_last_worker_has_finished(step: Step) -> None:
    step.wait_for(*ALL)
    step.end("worker-0")
    step.wait_for("worker-0-ended")
    time.sleep(0.5)
    assert not (step.directory / "ps-1-left").exists()
    step.end("worker-1")
    assert step.process.wait(60) == 0
    for index in (0, 1):
        assert f"ps {index} done worker/0 worker/1 failed\n" in step.output


@PS_FIRST
@pytest.mark.parametrize("how", ["raise ValueError('no')", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_failed_worker_counts_as_finished(step: Step, how: str) -> None:
    step.wait_for(*ALL)
    step.end("worker-0", how)
    step.end("worker-1")
    assert step.process.wait(60) != 0
    for index in (0, 1):
        assert f"ps {index} done worker/1 failed worker/0\n" in step.output


@pytest.mark.long
@PS_FIRST
def test_other_ps_exits_when_the_host_of_the_service_is_killed(step: Step, lab: SlurmLab) -> None:
    step.wait_for(*ALL)
    node, process_id = (step.directory / "ps-0").read_text().split()
    lab.on(node, "kill", "-9", process_id)
    for name in ("worker-0", "worker-1"):
        step.end(name)
    assert step.process.wait(60) == 137
    assert "ShutdownError: How worker/0 and worker/1 end stays unknown. ps/0 on" in step.output
