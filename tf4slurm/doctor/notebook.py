"""Check that a node and this host, on which a notebook runs, reach each other (`tf4slurm doctor --notebook`).

A notebook is the chief of its cluster: it connects to the ps and workers, and they connect to it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict

from tf4slurm.doctor.finding import Finding
from tf4slurm.doctor.host import check_directory, probe_file, probe_path
from tf4slurm.doctor.nodes import (
    HOST_SECONDS,
    REACH_SECONDS,
    NodeTask,
    Peer,
    answering_checks,
    find_faults,
    running_step,
)
from tf4slurm.errors import InterfaceError
from tf4slurm.network.interfaces import host_addresses, task_address
from tf4slurm.slurm.environ import own_node_name
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.submission.submit import submit_environment

_IMMEDIATE_SECONDS = 60
_OPTIONS = ("partition", "account", "qos", "constraint", "reservation")
_ADVICE = (
    "Open the ports of --ports between the two networks; or choose another network with --interface; or start the "
    'notebook in an allocation: "srun --pty jupyter lab --no-browser --ip=0.0.0.0".'
)


async def check_notebook(
    environ: Mapping[str, str],
    spec: JobSpec,
    scheduling: Mapping[str, object],
    *,
    is_quick: bool,
    on_progress: Callable[[str], None],
) -> list[Finding]:
    """Start a task on a node of Slurm, and return what it finds out about itself and the network between both hosts.

    Slurm has 60 s to start it. An allocation in which this process runs is not used.

    Args:
        spec: The options `runs_directory`, `interface` and `ports` of this job are checked.
        scheduling: Options of sbatch by field name. Those that choose a node are used, such as the partition.
        is_quick: Whether to skip the checks that start TensorFlow and pip.
        on_progress: Called with a text before each part of the work.

    Raises:
        LaunchError: srun cannot be started.
    """
    own_name, name, secret = own_node_name(environ), secrets.token_hex(6), secrets.token_hex(32)
    directory, own_skew = check_directory(spec.runs_directory, f"{name}.1")
    task = NodeTask(
        name=name,
        secret=secret,
        runs_directory=str(spec.runs_directory.absolute()),
        interface=spec.interface,
        ports=spec.ports,
        is_quick=is_quick,
        launcher_addresses=host_addresses(),
        has_probe=own_skew is not None,
        credential=None,
    )
    chosen = [f"--{name}={scheduling[name]}" for name in _OPTIONS if scheduling.get(name)]
    options = (f"--immediate={_IMMEDIATE_SECONDS}", "--time=5", "--job-name=tf4slurm-doctor", *chosen)
    outer = submit_environment(environ, "")
    probe = probe_file(probe_path(spec.runs_directory, name)) if task.has_probe else contextlib.nullcontext()
    with probe:
        async with answering_checks(secret, 1) as port, running_step(1, outer, options) as step:
            on_progress(f"waiting at most {_IMMEDIATE_SECONDS} s for a node")
            answers = await step.ask(asdict(task), _IMMEDIATE_SECONDS + HOST_SECONDS)
            if 0 not in answers:
                return [_no_node(step.error_lines)]
            peer = Peer(**answers[0]["peer"])
            host = Peer(1, own_name, port, dict.fromkeys(task.launcher_addresses, ""), None)
            on_progress(f"checking that {peer.node} and {own_name} reach each other")
            here = await find_faults([peer, host], 1, secret)
            there = await step.ask([asdict(peer), asdict(host)], REACH_SECONDS)
    findings = [Finding(**{**finding, "nodes": (peer.node,)}) for finding in answers[0]["findings"]]
    if directory.level == "fail":
        findings.append(directory)
    own_address = None
    with contextlib.suppress(InterfaceError, OSError):
        own_address = task_address(spec.interface, own_name, peer.own_address or peer.node)
    missed_there = {address: reason for _, address, reason in there.get(0, ())}
    missed_here = {address: reason for _, address, reason in here}
    return [
        *findings,
        check_way(own_name, peer.node, own_address, host.addresses, missed_there),
        check_way(peer.node, own_name, peer.own_address, peer.addresses, missed_here),
    ]


def check_way(
    node: str, checker: str, used: str | None, addresses: Mapping[str, str], missed: Mapping[str, str]
) -> Finding:
    """Return whether `checker` reaches `node`.

    Args:
        used: The address that a cluster would use. None if there is none.
        addresses: All addresses of `node`.
        missed: Why `checker` does not reach an address.
    """
    if used is None:
        return Finding("fail", "notebook", f"{node} has no address for the tasks of a cluster", "Choose --interface.")
    if used not in missed:
        return Finding("ok", "notebook", f"{checker} reaches {node} at {used}")
    others = [address for address in addresses if address not in missed]
    but = f"; it reaches {', '.join(others)}" if others else ""
    return Finding("fail", "notebook", f"{checker} does not reach {node} at {used}{but}", _ADVICE, detail=missed[used])


def _no_node(error_lines: list[str]) -> Finding:
    said = f"; srun: {' | '.join(error_lines)}" if error_lines else ""
    text = f"no node has answered{said}"
    return Finding("fail", "notebook", text, "Try again later, or with --site and a profile that names the partition.")
