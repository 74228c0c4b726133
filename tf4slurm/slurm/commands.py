"""The command lines of Slurm's programs, and what they answer."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from tf4slurm.errors import LaunchError, LayoutError
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.slurm.grant import SlurmGrant, parse_grant
from tf4slurm.slurm.job import SlurmJob, parse_exit_code, parse_fields, parse_job
from tf4slurm.slurm.nodelist import expand_nodelist
from tf4slurm.slurm.queue import SQUEUE_FORMAT, QueueEntry, parse_queue
from tf4slurm.slurm.site import SlurmSite, parse_site
from tf4slurm.slurm.step import SlurmStep

_SATTACH = "sattach"
_DEFAULTS = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_")  # variables of a user's that change what these programs do
_TIMEOUT_SECONDS = 30.0  # the answer takes 10 ms; slurmctld itself gives up after MessageTimeout, 10 s by default
_PROGRAMS = ("srun", "sbatch", "scontrol", "squeue", "scancel")
_EXITED_LINE = re.compile(r"^srun: error: \S+: tasks? (?P<ranks>\d[\d,-]*): ")
_LAYOUT_LINE = re.compile(r"^\tNode \d+ \((?P<node>.+)\), (?P<count>\d+) task\(s\):(?P<ranks>[ \d]*)$", re.MULTILINE)


def srun_command(
    allocation: SlurmAllocation, num_tasks: int, command: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the srun that starts `command` on every task of one step in the allocation, on all its components.

    What a task's end means is for the launcher to decide, so srun is told not to (a site may have set it to), and the
    step may share its CPUs with other steps of the job: without --overlap it waits for an interactive shell to end.
    `options` are more of srun's, and stand last: they win.
    """
    always = ["--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL", "--input=none"]
    if not allocation.components:
        start = [f"--ntasks={num_tasks}", *always, *_restate_cpus(allocation.cpus_per_task)]
        return ("srun", *start, *options, *command)
    line = ["srun"]
    for number, component in enumerate(allocation.components):
        separator = [":"] if number else []
        start = [f"--het-group={number}", f"--ntasks={component.num_tasks}", *always]
        line += [*separator, *start, *_restate_cpus(component.cpus_per_task), *options, *command]
    return tuple(line)


def _restate_cpus(cpus_per_task: int | None) -> list[str]:
    return [] if cpus_per_task is None else [f"--cpus-per-task={cpus_per_task}"]


def srun_on_each_node_command(num_nodes: int, command: Sequence[str]) -> tuple[str, ...]:
    """Return the srun that starts `command` once on each node of an allocation; what it reads goes to all of them."""
    options = (f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1")
    return ("srun", *options, "--overlap", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0", *command)


def exited_tasks(line: str) -> frozenset[int]:
    """Return the ranks of which srun says, in a line such as this, that they failed; none if it says something else.

    srun: error: r1-n[2,9]: tasks 0,2-3: Exited with exit code 2
    """
    match = _EXITED_LINE.match(line)
    return frozenset(int(name[1:]) for name in expand_nodelist(f"t[{match['ranks']}]")) if match else frozenset()


def missing_programs() -> tuple[str, ...]:
    """Return those of Slurm's programs that tf4slurm uses and that are not on PATH."""
    return tuple(program for program in _PROGRAMS if shutil.which(program) is None)


def ask_client_version(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Return the version of the programs on this host, such as "22.05.8". The controller is not asked.

    Raises:
        LaunchError: srun cannot be started, or failed.
    """
    return _run(("srun", "--version"), timeout_seconds).strip().rpartition(" ")[2]


def ask_site(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> SlurmSite:
    """Ask the controller how the site has set it up.

    Raises:
        LaunchError: scontrol failed, or answered something else.
    """
    command = ("scontrol", "show", "config")
    config = _run(command, timeout_seconds)
    partitions = _run(("scontrol", "--oneliner", "show", "partition"), timeout_seconds)
    try:
        return parse_site(config, partitions)
    except ValueError as error:
        raise LaunchError(f"{' '.join(command)}: {error}", command=command, returncode=0, stderr=config) from error


def check_accounting(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """Ask sacct for the jobs since now.

    Raises:
        LaunchError: It cannot be started, failed or took too long; the text has its words.
    """
    _run(("sacct", "--noheader", "--allocations", "--starttime=now"), timeout_seconds)


def cancel_step(step: SlurmStep, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """End every process of a step at once, on all its nodes; also the caller, if it is in it.

    Raises:
        LaunchError: scancel failed.
    """
    _run(("scancel", f"{step.job_id}.{step.step_id}"), timeout_seconds)


def ask_job(job_id: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> SlurmJob:
    """Ask the controller what it knows of a job, and what preemption does in its partition.

    Raises:
        LaunchError: scontrol failed, or answered something else.
    """
    command = ("scontrol", "show", "job", job_id)
    answer = _run(command, timeout_seconds)
    try:
        job = parse_job(answer)
    except ValueError as error:
        raise LaunchError(f"{' '.join(command)}: {error}", command=command, returncode=0, stderr=answer) from error
    partition = parse_fields(_run(("scontrol", "show", "partition", job.partition), timeout_seconds))
    return dataclasses.replace(job, preempt_mode=partition.get("PreemptMode", ""))


def ask_partitions(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> list[str]:
    """Ask which partitions there are.

    Raises:
        LaunchError: sinfo failed, or there is none.
    """
    return list(dict.fromkeys(_run(("sinfo", "--noheader", "--format=%R"), timeout_seconds).split()))


def ask_queue(job_ids: Sequence[str], *, timeout_seconds: float = _TIMEOUT_SECONDS) -> list[QueueEntry]:
    """Ask what the queue has of these jobs, also of those that have just ended; of an array, each element.

    Raises:
        LaunchError: squeue failed, or there is none.
    """
    if not job_ids:
        return []
    try:
        return parse_queue(
            _run(("squeue", "-h", "-t", "all", "-j", ",".join(job_ids), "-o", SQUEUE_FORMAT), timeout_seconds)
        )
    except LaunchError as error:
        if "Invalid job id" in error.stderr:  # it knows none of them any more
            return []
        raise


def ask_accounting(job_id: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[str, int] | None:
    """Ask how a job ended: its state and its exit code; None if the accounting does not know it.

    Raises:
        LaunchError: There is no sacct, or it has no database.
    """
    command = ("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode")
    line = next(iter(_run(command, timeout_seconds).splitlines()), "")
    state, _, codes = line.partition("|")
    if not state:
        return None
    return state.split()[0], parse_exit_code(codes)


def signal_batch(job_id: str, signal_name: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """Send a signal to the batch script of a job, which is its launcher.

    Raises:
        LaunchError: Slurm refused; the text has its words.
    """
    _run(("scancel", f"--signal={signal_name}", "--batch", job_id), timeout_seconds)


def cancel_job(job_id: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """Take a job out of the queue, or end all its processes.

    Raises:
        LaunchError: Slurm refused; the text has its words.
    """
    _run(("scancel", job_id), timeout_seconds)


def ask_grant(job_id: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> SlurmGrant:
    """Ask the controller what it has given a job, and when.

    Raises:
        LaunchError: scontrol failed.
    """
    return parse_grant(_run(("scontrol", "show", "job", job_id), timeout_seconds))


def requeue_job(job_id: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """Put a running batch job back into the queue; Slurm ends it then.

    Raises:
        LaunchError: Slurm refused; the text has its words.
    """
    _run(("scontrol", "requeue", job_id), timeout_seconds)


def layout_of(step: SlurmStep, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[str, ...]:
    """Return the node of each rank: from the environment where it tells it, else from Slurm.

    Raises:
        LayoutError: The environment does not tell it and there is no sattach; or the answer contradicts this task.
        LaunchError: sattach failed.
    """
    try:
        return step.nodes_by_rank
    except LayoutError:
        if shutil.which(_SATTACH) is None:
            raise
    return ask_layout(step, timeout_seconds=timeout_seconds)


def ask_layout(step: SlurmStep, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[str, ...]:
    """Ask Slurm for the node of each rank, and hold the answer against what this task knows of itself.

    Of a heterogeneous step each component is a step of a job of its own, with ranks from 0. Slurm forgets it when its
    tasks have ended, so ask while all run. Each call asks the controller: one task should, and tell the others.

    Args:
        timeout_seconds: For each component.

    Raises:
        LaunchError: sattach failed, answered something else or not in time.
        LayoutError: The answer contradicts this task's own place.
    """
    here = frozenset(step.nodes)
    job_ids = [group.job_id for group in step.het_groups if not here.isdisjoint(group.nodes)] or [step.job_id]
    nodes_by_rank: list[str] = []
    for job_id in job_ids:
        nodes_by_rank += _sattach_layout(f"{job_id}.{step.step_id}", timeout_seconds)
    step.check_own_place(nodes_by_rank)
    return tuple(nodes_by_rank)


def _sattach_layout(step_name: str, timeout_seconds: float) -> list[str]:
    """Ask for one step. A sample of the answer:

    Job step layout:
        4 tasks, 2 nodes (gpu-09,r1-n10)

        Node 0 (gpu-09), 3 task(s): 0 2 3
        Node 1 (r1-n10), 1 task(s): 1
    """
    command = (_SATTACH, "--layout", step_name)
    answer = _run(command, timeout_seconds)
    places = {int(rank): line["node"] for line in _LAYOUT_LINE.finditer(answer) for rank in line["ranks"].split()}
    num_tasks = sum(int(line["count"]) for line in _LAYOUT_LINE.finditer(answer))
    if not places or sorted(places) != list(range(num_tasks)):
        raise LaunchError(
            f"{' '.join(command)} exited with 0 but gave no layout: {answer[-300:]!r}. Expected each rank on one node.",
            command=command,
            returncode=0,
            stderr=answer,
        )
    return [places[rank] for rank in range(num_tasks)]


def _run(command: Sequence[str], timeout_seconds: float) -> str:
    """Run one of Slurm's programs to its end and return what it wrote.

    Raises:
        LaunchError: It cannot be started, failed or took too long; the text has Slurm's words.
    """
    line = " ".join(command)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{line} did not end within {timeout_seconds:g} s. Slurm's controller may be down or busy; try again."
        raise LaunchError(message, command=command, returncode=-1, stderr="") from error
    except OSError as error:
        message = f"{line} cannot be started: {error}. Slurm's commands must be on PATH."
        raise LaunchError(message, command=command, returncode=-1, stderr="") from error
    if done.returncode != 0:
        words = done.stderr.strip()
        raise LaunchError(
            f"{line} exited with {done.returncode}: {words[-500:] or 'without a word'}",
            command=command,
            returncode=done.returncode,
            stderr=done.stderr,
        )
    return done.stdout
