"""`tf4slurm doctor --on-nodes`: check the nodes of an allocation, their network and the shared directory.

One Slurm step runs `node.py` on each node. Tasks and answers are only sent through srun's pipes, so no other process
can take part. The ports that nodes open meanwhile answer reachability checks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tf4slurm.control.munge import seal_for_this_user
from tf4slurm.doctor.directory import Probe, check_directory, judge_skew
from tf4slurm.doctor.finding import Finding, merge_nodes
from tf4slurm.doctor.node import ANSWER_START, CHECK_SECONDS, NodeTask, Peer
from tf4slurm.doctor.software import IMPORT_SECONDS
from tf4slurm.errors import LaunchError, SlurmEnvironmentError
from tf4slurm.launch.srun_spawner import TF4SLURM
from tf4slurm.network.interfaces import host_addresses
from tf4slurm.network.ports import hold_port
from tf4slurm.network.reachability import ReachabilityServer
from tf4slurm.slurm.commands import exited_tasks, srun_on_each_node_command
from tf4slurm.slurm.environ import SlurmAllocation, own_node_name
from tf4slurm.slurm.nodelist import fold_nodelist
from tf4slurm.spec import JobSpec

_HOST_SECONDS = 60.0 + IMPORT_SECONDS  # for srun's start, and the nodes' checks of TensorFlow and pip
_REACH_SECONDS = 60.0 + CHECK_SECONDS
_END_SECONDS = 10.0
_MAX_ERROR_LINES = 5


async def check_nodes(
    environ: Mapping[str, str], spec: JobSpec, *, is_quick: bool, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Run the checks on each node of this allocation; return the merged findings.

    Raises:
        SlurmEnvironmentError: This process is not in an allocation.
        LaunchError: srun cannot be started.
    """
    allocation = SlurmAllocation.from_environ(environ)
    if allocation is None or allocation.num_nodes is None:
        raise SlurmEnvironmentError(
            '"tf4slurm doctor --on-nodes" is not in a Slurm allocation. Run it in one: '
            "salloc -N4 tf4slurm doctor --on-nodes; or call it in a batch script.",
            variable="SLURM_JOB_ID",
        )
    findings = await _check_nodes(allocation.num_nodes, environ, spec, is_quick, on_progress)
    if allocation.components:
        text = f"only the nodes of the first of {len(allocation.components)} components of this job were checked"
        findings.append(Finding("warn", "nodes", text, "Check the others in an allocation of their own."))
    return findings


async def _check_nodes(
    num_nodes: int, environ: Mapping[str, str], spec: JobSpec, is_quick: bool, on_progress: Callable[[str], None]
) -> list[Finding]:
    name, own_name, step = secrets.token_hex(6), own_node_name(environ), _NodeStep(num_nodes)
    probe = Probe(spec.runs_directory, name)
    directory, own_skew = check_directory(spec.runs_directory, f"{name}.{num_nodes}")
    task = NodeTask(
        name=name,
        secret=secrets.token_hex(32),
        runs_directory=str(spec.runs_directory.absolute()),
        interface=spec.interface,
        ports=spec.ports,
        is_quick=is_quick,
        launcher_addresses=host_addresses(),
        has_probe=own_skew is not None,
        credential=await asyncio.to_thread(seal_for_this_user, "probe"),
    )
    try:
        if own_skew is not None:
            probe.write()
        reports, reach = await _run_step(step, num_nodes, own_name, environ, task, on_progress)
    finally:
        probe.remove()
    by_node = {r["peer"]["node"]: [Finding.from_json(finding) for finding in r["findings"]] for r in reports.values()}
    findings = merge_nodes(by_node)
    if directory.level == "fail":
        findings.append(replace(directory, nodes=(own_name,)))
    if len(reports) < num_nodes:
        findings.append(_missing_nodes(num_nodes - len(reports), sorted(by_node), step.error_lines))
    skews = {r["peer"]["node"]: r["skew"] for r in reports.values() if r["skew"] is not None}
    if skews and own_skew is not None:
        findings.append(judge_skew({f"{own_name} (this host)": own_skew, **skews}))
    return [*findings, *reach]


async def _run_step(
    step: _NodeStep,
    num_nodes: int,
    own_name: str,
    environ: Mapping[str, str],
    task: NodeTask,
    on_progress: Callable[[str], None],
) -> tuple[dict[int, Any], list[Finding]]:
    """Run the checks on the nodes; return their reports by rank, and the findings about reachability."""
    port, server = hold_port(), ReachabilityServer()
    launcher = Peer(num_nodes, own_name, port.port, dict.fromkeys(task.launcher_addresses, ""), None)
    try:
        await server.start(port.listen(), task.secret, num_nodes)
        await step.start(environ)
        on_progress(f"checking {num_nodes} nodes")
        await step.send(asdict(task))
        reports = await step.receive(_HOST_SECONDS)
        peers = [Peer(**report["peer"]) for report in reports.values()]
        on_progress("checking that they reach each other")
        await step.send([asdict(peer) for peer in (*peers, launcher)])
        return reports, judge_reach(peers, launcher, await step.receive(_REACH_SECONDS))
    finally:
        await step.close()
        server.close()
        port.close()


def judge_reach(
    peers: Sequence[Peer], launcher: Peer, faults: Mapping[int, Sequence[tuple[int, str, str]]]
) -> list[Finding]:
    """Return a finding for each unreachable address, or one finding if all are reachable.

    A job tries the launcher's addresses one by one, so one reachable address of the launcher's host suffices.

    Args:
        faults: (rank, address, reason) of each unreachable address, by the rank of the checking node.
    """
    names = {peer.rank: peer.node for peer in peers}
    has_address = {
        peer.rank for peer in peers if peer.own_address is not None
    }  # nodes without an address have their own finding
    missed_by: dict[tuple[int, str], dict[str, str]] = {}
    for checker, found in faults.items():
        for rank, address, reason in found if checker in has_address else ():
            missed_by.setdefault((rank, address), {})[names[checker]] = reason
    findings = [
        _unreachable_address(peer, address, checkers)
        for peer in peers
        for address in peer.addresses
        if (checkers := missed_by.get((peer.rank, address)))
    ]
    missed = [set(missed_by.get((launcher.rank, address), ())) for address in launcher.addresses]
    if missed and (cut_off := sorted(set.intersection(*missed))):
        where = f"{launcher.node}, where the launcher would run,"
        text = f"{where} is unreachable at all its addresses from {fold_nodelist(cut_off)}"
        findings.append(Finding("fail", "reach", text, "Start the job on a node (sbatch), not on this host."))
    if not findings and has_address:
        nodes = f"{len(has_address)} nodes reach each other and" if len(has_address) > 1 else "the node reaches"
        findings.append(Finding("ok", "reach", f"{nodes} this host, at every address"))
    return findings


def _unreachable_address(peer: Peer, address: str, checkers: Mapping[str, str]) -> Finding:
    text = f"{peer.node} is unreachable at {address} ({peer.addresses[address]}) from {fold_nodelist(checkers)}"
    advice = "Look for a firewall or a bad cable; exclude the node (sbatch --exclude), or choose another --interface."
    reason = next(iter(checkers.values()))
    if address == peer.own_address:
        return Finding("fail", "reach", f"{text}, and a job would use that address", advice, detail=reason)
    return Finding("warn", "reach", f"{text}; a job would use another address", advice, detail=reason)


def _missing_nodes(count: int, present: list[str], error_lines: list[str]) -> Finding:
    stderr = f"; srun: {' | '.join(error_lines)}" if error_lines else ""
    text = f"{count} node{'s' if count > 1 else ''} did not answer, only {', '.join(present) or 'none'} did{stderr}"
    advice = "Python and tf4slurm must be on every node at the same path: install them on a shared file system."
    return Finding("fail", "nodes", text, advice)


class _NodeStep:
    """The step with one task on each node, from `start` to `close`."""

    def __init__(self, num_nodes: int) -> None:
        self._pending = set(range(num_nodes))
        self._srun: asyncio.subprocess.Process | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._answers: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()  # None: `_pending` has changed
        self.error_lines: list[str] = []

    async def start(self, environ: Mapping[str, str]) -> None:
        command = srun_on_each_node_command(len(self._pending), (*TF4SLURM, "doctor", "--as-node"))
        try:
            self._srun = await asyncio.create_subprocess_exec(
                *command,
                env=environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must only reach this process
            )
        except OSError as error:
            message = f"srun cannot be started: {error}. Slurm's programs must be on PATH."
            raise LaunchError(message, command=command) from error
        self._readers = {
            asyncio.create_task(self._read_answers(self._srun)),
            asyncio.create_task(self._read_errors(self._srun)),
        }

    async def send(self, value: Any) -> None:
        """Send one line to all nodes."""
        assert self._srun is not None
        assert self._srun.stdin is not None
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):  # srun has exited: `receive` returns nothing
            self._srun.stdin.write(json.dumps(value).encode() + b"\n")
            await asyncio.wait_for(self._srun.stdin.drain(), _END_SECONDS)

    async def receive(self, seconds: float) -> dict[int, Any]:
        """Return the next answer of each node, by rank; later calls skip nodes that did not answer in time."""
        deadline, answers = time.monotonic() + seconds, dict[int, Any]()
        while not self._pending <= answers.keys():
            try:
                answer = await asyncio.wait_for(self._answers.get(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                break
            if answer is not None:
                answers[answer[0]] = answer[1]
        self._pending &= answers.keys()
        return dict(sorted(answers.items()))

    async def close(self) -> None:
        """Close the tasks' input, so that they exit; then let srun kill the remaining tasks."""
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
        await asyncio.wait(self._readers, timeout=1.0)
        for task in self._readers:
            task.cancel()

    async def _read_answers(self, srun: asyncio.subprocess.Process) -> None:
        assert srun.stdout is not None
        parts: dict[int, str] = {}
        while line := await srun.stdout.readline():
            if answer := join_parts(parts, line.decode(errors="replace")):
                self._answers.put_nowait(answer)
        self._pending.clear()
        self._answers.put_nowait(None)

    async def _read_errors(self, srun: asyncio.subprocess.Process) -> None:
        """Keep the first lines of srun's standard error; stop waiting for tasks that srun reports as failed."""
        assert srun.stderr is not None
        while line := await srun.stderr.readline():
            text = line.decode(errors="replace").strip()
            if len(self.error_lines) < _MAX_ERROR_LINES:
                self.error_lines.append(text[:300])
            if ranks := exited_tasks(text):
                self._pending -= ranks
                self._answers.put_nowait(None)


def join_parts(parts: dict[int, str], line: str) -> tuple[int, Any] | None:
    """Add a line of `srun --label`, such as "3: {…", to `parts`; return rank and answer when the answer is complete.

    Other output of a task is ignored.
    """
    label, _, part = line.rstrip("\n").partition(": ")
    if not label.strip().isdecimal():
        return None
    rank = int(label)
    text = part if part.startswith(ANSWER_START) else parts.get(rank, "") + part
    if not text.startswith(ANSWER_START):
        return None
    parts[rank] = text
    if not text.endswith("}"):
        return None
    try:
        return rank, json.loads(text)["tf4slurm-doctor"]
    except ValueError:  # the answer has more parts
        return None
