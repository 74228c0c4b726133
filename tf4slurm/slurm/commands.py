"""Make srun command lines, and run scontrol, squeue, sinfo, sacct, scancel and sattach.

Wrappers and plugins of a site may add lines to the output of these programs. The parsers skip them. Each function that
runs a program raises LaunchError if the program cannot be started, exits with another code than 0, times out (by
default after 30 s) or prints no valid output. The message contains the end of the program's standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tf4slurm.errors import LaunchError, LayoutError
from tf4slurm.slurm.environ import HetComponent, SlurmAllocation, SlurmStep
from tf4slurm.slurm.job_id import JobId
from tf4slurm.slurm.nodelist import expand_nodelist
from tf4slurm.slurm.parsing import (
    ACCOUNTING_FORMAT,
    COMMENT_FORMAT,
    SQUEUE_FORMAT,
    QueueEntry,
    SlurmJob,
    SlurmResources,
    parse_accounting,
    parse_allocation,
    parse_comments,
    parse_exit_codes,
    parse_fields,
    parse_job,
    parse_job_id,
    parse_layout,
    parse_queue,
    parse_resources,
)
from tf4slurm.slurm.site import NODES_FORMAT, SlurmSite, parse_nodes, parse_site, parse_version
from tf4slurm.system.exec_limits import explain_too_long

logger = logging.getLogger(__name__)

T = TypeVar("T")

_USER_DEFAULTS = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_")  # users change the programs' output with these
_TIMEOUT_SECONDS = 30.0  # an answer takes 10 ms; a program gives up after Slurm's MessageTimeout (default 10 s)
_MAX_CHARACTERS = 200  # of a command in an error message
_MAX_IDS = 1000  # in one query: Linux allows 128 KB for an argument
_TRANSITIONAL = "transitional state"  # scancel --verbose, before it sends a signal again
_PROGRAMS = ("srun", "sbatch", "scontrol", "squeue", "scancel")
_STEP = re.compile(r"^(\d\S*\.\d+)\s*$", re.MULTILINE)  # not "4711.batch"
# Slurm 22.05 and 24.11 without slurm.conf: they look for the controller in DNS, and print each failed step.
_NO_CLUSTER = re.compile(r"Could not establish a configuration source|fetch_config: DNS SRV lookup failed")
_NO_CLUSTER_TEXT = (
    "Slurm's programs on this host have no cluster, because they find no slurm.conf. Use a host of the cluster, such "
    "as its login node, or name the file with SLURM_CONF."
)
_EXITED_LINE = re.compile(r"^srun: error: \S+: tasks? (?P<ranks>\d[\d,-]*): ")


def run_program(
    command: Sequence[str],
    timeout_seconds: float = _TIMEOUT_SECONDS,
    *,
    environ: Mapping[str, str] | None = None,
    text: str = "",
    directory: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs until it exits, and return its output as text.

    Args:
        environ: The program's environment variables. By default os.environ without variables such as SQUEUE_FORMAT,
            with which users change the output.
        text: The program's standard input.
        directory: The program's working directory, by default that of this process.

    Raises:
        LaunchError: The program cannot be started, exits with another code than 0, or times out.
    """
    line = _shorten(command)
    if environ is None:
        environ = _without_user_defaults(os.environ)
    try:
        done = subprocess.run(
            command,
            check=False,
            input=text,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",  # a file name in a batch script need not be UTF-8
            env=dict(environ),
            cwd=directory,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{line} timed out after {timeout_seconds:g} s. Slurm's controller may be down or busy; try again."
        raise LaunchError(message, command=command, returncode=-1) from error
    except OSError as error:
        reason = explain_too_long(error, command, environ) or f"{error}. Slurm's programs must be on PATH."
        raise LaunchError(f"{line} cannot be started: {reason}", command=command, returncode=-1) from error
    if done.returncode != 0:
        words = done.stderr.strip()[-500:] or "it wrote no error message"
        message = f"{line} exited with code {done.returncode}: {words}"
        if has_no_cluster(done.stderr):
            message = f"{command[0]} failed: {_NO_CLUSTER_TEXT}"
        raise LaunchError(message, command=command, returncode=done.returncode, stderr=done.stderr)
    return done


def has_no_cluster(stderr: str) -> bool:
    """Return whether a program of Slurm has failed because it has no slurm.conf, and so no cluster."""
    return _NO_CLUSTER.search(stderr) is not None


def _shorten(command: Sequence[str]) -> str:
    """Return a command as text, cut to 200 characters."""
    line = " ".join(command)
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"


def _without_user_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(_USER_DEFAULTS)}


def srun_command(
    allocation: SlurmAllocation, num_tasks: int, command: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the srun command for one step on the whole allocation, which runs `command` in each task.

    The launcher decides what follows the exit of a task. Therefore srun must not end the step when a task exits
    (--kill-on-bad-exit=0 and --wait=0). --overlap lets the step start while an interactive shell runs in the
    allocation. --mpi=none is given because a site's default may wait for an MPI library that no task has.

    Args:
        num_tasks: Number of tasks. In a heterogeneous job, the numbers in `allocation.components` are used instead.
        options: Further options of srun. They override those above.
    """
    always = ("--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL", "--input=none")
    line = ["srun"]
    whole = HetComponent(num_tasks, allocation.cpus_per_task)
    for number, component in enumerate(allocation.components or (whole,)):
        if number > 0:
            line.append(":")
        if allocation.components:
            line.append(f"--het-group={number}")
        line += [f"--ntasks={component.num_tasks}", *always]
        if component.cpus_per_task is not None:
            line.append(f"--cpus-per-task={component.cpus_per_task}")
        line += [*options, *command]
    return tuple(line)


def srun_on_each_node_command(num_nodes: int, command: Sequence[str], options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the srun command that starts `command` once on each node, and puts a task's rank before its output.

    `options` are further ones of srun.

    Each task gets srun's standard input. srun splits an output line of more than 1,024 bytes (MAX_MSG_LEN in
    slurmstepd) into parts, and may print other tasks' parts between them. --label starts each part with the rank of its
    task, such as "3: ", so that the caller can join the parts.
    """
    nodes = ("--label", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1")
    others = ("--mpi=none", "--overlap", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0")
    return ("srun", *nodes, *options, *others, *command)


def exited_tasks(line: str) -> frozenset[int]:
    """Return the ranks of the tasks whose failure a line of srun's standard error reports.

    For "srun: error: r1-n[2,9]: tasks 0,2-3: Exited with exit code 2" the ranks are 0, 2 and 3. For a line of another
    form the result is empty.
    """
    match = _EXITED_LINE.match(line)
    return frozenset(int(name[1:]) for name in expand_nodelist(f"t[{match['ranks']}]")) if match else frozenset()


def missing_programs() -> tuple[str, ...]:
    """Return the names of the programs of Slurm that tf4slurm needs and that are not on PATH."""
    return tuple(program for program in _PROGRAMS if shutil.which(program) is None)


def query_client_version(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Return the version of Slurm's programs on this host, such as "22.05.8", without a request to the controller."""
    return _query(("srun", "--version"), parse_version, timeout_seconds)


def query_site(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> SlurmSite:
    """Return the configuration of this Slurm site, with its unavailable nodes and its planned maintenance."""
    partitions = _read(("scontrol", "--oneliner", "show", "partition"), timeout_seconds)
    nodes = _read(("sinfo", "--noheader", f"--format={NODES_FORMAT}"), timeout_seconds)
    reservations = _read(("scontrol", "--oneliner", "show", "reservation"), timeout_seconds)
    return _query(
        ("scontrol", "show", "config"),
        lambda config: parse_site(config, partitions, nodes, reservations),
        timeout_seconds,
    )


def query_partitions(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> list[str]:
    """Return the names of the partitions that sinfo lists."""
    rows = parse_nodes(_read(("sinfo", "--noheader", f"--format={NODES_FORMAT}"), timeout_seconds))
    return list(dict.fromkeys(row[0] for row in rows))


def check_accounting(*, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """Raise LaunchError unless sacct answers a query."""
    _read(("sacct", "--noheader", "--allocations", "--starttime=now"), timeout_seconds)


def query_job(job_id: JobId, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> SlurmJob:
    """Return the state of a job from the controller, with the preemption mode of the job's partition."""
    job = _query(("scontrol", "show", "job", str(job_id)), parse_job, timeout_seconds)
    answer = _read(("scontrol", "show", "partition", job.partition), timeout_seconds)
    partition = parse_fields(answer, "PartitionName")
    return dataclasses.replace(job, preempt_mode=partition.get("PreemptMode", ""))


def query_allocation(allocation: SlurmAllocation) -> SlurmAllocation:
    """Return the allocation with the job's numbers of tasks, nodes and CPUs per task from Slurm's controller.

    In a step, such as `srun --pty bash`, SLURM_NTASKS and other variables describe the step instead of the job.
    """
    command = ("scontrol", "show", "job", str(allocation.job_id))
    return _query(command, lambda text: parse_allocation(allocation, text), _TIMEOUT_SECONDS)


def confirm_element(allocation: SlurmAllocation) -> SlurmAllocation:
    """Return the allocation with the job's id from Slurm's controller, if the environment names an element of an array.

    A job that an element has submitted with sbatch inherits SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID from it. If
    Slurm does not answer, return the allocation unchanged, and log a warning.
    """
    if allocation.job_id.element is None:
        return allocation
    try:
        job_id = _query(("scontrol", "show", "job", str(allocation.number)), parse_job_id, _TIMEOUT_SECONDS)
    except LaunchError as error:
        logger.warning("it is not confirmed that this job is %s: %s", allocation.job_id, error)
        return allocation
    return dataclasses.replace(allocation, job_id=job_id)


def query_resources(job_id: JobId) -> SlurmResources:
    """Return the resources that Slurm allocated to a job, from the controller."""
    return parse_resources(_read(("scontrol", "show", "job", str(job_id))))


def query_queue(job_ids: Iterable[JobId], *, timeout_seconds: float = _TIMEOUT_SECONDS) -> list[QueueEntry]:
    """Return squeue's entries for jobs, including jobs that ended recently (within Slurm's MinJobAge).

    Each element of a job array has an entry, and each component of a heterogeneous job. Ids that squeue does not know
    have none. The timeout is for each query of at most 1,000 ids.
    """
    texts = list(dict.fromkeys(str(job_id if job_id.element is not None else job_id.whole) for job_id in job_ids))
    found: list[QueueEntry] = []
    for start in range(0, len(texts), _MAX_IDS):
        ids = ",".join(texts[start : start + _MAX_IDS])
        try:
            found += parse_queue(
                _read(("squeue", "-h", "--array", "-t", "all", "-j", ids, "-o", SQUEUE_FORMAT), timeout_seconds)
            )
        except LaunchError as error:
            if "Invalid job id" not in error.stderr:  # squeue no longer lists any of these jobs
                raise
    return found


def find_jobs_with_comment(comment: str, environ: Mapping[str, str], *, timeout_seconds: float) -> list[JobId]:
    """Return the ids of this user's jobs whose --comment is `comment`, including recently ended jobs."""
    command = ("squeue", "-h", "--me", "--array", "-t", "all", "-o", COMMENT_FORMAT)
    done = run_program(command, timeout_seconds, environ=_without_user_defaults(environ))
    return parse_comments(done.stdout, comment)


def query_accounting(job_id: JobId, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> dict[JobId, tuple[str, int]]:
    """Return Slurm's state and the exit code of a job, or of each element or component of it, from sacct."""
    command = ("sacct", "-n", "-X", "-P", "-j", str(job_id), "-o", ACCOUNTING_FORMAT)
    return parse_accounting(_read(command, timeout_seconds))


def query_exit_codes(job_id: JobId, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> dict[JobId, int]:
    """Return the exit code of a job, or of each element or component of it, from the controller."""
    return parse_exit_codes(_read(("scontrol", "show", "job", str(job_id)), timeout_seconds))


def signal_batch(job_id: JobId, signal_name: str) -> None:
    """Send a signal, such as "USR1", to a job's batch script once. The script becomes the launcher (`exec`).

    Slurm 22.05 delivers the signal to an element of an array that has pending siblings, but answers that the job is
    "in transitional state". scancel would send the signal again, up to 10 times. Therefore it is ended at this answer.
    """
    command = ("scancel", "--verbose", f"--signal={signal_name}", "--batch", str(job_id))
    environ = _without_user_defaults(os.environ)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,  # a site's wrapper may run scancel as a child
        )
    except OSError as error:
        raise LaunchError(f"{_shorten(command)} cannot be started: {error}.", command=command, returncode=-1) from error
    timer = threading.Timer(_TIMEOUT_SECONDS, _kill_group, [process])
    timer.daemon = True
    timer.start()
    lines = []
    try:
        with process:
            for line in process.stderr or ():
                lines.append(line)
                if _TRANSITIONAL in line and job_id.element is not None:
                    _kill_group(process)
                    return
    finally:
        timer.cancel()
    if process.returncode != 0:
        words = "".join(lines).strip()[-500:]
        message = f"{_shorten(command)} exited with code {process.returncode}: {words}"
        if process.returncode == -signal.SIGKILL:
            message = f"{_shorten(command)} timed out after {_TIMEOUT_SECONDS:g} s. Try again."
        raise LaunchError(message, command=command, returncode=process.returncode, stderr="".join(lines))


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the process group that a process leads. The process must not have been waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def cancel_job(*job_ids: JobId) -> None:
    """Cancel jobs. Pending jobs leave the queue, and the processes of running jobs are ended.

    scancel's filter --state is not used: for one pending element, Slurm 22.05 then cancels all pending ones.
    """
    for start in range(0, len(job_ids), _MAX_IDS):
        _read(("scancel", *map(str, job_ids[start : start + _MAX_IDS])))


def signal_step(step_id: str, signal_name: str) -> None:
    """Send a signal, such as "TERM", to every process of a step, such as "4711.0"."""
    _read(("scancel", f"--signal={signal_name}", step_id))


def kill_job(*job_ids: JobId) -> None:
    """Kill every process of the jobs' steps at once, and cancel the jobs.

    Slurm kills a cancelled step at once, but the processes of a cancelled job only KillWait after SIGTERM.
    """
    for job_id in job_ids:
        with contextlib.suppress(LaunchError):  # no step runs
            answer = _read(("squeue", "--steps", "-h", "-j", str(job_id), "-o", "%i"))
            if steps := _STEP.findall(answer):
                _read(("scancel", *steps))
    cancel_job(*job_ids)


def cancel_step(step: SlurmStep) -> None:
    """End every process of a step on all its nodes. This includes the caller if it belongs to the step."""
    _read(("scancel", f"{step.job_id}.{step.step_id}"))


def requeue_job(job_id: JobId) -> None:
    """Return a running batch job to the queue. Slurm ends the processes of the job."""
    _read(("scontrol", "requeue", str(job_id)))


def exclude_nodes(job_id: JobId, nodes: Sequence[str]) -> None:
    """Exclude nodes from a pending job, in addition to those of its --exclude."""
    excluded = query_job(job_id).excluded_nodes
    _read(("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(filter(None, (excluded, *nodes)))}"))


def allow_requeue(job_id: JobId, allowed: bool) -> None:
    """Allow or forbid Slurm to requeue a job."""
    _read(("scontrol", "update", f"JobId={job_id}", f"Requeue={allowed:d}"))


def layout_of(step: SlurmStep, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[str, ...]:
    """Return the node of each rank of a step, from the environment or else from sattach.

    Raises:
        LayoutError: The environment does not determine the layout and sattach is not installed, or sattach's answer
            contradicts the environment.
        LaunchError: sattach fails.
    """
    try:
        return step.nodes_by_rank
    except LayoutError:
        if shutil.which("sattach") is None:
            raise
    return query_layout(step, timeout_seconds=timeout_seconds)


def query_layout(step: SlurmStep, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[str, ...]:
    """Return the node of each rank of a step from sattach, checked against the environment of this task.

    A heterogeneous step needs one query for each component, because Slurm runs each as a step of a separate job, with
    ranks from 0. Slurm forgets a step when its tasks have ended, so call this function while all tasks run. Call the
    function in one task only, because a query from each task would overload the controller.

    Args:
        step: The step of this task.
        timeout_seconds: Timeout in seconds for each query.

    Raises:
        LayoutError: The answer contradicts the environment of this task.
        LaunchError: sattach fails or prints no layout.
    """
    own_nodes = frozenset(step.nodes)
    job_ids = [job_id for job_id, nodes in step.het_groups.items() if not own_nodes.isdisjoint(nodes)]
    nodes_by_rank: list[str] = []
    for job_id in job_ids or [step.job_id]:
        nodes_by_rank += _query(("sattach", "--layout", f"{job_id}.{step.step_id}"), parse_layout, timeout_seconds)
    step.check_own_place(nodes_by_rank)
    return tuple(nodes_by_rank)


def _read(command: Sequence[str], timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Return the standard output of one of Slurm's programs."""
    return run_program(command, timeout_seconds).stdout


def _query(command: Sequence[str], parse: Callable[[str], T], timeout_seconds: float) -> T:
    """Return the parsed standard output of a program. A ValueError of `parse` becomes a LaunchError."""
    answer = _read(command, timeout_seconds)
    try:
        return parse(answer)
    except ValueError as error:
        raise LaunchError(f"{_shorten(command)}: {error}", command=command) from error
