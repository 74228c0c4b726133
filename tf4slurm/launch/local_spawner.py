"""Spawner that starts local agents as forks of the launcher: four agents start in 20 ms, not in 500 ms.

The launcher forks the agents before it starts threads, which a fork does not copy. Each agent reads its environment
from a pipe when the launcher sends it, and exits if the pipe is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from tf4slurm.agent.agent import run_agent
from tf4slurm.agent.bootstrap import rank_to_environ
from tf4slurm.errors import LaunchError
from tf4slurm.launch.spawner import SpawnerListener, read_lines
from tf4slurm.system.child_process import kill_descendants
from tf4slurm.system.program import in_thread

_Connection = multiprocessing.connection.Connection
_FORK = multiprocessing.get_context("fork")
_DRAIN_SECONDS = 0.5
_KILL_SECONDS = 2.0


class LocalSpawner:
    """Starts one agent per task on this host, in separate process groups, so that Ctrl-C reaches only the launcher.

    Separate sessions would slow training, because Linux may divide processor time by session (autogroup).
    """

    is_local = True

    def __init__(self, num_tasks: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Fork the agents. Call this while the process is single-threaded and has no event loop."""
        self._environ = environ
        try:
            self._agents = [_ForkedAgent(command) for _ in range(num_tasks)]
        except OSError as error:
            raise LaunchError(
                f"{num_tasks} local agents cannot be started: {error.strerror}. Lower a count, or raise ulimit.",
                command=command,
            ) from error
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, environment: Mapping[str, str], listener: SpawnerListener) -> None:
        for rank, agent in enumerate(self._agents):
            with contextlib.suppress(BrokenPipeError):  # the agent has exited: `_watch` reports it
                agent.environment.send({**self._environ, **environment, **rank_to_environ(rank)})
            agent.environment.close()
            self._watching.append(asyncio.create_task(_watch(rank, agent, listener)))

    async def close(self, grace_period_seconds: float) -> None:
        if self._watching:
            await asyncio.wait(self._watching, timeout=grace_period_seconds)
        for agent in self._agents:
            agent.process.kill()
        if self._watching:
            await asyncio.wait(self._watching, timeout=_KILL_SECONDS)
        await asyncio.wait({in_thread(kill_descendants)}, timeout=_KILL_SECONDS)


class _ForkedAgent:
    def __init__(self, command: Sequence[str]) -> None:
        receiver, self.environment = _FORK.Pipe(duplex=False)
        readable, writable = os.pipe()
        self.process = _FORK.Process(target=_run_forked_agent, args=(command, receiver, self.environment, writable))
        self.process.start()
        receiver.close()
        os.close(writable)
        self.output = open(readable, "rb", buffering=0)  # noqa: SIM115 - read until the agent has ended


def _run_forked_agent(command: Sequence[str], receiver: _Connection, sender: _Connection, output: int) -> None:
    """Run the agent in the fork, once the launcher has sent the environment."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the launcher blocks its signals while it forks
    sender.close()
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, descriptor)
    os.close(output)
    try:
        environment: dict[str, str] = receiver.recv()
    except EOFError:
        os._exit(0)  # the launcher has ended
    os._exit(run_agent(command, environment))  # skips the launcher's exit handlers


async def _watch(rank: int, agent: _ForkedAgent, listener: SpawnerListener) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    reading = asyncio.create_task(read_lines(agent.output, listener.on_output))
    loop.add_reader(agent.process.sentinel, ended.set)
    await ended.wait()
    loop.remove_reader(agent.process.sentinel)
    agent.process.join()
    await asyncio.wait({reading}, timeout=_DRAIN_SECONDS)
    reading.cancel()
    listener.on_agent_exit(rank, agent.process.exitcode or 0)
