"""Agents as forks: their exits are reported, and the end of a job kills them and nothing else."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.jobs import TF4SLURM

_SCRIPT = """
import asyncio, os, signal
from tf4slurm.launch.spawners import LocalSpawner
from tf4slurm.spec.job_spec import JobSpec

class Listener:
    def on_output(self, line): pass
    def on_all_exit(self, returncode, words): pass
    def on_agent_exit(self, rank, returncode): print(rank, returncode, flush=True)

async def main():
    victim = spawner._agents[1].process
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    await spawner.start({"TF4SLURM_HUGE": "x" * 200_000}, Listener())  # more than the pipe takes by itself
    await spawner.close(0.2)

spawner = LocalSpawner(JobSpec(("true",), ps=0, workers=2), {})
asyncio.run(main())
"""


def test_agent_that_exits_before_it_has_its_environment_is_reported() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert set(codes) == {"0", "1", "2"}
    assert codes["1"] == "-9"


@pytest.mark.parametrize("session", [(), ("setsid",)], ids=["in its group", "in a session of its own"])
def test_end_of_a_job_kills_no_process_that_a_shell_had_before(tmp_path: Path, session: tuple[str, ...]) -> None:
    helper = shlex.join([*session, "sleep", "300"])
    line = f'{helper} >/dev/null 2>&1 & echo $!; exec "$0" run --ps 0 --workers 0 -- echo done'
    done = subprocess.run(
        ["bash", "-c", line, TF4SLURM], capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    process = psutil.Process(int(done.stdout.split()[0]))
    assert process.status() != psutil.STATUS_ZOMBIE
    process.kill()
