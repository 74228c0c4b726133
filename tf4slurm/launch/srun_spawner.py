"""Spawner that starts agents on the hosts of a Slurm allocation, as one step."""

from __future__ import annotations

import asyncio
import functools
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf4slurm import errors
from tf4slurm.errors import LaunchError
from tf4slurm.launch.spawner import SpawnerListener, read_lines
from tf4slurm.slurm.commands import srun_command
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.system.program import in_thread

# Not "-m tf4slurm": a json.py in the user's directory would replace Python's own.
_MAIN = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from tf4slurm.cli.main import main; main()"
TF4SLURM = (sys.executable, "-c", _MAIN)
"""The command that runs this installation of tf4slurm on any host."""

# Without the modules site (-S) and ssl (imported by asyncio), an agent starts in two thirds of the time.
_PATH = [str(Path(errors.__file__).parents[1]), *filter(None, sys.path)]
_RUN_AGENT = (
    f"import sys; sys.path += {_PATH}; sys.modules['ssl'] = None; "
    "from tf4slurm.system.guard import start_guard; start_guard(); from tf4slurm.agent.agent import main; main()"
)
_AGENT = (sys.executable, "-I", "-S", "-c", _RUN_AGENT)
_MESSAGE_LINES = 10
_SIGNAL_SECONDS = 1.0  # after each signal; only SIGKILL ends an srun that waits for a lost host


class SrunSpawner:
    """Starts one agent per task of a step. Sends srun no signal while agents run, because srun would kill them all."""

    is_local = False

    def __init__(
        self,
        allocation: SlurmAllocation,
        num_tasks: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        srun_options: Sequence[str] = (),
    ) -> None:
        self._environ = environ
        self._command = srun_command(allocation, num_tasks, (*_AGENT, *command), srun_options)
        self._srun: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        start: functools.partial[subprocess.Popen[bytes]] = functools.partial(
            subprocess.Popen,
            self._command,
            env={**self._environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        starting = in_thread(start)
        try:
            self._srun = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_terminate)
            raise
        except OSError as error:
            raise LaunchError(
                f"srun cannot be started ({error}), but SLURM_JOB_ID is set: this is a Slurm allocation. "
                "Put Slurm's programs on PATH, or use --local for local processes.",
                command=self._command,
            ) from error
        self._watching = asyncio.create_task(self._watch(self._srun, listener))

    async def close(self, grace_period_seconds: float) -> None:
        if self._srun is None or self._watching is None:
            return
        await asyncio.wait({self._watching}, timeout=grace_period_seconds)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._srun.returncode is None:
                self._srun.send_signal(number)
                await asyncio.wait({self._watching}, timeout=_SIGNAL_SECONDS)

    async def _watch(self, srun: subprocess.Popen[bytes], listener: SpawnerListener) -> None:
        message: deque[str] = deque(maxlen=_MESSAGE_LINES)

        def on_error_line(line: str) -> None:
            if line.startswith(("srun:", "slurmstepd:")):
                message.append(line)
            listener.on_output(line)

        reading = {
            asyncio.create_task(read_lines(srun.stdout, listener.on_output)),
            asyncio.create_task(read_lines(srun.stderr, on_error_line)),
        }
        returncode = await in_thread(srun.wait)
        await asyncio.wait(reading, timeout=0.5)
        for task in reading:
            task.cancel()
        listener.on_all_exit(returncode, "\n".join(message))


def _terminate(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Terminate an srun whose start a stalled file system has delayed beyond the end of the job."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().terminate()
