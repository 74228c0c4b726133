"""Check the nodes of an allocation, their network and the shared directory (`tf4slurm doctor --on-nodes`).

"The launcher's host" is the host on which the doctor runs, because a launcher started here would run there. The doctor
starts one Slurm step that runs `run_node` on each node. Questions and answers are sent only through srun's pipes, so no
other process can take part. Each node reads two lines of JSON, and answers each with one line. After the first line, a
`NodeTask`, the node checks itself. After the second, the list of `Peer` objects, it checks that it reaches these hosts.
A node exits when its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tf4slurm.cluster import Address
from tf4slurm.control.credentials import open_from_this_user, seal_for_this_user
from tf4slurm.doctor.finding import Finding, merge_nodes
from tf4slurm.doctor.host import check_clocks, check_directory, check_host, check_shared, probe_file, probe_path
from tf4slurm.doctor.software import IMPORT_SECONDS
from tf4slurm.errors import AuthenticationError, InterfaceError, LaunchError, SlurmEnvironmentError
from tf4slurm.network.interfaces import host_addresses, list_connected_interfaces, task_address
from tf4slurm.network.ports import hold_port
from tf4slurm.network.reachability import answer_checks, find_fault
from tf4slurm.slurm.commands import exited_tasks, srun_on_each_node_command
from tf4slurm.slurm.environ import SlurmAllocation, SlurmStep, own_node_name
from tf4slurm.slurm.nodelist import fold_nodelist
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.program import main_command

_CHECK_SECONDS = 4.0  # for one address
HOST_SECONDS = 60.0 + IMPORT_SECONDS
"""Timeout in seconds for srun's start, and the nodes' checks of TensorFlow and pip."""

REACH_SECONDS = 60.0 + _CHECK_SECONDS
"""Timeout in seconds for the nodes' checks of connections."""

_END_SECONDS = 10.0
_INPUT_SECONDS = 300.0  # for one line; the sender has shorter timeouts, and its exit ends the input
_LINE_BYTES = 32 * 1024 * 1024
_ANSWER_START = '{"tf4slurm-doctor"'
_MAX_CHECKS = 64  # at the same time
_MAX_ERROR_LINES = 5


@dataclass(frozen=True)
class NodeTask:
    """What each node needs to check itself: options of a job, and facts about the launcher's host.

    Attributes:
        name: Unique part of the names of the test files that the nodes and the launcher's host write into
            `runs_directory`.
        secret: The secret with which hosts prove their identity in reachability checks.
        is_quick: Whether to skip the checks that start TensorFlow and pip.
        has_probe: Whether the launcher's host has written a test file, which the node must find.
        credential: MUNGE credential of the launcher's host, which the node must be able to decode. None if MUNGE does
            not work on the launcher's host.
    """

    name: str
    secret: str
    runs_directory: str
    interface: str | None
    ports: Sequence[int]
    is_quick: bool
    launcher_addresses: Sequence[str]
    has_probe: bool
    credential: str | None


@dataclass(frozen=True)
class Peer:
    """A host that answers reachability checks.

    Attributes:
        rank: Rank in the step. For the launcher's host, which has no rank, it is the number of nodes.
        port: The port on which the host answers, at all its addresses.
        addresses: The name of the interface by address. The names are empty for the launcher's host.
        own_address: The address that a task on the host would use. None if there is none, and for the launcher's host.
    """

    rank: int
    node: str
    port: int
    addresses: Mapping[str, str]
    own_address: str | None


# The launcher's host


async def check_nodes(
    environ: Mapping[str, str], spec: JobSpec, *, is_quick: bool, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Run the checks on each node of this allocation, and return the merged findings.

    Args:
        spec: The options `runs_directory`, `interface` and `ports` of this job are checked.
        is_quick: Whether to skip the checks that start TensorFlow and pip.
        on_progress: Called with a text before each part of the work.

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
    name = secrets.token_hex(6)
    own_name = own_node_name(environ)
    num_nodes = allocation.num_nodes
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
    with probe_file(probe_path(spec.runs_directory, name)) if task.has_probe else contextlib.nullcontext():
        answers, others = await _ask_nodes(num_nodes, own_name, environ, task, on_progress)
    findings = merge_nodes({a["peer"]["node"]: [Finding(**each) for each in a["findings"]] for a in answers})
    if directory.level == "fail":
        findings.append(replace(directory, nodes=(own_name,)))
    skews = {a["peer"]["node"]: a["skew"] for a in answers if a["skew"] is not None}
    if skews and own_skew is not None:
        findings.append(check_clocks({f"{own_name} (this host)": own_skew, **skews}))
    findings += others
    if allocation.components:
        text = f"only the nodes of the first of {len(allocation.components)} components of this job were checked"
        findings.append(Finding("warn", "nodes", text, "Check the others in an allocation of their own."))
    return findings


async def _ask_nodes(
    num_nodes: int, own_name: str, environ: Mapping[str, str], task: NodeTask, on_progress: Callable[[str], None]
) -> tuple[list[Any], list[Finding]]:
    """Let all nodes check themselves, then check that they reach each other and the launcher's host.

    Args:
        own_name: The name of the launcher's host, which is this host.
        task: What each node needs to check itself.
        on_progress: Called with a text before each of the two checks.

    Returns:
        What each node found out about itself (the result of `_check_node`), and the findings about nodes that did not
        answer or are unreachable.
    """
    async with answering_checks(task.secret, num_nodes) as port, running_step(num_nodes, environ) as step:
        launcher = Peer(num_nodes, own_name, port, dict.fromkeys(task.launcher_addresses, ""), None)
        on_progress(f"checking {num_nodes} nodes")
        answers = await step.ask(asdict(task), HOST_SECONDS)
        peers = [Peer(**answer["peer"]) for answer in answers.values()]
        on_progress("checking that they reach each other")
        faults = await step.ask([asdict(peer) for peer in (*peers, launcher)], REACH_SECONDS)
    findings = check_reach(peers, launcher, faults)
    if missing := num_nodes - len(peers):
        stderr = f"; srun: {' | '.join(step.error_lines)}" if step.error_lines else ""
        present = ", ".join(sorted(peer.node for peer in peers)) or "none"
        text = f"{missing} node{'s' if missing > 1 else ''} did not answer, only {present} did{stderr}"
        advice = "Python and tf4slurm must be on every node at the same path: install them on a shared file system."
        findings.append(Finding("fail", "nodes", text, advice))
    return list(answers.values()), findings


def check_reach(
    peers: Sequence[Peer], launcher: Peer, faults: Mapping[int, Sequence[tuple[int, str, str]]]
) -> list[Finding]:
    """Return a finding for each address that a node cannot reach, or one "ok" finding if there is no such address.

    The launcher's host gets a finding only if a node reaches none of its addresses, because agents try all of them.
    The result is empty if no node has an address.

    Args:
        peers: The nodes.
        launcher: The launcher's host.
        faults: What each node cannot reach, by the node's rank: (rank of the host that it cannot reach, address,
            reason). See `find_faults`.
    """
    # Nodes without an address have their own finding.
    names = {peer.rank: peer.node for peer in peers if peer.own_address is not None}
    missed_by: defaultdict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for checker in faults.keys() & names.keys():
        for rank, address, reason in faults[checker]:
            missed_by[rank, address][names[checker]] = reason
    findings = [
        _unreachable_address(peer, address, missed_by[peer.rank, address])
        for peer in peers
        for address in peer.addresses
        if missed_by[peer.rank, address]
    ]
    missed = [set(missed_by[launcher.rank, address]) for address in launcher.addresses]
    if missed and (cut_off := sorted(set.intersection(*missed))):
        where = f"{launcher.node}, where the launcher would run,"
        text = f"{where} is unreachable at all its addresses from {fold_nodelist(cut_off)}"
        findings.append(Finding("fail", "reach", text, "Start the job on a node (sbatch), not on this host."))
    if not findings and names:
        nodes = f"{len(names)} nodes reach each other and" if len(names) > 1 else "the node reaches"
        findings.append(Finding("ok", "reach", f"{nodes} this host, at every address"))
    return findings


def _unreachable_address(peer: Peer, address: str, checkers: Mapping[str, str]) -> Finding:
    text = f"{peer.node} is unreachable at {address} ({peer.addresses[address]}) from {fold_nodelist(checkers)}"
    advice = "Look for a firewall or a bad cable; exclude the node (sbatch --exclude), or choose another --interface."
    reason = next(iter(checkers.values()))
    if address == peer.own_address:
        return Finding("fail", "reach", f"{text}, and a job would use that address", advice, detail=reason)
    return Finding("warn", "reach", f"{text}; a job would use another address", advice, detail=reason)


@contextlib.asynccontextmanager
async def running_step(
    num_nodes: int, environ: Mapping[str, str], options: Sequence[str] = ()
) -> AsyncIterator[_NodeStep]:
    """Run `run_node` on each node in a `with` block. `options` are further ones of srun, for an allocation of its own.

    Raises:
        LaunchError: srun cannot be started.
    """
    command = srun_on_each_node_command(num_nodes, (*main_command("cli.main"), "doctor", "--as-node"), options)
    pipe = asyncio.subprocess.PIPE
    try:
        srun = await asyncio.create_subprocess_exec(
            *command,
            env=environ,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C must only reach this process
        )
    except OSError as error:
        message = f"srun cannot be started: {error}. Slurm's programs must be on PATH."
        raise LaunchError(message, command=command) from error
    assert srun.stdin is not None
    assert srun.stdout is not None
    assert srun.stderr is not None
    step = _NodeStep(num_nodes, srun.stdin)
    readers = [asyncio.create_task(step.read_answers(srun.stdout)), asyncio.create_task(step.read_errors(srun.stderr))]
    try:
        yield step
    finally:
        srun.stdin.close()  # the tasks exit
        for end in (None, srun.terminate, srun.kill):
            if end is not None:
                with contextlib.suppress(ProcessLookupError):
                    end()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(srun.wait(), _END_SECONDS)
                break
        await asyncio.wait(readers, timeout=1.0)
        for reader in readers:
            reader.cancel()


class _NodeStep:
    """The connection to the Slurm step that runs `run_node` on each node: srun's standard streams.

    It sends questions, and keeps the nodes' answers and the first 5 lines of srun's errors.
    """

    def __init__(self, num_nodes: int, stdin: asyncio.StreamWriter) -> None:
        self._stdin = stdin
        self._pending = set(range(num_nodes))  # the ranks that can still answer
        self._answers: dict[int, Any] = {}
        self._has_changed = asyncio.Event()
        self.error_lines: list[str] = []

    async def ask(self, question: Any, seconds: float) -> dict[int, Any]:
        """Send `question`, a JSON value, to all nodes. Return the answers that arrive within `seconds`, by rank.

        Return earlier if all nodes have answered or exited. Later calls ignore nodes that did not answer in time.
        """
        self._answers = {}
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):  # srun has exited, or one node is slow
            self._stdin.write(json.dumps(question).encode() + b"\n")
            await asyncio.wait_for(self._stdin.drain(), _END_SECONDS)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_for_answers(), seconds)
        self._pending &= self._answers.keys()
        return dict(sorted(self._answers.items()))

    async def _wait_for_answers(self) -> None:
        while not self._pending <= self._answers.keys():
            self._has_changed.clear()
            await self._has_changed.wait()

    async def read_answers(self, stdout: asyncio.StreamReader) -> None:
        parts: dict[int, str] = {}
        while line := await stdout.readline():
            answer = join_parts(parts, line.decode(errors="replace"))
            if answer is not None and answer[0] in self._pending:
                self._answers[answer[0]] = answer[1]
                self._has_changed.set()
        self._pending.clear()
        self._has_changed.set()

    async def read_errors(self, stderr: asyncio.StreamReader) -> None:
        """Read srun's standard error until it ends. Keep its first 5 lines.

        `ask` no longer waits for a task that srun reports as failed.
        """
        while line := await stderr.readline():
            text = line.decode(errors="replace").strip()
            if len(self.error_lines) < _MAX_ERROR_LINES:
                self.error_lines.append(text[:300])
            self._pending -= exited_tasks(text)
            self._has_changed.set()


def join_parts(parts: dict[int, str], line: str) -> tuple[int, Any] | None:
    """Append a line of output of `srun --label`, such as "3: {…", to the unfinished answer of task 3 in `parts`.

    Return the rank and the answer if the answer is now complete, else None. An answer may arrive in several
    lines. Output that is no part of an answer is ignored.

    Args:
        parts: The beginnings of answers, by rank. It is changed.
        line: The line.
    """
    label, _, part = line.rstrip("\n").partition(": ")
    if not label.strip().isdecimal():
        return None
    rank = int(label)
    text = part if part.startswith(_ANSWER_START) else parts.get(rank, "") + part
    if not text.startswith(_ANSWER_START):
        return None
    parts[rank] = text
    if text.endswith("}"):
        with contextlib.suppress(ValueError):  # the answer has more parts
            return rank, json.loads(text)["tf4slurm-doctor"]
    return None


# Each node


def run_node(environ: Mapping[str, str]) -> None:
    """Check this node for `doctor --on-nodes`, as one task of its Slurm step (`doctor --as-node`).

    Read questions from standard input, and print one answer for each. Return when the input ends.
    """
    asyncio.run(_run_node(environ))


async def _run_node(environ: Mapping[str, str]) -> None:
    step = SlurmStep.from_environ(environ)
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    if (question := await _read(lines)) is None:
        return
    task = NodeTask(**question)
    async with answering_checks(task.secret, step.rank) as port:
        _answer(await asyncio.to_thread(_check_node, environ, step, task, port))
        if (peers := await _read(lines)) is not None:
            _answer(await find_faults([Peer(**peer) for peer in peers], step.rank, task.secret))
            await _read(lines)  # wait until all nodes have checked this one


async def _read(lines: asyncio.StreamReader) -> Any:
    """Return the JSON value of the next line of `lines`, or None at its end."""
    line = await asyncio.wait_for(lines.readline(), _INPUT_SECONDS)
    return json.loads(line) if line.endswith(b"\n") else None


def _answer(value: Any) -> None:
    print(json.dumps({"tf4slurm-doctor": value}), flush=True)


@contextlib.asynccontextmanager
async def answering_checks(secret: str, rank: int) -> AsyncIterator[int]:
    """Answer the reachability checks of other hosts in a `with` block, as the host `rank`. Yield the port."""
    held = hold_port()
    with contextlib.closing(held), contextlib.closing(await answer_checks(held.listen(), secret, rank)):
        yield held.port


def _check_node(environ: Mapping[str, str], step: SlurmStep, task: NodeTask, port: int) -> dict[str, Any]:
    spec = JobSpec(runs_directory=Path(task.runs_directory), interface=task.interface, ports=tuple(task.ports))
    findings, skew = check_host(environ, spec, is_quick=task.is_quick, probe_name=f"{task.name}.{step.rank}")
    if task.has_probe:
        findings.append(check_shared(spec.runs_directory, task.name))
    if task.credential is not None:
        findings.append(_check_credential(task.credential))
    own_address = None
    with contextlib.suppress(InterfaceError, OSError, IndexError):
        own_address = task_address(spec.interface, step.node_name, task.launcher_addresses[0])
    addresses = {address: each.name for each in list_connected_interfaces() for address in each.addresses}
    peer = Peer(step.rank, step.node_name, port, addresses, own_address)
    return {"peer": asdict(peer), "findings": [asdict(finding) for finding in findings], "skew": skew}


def _check_credential(credential: str) -> Finding:
    try:
        open_from_this_user(credential)
    except AuthenticationError as error:
        advice = '"srun tf4slurm task" fails: munged must run on every node of the job, or on none.'
        text = f"another host's credential cannot be decoded: {str(error).split('. ')[0]}"
        return Finding("warn", "munge between nodes", text, advice)
    return Finding("ok", "munge between nodes", "another host's credential can be decoded")


async def find_faults(peers: Sequence[Peer], own_rank: int, secret: str) -> list[tuple[int, str, str]]:
    """Return (rank of the other host, address, reason) for each address of `peers` that this node cannot reach.

    `own_rank` is the rank of this node, which does not check itself. A host that does not know `secret` counts as
    unreachable.
    """
    limit = asyncio.Semaphore(_MAX_CHECKS)

    async def check(peer: Peer, host: str) -> tuple[int, str, str] | None:
        async with limit:
            reason = await find_fault(peer.node, peer.rank, Address(host, peer.port), secret, _CHECK_SECONDS)
        return (peer.rank, host, reason) if reason is not None else None

    # Each node starts with the next rank, because a host answers a limited number of checks at a time.
    ordered = sorted(peers, key=lambda peer: (peer.rank - own_rank) % len(peers))
    others = [(peer, host) for peer in ordered if peer.rank != own_rank for host in peer.addresses]
    answers = await asyncio.gather(*(check(peer, host) for peer, host in others))
    return [answer for answer in answers if answer is not None]
