"""What is looked at of Slurm: its programs, its controller, and what the site has set."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from tf4slurm.doctor.finding import Finding
from tf4slurm.errors import LaunchError
from tf4slurm.slurm import commands
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.slurm.site import Partition, SlurmSite
from tf4slurm.spec import JobSpec

_TIMEOUT_SECONDS = 15.0  # the controller itself gives up after MessageTimeout, 10 s by default
_OLDEST = (20, 11)  # the first whose srun has --overlap
_PARTITIONS = 12  # as many as are shown


def check_slurm(
    environ: Mapping[str, str], grace_period_seconds: float = JobSpec.grace_period_seconds
) -> list[Finding]:
    """Look at Slurm from this host; `grace_period_seconds` is what a job will have to save and stop."""
    allocation = SlurmAllocation.from_environ(environ)
    if shutil.which("srun") is None and allocation is None:
        return [Finding("ok", "slurm", "there is no Slurm here: jobs run as local processes")]
    missing = commands.missing_programs()
    if missing:
        why = f"Slurm's {', '.join(missing)} cannot be found on PATH"
        return [Finding("fail", "slurm", why, "Put the directory of Slurm's programs on PATH, or load its module.")]
    try:
        client = commands.ask_client_version(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        text = f"Slurm's programs are here, but know of no cluster: {_one_line(str(error))}"
        todo = "Jobs run as local processes. For Slurm: its slurm.conf must be here, in /etc/slurm or by SLURM_CONF."
        return [Finding("warn" if allocation is None else "fail", "slurm", text, todo)]
    try:
        site = commands.ask_site(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        todo = "Try again; if it stays so, ask those who run the cluster: without its controller no job starts."
        return [Finding("fail", "slurm", _one_line(str(error)), todo)]
    return [check_version(client, site.version), check_accounting(site), *judge_site(site, grace_period_seconds)]


def check_version(client: str, controller: str) -> Finding:
    """Hold the version of the programs here against the controller's, and both against what tf4slurm needs."""
    text = f"Slurm {controller}"
    if client != controller:
        text += f", programs of {client} on this host"
    if _numbers(client) < _OLDEST:
        return Finding("fail", "slurm", f"{text}: its srun has no --overlap", "Use programs of Slurm 20.11 or newer.")
    return Finding("ok", "slurm", text)


def check_accounting(site: SlurmSite) -> Finding:
    """Ask sacct, where the site has it."""
    without = "tf4slurm needs it for nothing. Keep the run directory: Slurm forgets an ended job within minutes."
    if not site.has_accounting:
        return Finding("warn", "sacct", "there is no accounting, so sacct knows no jobs", without)
    try:
        commands.check_accounting(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        return Finding("warn", "sacct", f"accounting does not answer: {_one_line(str(error))}", without)
    return Finding("ok", "sacct", "sacct answers")


def judge_site(site: SlurmSite, grace_period_seconds: float) -> list[Finding]:
    """Return what the site's settings mean for a job that has `grace_period_seconds` to save and stop."""
    if site.reserved_ports:
        ports = Finding("ok", "step ports", f"Slurm reserves ports of {site.reserved_ports} for each step")
    else:
        text = "Slurm reserves no ports (MpiParams), so any free ones are taken"
        ports = Finding("ok", "step ports", text, "Where a firewall lets only some through, give --ports FIRST-LAST.")
    return [ports, _judge_kill_wait(site, grace_period_seconds), _judge_requeue(site), _judge_tracking(site)] + [
        _judge_partition(partition, grace_period_seconds) for partition in site.partitions[:_PARTITIONS]
    ]


def _judge_kill_wait(site: SlurmSite, grace_period_seconds: float) -> Finding:
    text = f"at a time limit or scancel Slurm kills {site.kill_wait_seconds} s after SIGTERM (KillWait)"
    if site.kill_wait_seconds >= grace_period_seconds:
        return Finding("ok", "kill wait", text)
    todo = "Have Slurm warn before: sbatch --signal=B:USR1@120 (with exec tf4slurm run); or lower --grace-period."
    return Finding("warn", "kill wait", f"{text}, sooner than the {grace_period_seconds:g} s of --grace-period", todo)


def _judge_requeue(site: SlurmSite) -> Finding:
    if site.requeues:
        return Finding("ok", "requeue", "a batch job may be put back into the queue (JobRequeue=1)")
    text = "a batch job is not put back into the queue unless it asks for that (JobRequeue=0)"
    return Finding("warn", "requeue", text, 'For "tf4slurm run --requeue" submit with sbatch --requeue.')


def _judge_tracking(site: SlurmSite) -> Finding:
    text = f"Slurm finds the processes of a job by {site.process_tracking}"
    if site.process_tracking == "cgroup":
        return Finding("ok", "processes", text)
    todo = (
        "tf4slurm ends all that its tasks started, unless it is killed itself; avoid daemons in scripts. Those who run "
        "the cluster could set ProctrackType=proctrack/cgroup."
    )
    return Finding("warn", "processes", f"{text}: what leaves its session may survive the job", todo)


def _judge_partition(partition: Partition, grace_period_seconds: float) -> Finding:
    name = f"{partition.name} (default)" if partition.is_default else partition.name
    limit = "no time limit" if partition.max_time == "UNLIMITED" else f"at most {partition.max_time}"
    default = "" if partition.default_time in ("NONE", "") else f", {partition.default_time} without --time"
    text = f"{name}: {limit}{default}"
    if partition.state != "UP":
        return Finding("warn", "partition", f"{text}, is {partition.state}", "No job starts in it; use another one.")
    if partition.preempt_mode in ("OFF", ""):
        return Finding("ok", "partition", text)
    text += f"; preemption: {partition.preempt_mode} after {partition.grace_period_seconds} s (GraceTime)"
    todo = []
    if partition.grace_period_seconds < grace_period_seconds:
        todo.append(f"Give --grace-period less than {partition.grace_period_seconds or 1} s there, and save often.")
    if partition.preempt_mode != "REQUEUE":
        todo.append('Slurm does not start a preempted job again: "tf4slurm run --requeue N" does, within that time.')
    return Finding("warn" if todo else "ok", "partition", text, " ".join(todo))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
