"""The same on each node of an allocation, by one step of Slurm, and what only several hosts can show: whether they
share the run directory and the time, and which of them reach each other.

All is said through srun's own pipes, so only this user's tasks are spoken to; what listens on a node meanwhile answers
nothing but a proof (network/proof.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tf4slurm.control.munge import seal_for_this_user
from tf4slurm.doctor.directory import Probe, check_directory, judge_skew
from tf4slurm.doctor.finding import Finding, merge_nodes
from tf4slurm.doctor.here import Wishes
from tf4slurm.doctor.node import PROOF_SECONDS
from tf4slurm.doctor.reach import judge_reach
from tf4slurm.doctor.software import IMPORT_SECONDS
from tf4slurm.doctor.wire import Assembler
from tf4slurm.errors import LaunchError
from tf4slurm.launch.srun_spawner import TF4SLURM
from tf4slurm.network.interfaces import host_addresses
from tf4slurm.network.ports import hold_port
from tf4slurm.network.reachability import ReachabilityServer
from tf4slurm.slurm.commands import exited_tasks, srun_on_each_node_command

_EXAMINE_SECONDS = 60.0 + IMPORT_SECONDS  # srun starts, TensorFlow and pip are looked at
_REACH_SECONDS = 60.0 + PROOF_SECONDS
_END_SECONDS = 10.0
_WORDS_LINES = 5


async def check_nodes(
    num_nodes: int, environ: Mapping[str, str], wishes: Wishes, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Look at each of the allocation's nodes; return the findings of all, each once.

    Raises:
        LaunchError: srun cannot be started.
    """
    name, secret, here = secrets.token_hex(6), secrets.token_hex(32), host_addresses()
    port, server, probe = hold_port(), ReachabilityServer(), Probe(wishes.runs_directory, name)
    nodes = _Nodes(num_nodes)
    try:
        directory, skew_here = check_directory(wishes.runs_directory, f"{name}.{num_nodes}")
        if skew_here is not None:
            probe.write()
        await server.start(port.listen(), secret, num_nodes)
        await nodes.start(environ)
        on_progress(f"looking at {num_nodes} nodes")
        task = {"name": name, "secret": secret, "wishes": wishes.to_json(), "launcher": here}
        credential = await asyncio.to_thread(seal_for_this_user, "probe")
        await nodes.send({**task, "is_written": skew_here is not None, "credential": credential})
        reports = await nodes.receive(_EXAMINE_SECONDS)
        on_progress("proving that they reach each other")
        peers = [{**report, "rank": rank} for rank, report in reports.items()]
        launcher = {"rank": num_nodes, "node": socket.gethostname(), "addresses": list(here), "port": port.port}
        await nodes.send({"peers": [*peers, launcher]})
        faults = await nodes.receive(_REACH_SECONDS)
    finally:
        await nodes.close()
        server.close()
        port.close()
        probe.remove()
    by_node = {r["node"]: [Finding.from_json(finding) for finding in r["findings"]] for r in reports.values()}
    found = merge_nodes(by_node)
    if directory.level == "fail":
        found.append(replace(directory, nodes=(socket.gethostname(),)))
    if len(reports) < num_nodes:
        found.append(_missing(num_nodes - len(reports), sorted(by_node), nodes.words))
    skews = {report["node"]: report["skew"] for report in reports.values() if report["skew"] is not None}
    if skews and skew_here is not None:
        found.append(judge_skew({f"{socket.gethostname()} (this host)": skew_here, **skews}))
    return [*found, *judge_reach([*peers, launcher], faults)]


def _missing(count: int, present: list[str], words: list[str]) -> Finding:
    said = f"; srun said: {' | '.join(words)}" if words else ""
    text = f"{count} node{'s' if count > 1 else ''} did not answer, only {', '.join(present) or 'none'} did{said}"
    todo = "Python and tf4slurm must be on every node at the same path: put them on a file system that all share."
    return Finding("fail", "nodes", text, todo)


class _Nodes:
    """The step: one task on each node, from `start` to `close`."""

    def __init__(self, num_nodes: int) -> None:
        self._waited_for = set(range(num_nodes))
        self._srun: asyncio.subprocess.Process | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._answers: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()  # None: look again who is left
        self.words: list[str] = []

    async def start(self, environ: Mapping[str, str]) -> None:
        command = srun_on_each_node_command(len(self._waited_for), (*TF4SLURM, "doctor", "--as-node"))
        try:
            self._srun = await asyncio.create_subprocess_exec(
                *command,
                env=environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:
            message = f"srun cannot be started: {error}. Slurm's programs must be on PATH."
            raise LaunchError(message, command=command, returncode=127, stderr="") from error
        self._reading = {
            asyncio.create_task(self._read_answers(self._srun)),
            asyncio.create_task(self._read_words(self._srun)),
        }

    async def send(self, value: Any) -> None:
        """Send one line to all of them."""
        assert self._srun is not None
        assert self._srun.stdin is not None
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):  # srun has ended: `receive` gets nothing
            self._srun.stdin.write(json.dumps(value).encode() + b"\n")
            await asyncio.wait_for(self._srun.stdin.drain(), _END_SECONDS)

    async def receive(self, seconds: float) -> dict[int, Any]:
        """Return one value of each node that still answers, by rank; who does not in time is left out for good."""
        deadline, answers = time.monotonic() + seconds, dict[int, Any]()
        while not self._waited_for <= answers.keys():
            try:
                answer = await asyncio.wait_for(self._answers.get(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                break
            if answer is not None:
                answers[answer[0]] = answer[1]
        self._waited_for &= answers.keys()
        return dict(sorted(answers.items()))

    async def close(self) -> None:
        """End the step: the tasks end with their input; what does not is killed by srun."""
        if self._srun is None:
            return
        assert self._srun.stdin is not None
        self._srun.stdin.close()
        for end in (None, self._srun.terminate, self._srun.kill):
            if end is not None:
                with contextlib.suppress(ProcessLookupError):
                    end()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._srun.wait(), _END_SECONDS)
                break
        await asyncio.wait(self._reading, timeout=1.0)
        for task in self._reading:
            task.cancel()

    async def _read_answers(self, srun: asyncio.subprocess.Process) -> None:
        assert srun.stdout is not None
        assembler = Assembler()
        while line := await srun.stdout.readline():
            if answer := assembler.feed(line.decode(errors="replace")):
                self._answers.put_nowait(answer)
        self._waited_for.clear()
        self._answers.put_nowait(None)

    async def _read_words(self, srun: asyncio.subprocess.Process) -> None:
        """Keep what srun says; a task that it says has exited is not waited for."""
        assert srun.stderr is not None
        while line := await srun.stderr.readline():
            words = line.decode(errors="replace").strip()
            if len(self.words) < _WORDS_LINES:
                self.words.append(words[:300])
            if ranks := exited_tasks(words):
                self._waited_for -= ranks
                self._answers.put_nowait(None)
