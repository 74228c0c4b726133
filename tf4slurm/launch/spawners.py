"""Spawners start the agents of a job: `LocalSpawner` as forks of the launcher, `SrunSpawner` as one step of Slurm.

`ExternalSpawner` stands for agents that exist already.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from tf4slurm import errors
from tf4slurm.agent.agent import run_agent
from tf4slurm.errors import LaunchError
from tf4slurm.launch.staging import stage_environment
from tf4slurm.preload.client import NotPreloaded, Preloader
from tf4slurm.slurm.commands import srun_command
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import PR_SET_PDEATHSIG
from tf4slurm.system.exec_limits import explain_too_long
from tf4slurm.system.output import LineSplitter
from tf4slurm.system.proc import NO_OTHERS, Others, find_others, kill_descendants
from tf4slurm.system.threads import in_thread
from tf4slurm.system.variables import PRELOADER_VARIABLE, RANK_VARIABLE, base_environment

_Connection = multiprocessing.connection.Connection
_FORK = multiprocessing.get_context("fork")
_DRAIN_SECONDS = 0.5
_KILL_SECONDS = 2.0

# Without the modules site (-S) and ssl (imported by asyncio), an agent starts in two thirds of the time.
_PATH = [str(Path(errors.__file__).parents[1]), *filter(None, sys.path)]
_RUN_AGENT = (
    f"import sys; sys.path += {_PATH}; sys.modules['ssl'] = None; "
    "from tf4slurm.agent.shared_preloader import start_shared_preloader; start_shared_preloader(); "
    "from tf4slurm.system.guard import start_guard; start_guard(blocks_signals=True); "
    "from tf4slurm.agent.agent import main; main()"
)
_AGENT = (sys.executable, "-I", "-S", "-c", _RUN_AGENT)
_NO_SRUN = "this is a Slurm allocation. Put Slurm's programs on PATH, or use --local for local processes."
_MESSAGE_LINES = 10
_SIGNAL_SECONDS = 1.0  # after each signal; only SIGKILL ends an srun that waits for a lost host


class SpawnerListener(Protocol):
    """Receives the events of a spawner. `Launcher` implements these methods."""

    def on_staging(self, text: str | None) -> None:
        """Handle the start (`text` describes it) or the end (`text` is None) of copying the environment to nodes."""

    def on_output(self, line: str) -> None:
        """Handle a line that an agent or srun has printed."""

    def on_agent_exit(self, rank: int, returncode: int) -> None:
        """Handle the exit of one task's agent. Only `LocalSpawner` calls this."""

    def on_all_exit(self, returncode: int, message: str) -> None:
        """Handle the exit of srun and of all agents. `message` contains srun's last error lines.

        Only `SrunSpawner` calls this.
        """


class Spawner(Protocol):
    """Starts one agent per task. After `close`, none of these agents runs."""

    is_local: bool
    is_external: bool  # the agents exist: srun has started them, one in this process
    others: Others  # children of this process that are not the job's

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        """Start the agents, and add `environment` to their environment variables."""

    async def close(self, grace_period_seconds: float) -> None:
        """Wait at most `grace_period_seconds` for the agents to exit, then kill the agents that still run."""


class LocalSpawner:
    """Starts the agents on this host as forks of the launcher, so that four agents start in 20 ms, not in 500 ms.

    The launcher forks before it starts threads, because a fork does not copy threads. Each agent waits until the
    launcher sends the agent's environment variables through a pipe, and exits if the pipe is closed.

    Each agent is in a process group of its own, so that Ctrl-C reaches only the launcher. Separate sessions would slow
    training, because Linux may divide processor time by session (autogroup).
    """

    is_local = True
    is_external = False

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        """Fork the agents. Call this while the process is single-threaded and has no event loop."""
        num_tasks, command = spec.num_spawned, spec.command
        self._environ = dict(environ)
        self.others = find_others()
        try:
            self._agents = [_ForkedAgent(command) for _ in range(num_tasks)]
        except OSError as error:
            raise LaunchError(
                f"{num_tasks} local agents cannot be started: {error.strerror}. Lower a count, or raise ulimit.",
                command=command,
            ) from error
        self._watching: list[asyncio.Task[None]] = []
        if spec.is_preloaded:  # after the forks, which would keep its pipe open
            with contextlib.suppress(NotPreloaded, OSError, RuntimeError):  # the agents tell why
                preloader = Preloader(command, base_environment(environ), has_own_group=True)
                self._environ[PRELOADER_VARIABLE] = preloader.address.to_text()

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        for rank, agent in enumerate(self._agents):
            with contextlib.suppress(BrokenPipeError):  # the agent has exited: `_watch` reports it
                agent.environment.send({**self._environ, **environment, RANK_VARIABLE: str(rank)})
            agent.environment.close()
            self._watching.append(asyncio.create_task(_watch(rank, agent, listener)))

    async def close(self, grace_period_seconds: float) -> None:
        if self._watching:
            await asyncio.wait(self._watching, timeout=grace_period_seconds)
        for agent in self._agents:
            agent.process.kill()
        if self._watching:
            await asyncio.wait(self._watching, timeout=_KILL_SECONDS)
        await asyncio.wait({in_thread(kill_descendants, self.others)}, timeout=_KILL_SECONDS)


class _ForkedAgent:
    def __init__(self, command: Sequence[str]) -> None:
        receiver, self.environment = _FORK.Pipe(duplex=False)
        readable, writable = os.pipe()
        arguments = (command, receiver, self.environment, writable, os.getpid())
        self.process = _FORK.Process(target=_run_forked_agent, args=arguments)
        self.process.start()
        receiver.close()
        os.close(writable)
        self.output = open(readable, "rb", buffering=0)  # noqa: SIM115 - read until the agent has ended


def _run_forked_agent(
    command: Sequence[str], receiver: _Connection, sender: _Connection, output: int, launcher_id: int
) -> None:
    """Run an agent in a fork of the launcher, once the launcher has sent the agent's environment variables.

    Args:
        command: The child's command.
        receiver, sender: The two ends of the pipe for the environment variables.
        output: File descriptor to which the agent prints.
        launcher_id: Process id of the launcher.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":  # if the launcher is killed after Ctrl-Z, which has stopped this agent too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the launcher blocks its signals while it forks
    sender.close()
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, descriptor)
    os.close(output)
    try:
        environment: dict[str, str] = receiver.recv()
    except EOFError:
        os._exit(0)  # the launcher has ended
    os._exit(run_agent(command, environment, launcher_id))  # skips the launcher's exit handlers


async def _watch(rank: int, agent: _ForkedAgent, listener: SpawnerListener) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    reading = asyncio.create_task(_read_lines(agent.output, listener.on_output))
    loop.add_reader(agent.process.sentinel, ended.set)
    await ended.wait()
    loop.remove_reader(agent.process.sentinel)
    agent.process.join()
    await asyncio.wait({reading}, timeout=_DRAIN_SECONDS)
    reading.cancel()
    listener.on_agent_exit(rank, agent.process.exitcode or 0)


class ExternalSpawner:
    """Starts nothing, for `srun tf4slurm task`: srun has started the agents. They find the service by control.json."""

    is_local = False
    is_external = True
    others = NO_OTHERS

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        pass

    async def close(self, grace_period_seconds: float) -> None:
        pass


class SrunSpawner:
    """Starts the agents with one srun, as the tasks of a step.

    srun gets no signal before `close`, because at a signal it kills all agents. `close` terminates srun if it has not
    exited after the grace period.
    """

    is_local = False
    is_external = False
    others = NO_OTHERS

    def __init__(
        self,
        spec: JobSpec,
        allocation: SlurmAllocation,
        environ: Mapping[str, str],
        srun_options: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._allocation = allocation
        self._environ = environ
        self._srun_options = tuple(srun_options)
        self._srun: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        agent = (*_AGENT, *self._spec.command)
        environ = {**self._environ, **environment}
        if self._spec.is_preloaded:
            environ[PRELOADER_VARIABLE] = secrets.token_hex(16)
        if self._spec.stage_env is not None:
            staged = await stage_environment(self._spec, self._allocation, self._environ, listener.on_staging)
            listener.on_staging(None)
            if staged is not None:
                agent, environ = staged.command(_AGENT, self._spec.command), staged.environ(environ)
        survive = ("--no-kill",) if self._spec.spares else ()  # the step survives the loss of a node
        command = srun_command(self._allocation, self._spec.num_spawned, agent, (*survive, *self._srun_options))

        def start_srun() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )

        starting = in_thread(start_srun)
        try:
            self._srun = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_terminate)
            raise
        except OSError as error:
            too_long = explain_too_long(error, command, environ)
            reason = f": {too_long}" if too_long else f" ({error}), but SLURM_JOB_ID is set: {_NO_SRUN}"
            raise LaunchError(f"srun cannot be started{reason}", command=command) from error
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
            asyncio.create_task(_read_lines(srun.stdout, listener.on_output)),
            asyncio.create_task(_read_lines(srun.stderr, on_error_line)),
        }
        returncode = await in_thread(srun.wait)
        await asyncio.wait(reading, timeout=_DRAIN_SECONDS)
        for task in reading:
            task.cancel()
        listener.on_all_exit(returncode, "\n".join(message))


def _terminate(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Terminate srun if it has started too late, after the end of the job, because a file system had stalled.

    `starting` is the start of srun, which nothing waits for any more.
    """
    if not starting.cancelled() and starting.exception() is None:
        starting.result().terminate()


async def _read_lines(pipe: IO[bytes] | None, on_line: Callable[[str], None]) -> None:
    """Call `on_line` with each line from a pipe, until the pipe is closed."""
    assert pipe is not None
    stream, splitter = asyncio.StreamReader(), LineSplitter()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    while data := await stream.read(65536):
        for line in splitter.split(data):
            on_line(line)
    for line in splitter.finish():
        on_line(line)
