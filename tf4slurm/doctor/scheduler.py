"""Checks of Slurm: its programs, its controller, and the site's configuration."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from tf4slurm.doctor.finding import Finding
from tf4slurm.errors import LaunchError
from tf4slurm.slurm import commands
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.site import Partition, SlurmSite
from tf4slurm.spec import JobSpec

_TIMEOUT_SECONDS = 15.0  # the controller itself gives up after MessageTimeout, 10 s by default
_OLDEST_VERSION = (20, 11)  # the first version whose srun has --overlap
_MAX_PARTITIONS = 12


def check_slurm(environ: Mapping[str, str]) -> list[Finding]:
    """Run all checks of Slurm from this host."""
    allocation = SlurmAllocation.from_environ(environ)
    if shutil.which("srun") is None and allocation is None:
        return [Finding("ok", "slurm", "Slurm is not installed: jobs run as local processes")]
    missing = commands.missing_programs()
    if missing:
        text = f"Slurm's {', '.join(missing)} cannot be found on PATH"
        return [Finding("fail", "slurm", text, "Add the directory of Slurm's programs to PATH, or load its module.")]
    try:
        client = commands.query_client_version(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        text = f"Slurm's programs are installed, but have no cluster: {_one_line(str(error))}"
        advice = "Jobs run as local processes. Slurm needs its slurm.conf, in /etc/slurm or named by SLURM_CONF."
        return [Finding("warn" if allocation is None else "fail", "slurm", text, advice)]
    try:
        site = commands.query_site(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        advice = "Try again; if it fails again, ask the cluster's administrators: no job starts without the controller."
        return [Finding("fail", "slurm", _one_line(str(error)), advice)]
    return [check_version(client, site.version), check_accounting(site), *judge_site(site)]


def check_version(client: str, controller: str) -> Finding:
    """Check the version of the programs on this host, and name the controller's if it differs."""
    text = f"Slurm {controller}"
    if client != controller:
        text += f", programs of {client} on this host"
    if _numbers(client) < _OLDEST_VERSION:
        return Finding("fail", "slurm", f"{text}: its srun has no --overlap", "Use programs of Slurm 20.11 or newer.")
    return Finding("ok", "slurm", text)


def check_accounting(site: SlurmSite) -> Finding:
    """Check that sacct answers, if the site has accounting."""
    advice = "tf4slurm does not need it. Keep the run directory: Slurm forgets an ended job within minutes."
    if not site.has_accounting:
        return Finding("warn", "sacct", "there is no accounting, so sacct finds no jobs", advice)
    try:
        commands.check_accounting(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        return Finding("warn", "sacct", f"accounting does not answer: {_one_line(str(error))}", advice)
    return Finding("ok", "sacct", "sacct answers")


def judge_site(site: SlurmSite, grace_period_seconds: float = JobSpec.grace_period_seconds) -> list[Finding]:
    """Return findings on the site's settings for a job that needs `grace_period_seconds` to save and stop."""
    if site.reserved_ports:
        ports = Finding("ok", "step ports", f"Slurm reserves ports of {site.reserved_ports} for each step")
    else:
        text = "Slurm reserves no ports (MpiParams), so jobs use any free ports"
        ports = Finding("ok", "step ports", text, "If a firewall allows only some ports, give --ports FIRST-LAST.")
    return [ports, _judge_kill_wait(site, grace_period_seconds), _judge_requeue(site), _judge_tracking(site)] + [
        _judge_partition(partition, grace_period_seconds) for partition in site.partitions[:_MAX_PARTITIONS]
    ]


def _judge_kill_wait(site: SlurmSite, grace_period_seconds: float) -> Finding:
    text = f"at a time limit or scancel Slurm kills {site.kill_wait_seconds} s after SIGTERM (KillWait)"
    if site.kill_wait_seconds >= grace_period_seconds:
        return Finding("ok", "kill wait", text)
    advice = (
        "Let Slurm send a signal earlier: sbatch --signal=B:USR1@120 (with exec tf4slurm run); or lower --grace-period."
    )
    return Finding("warn", "kill wait", f"{text}, sooner than the {grace_period_seconds:g} s of --grace-period", advice)


def _judge_requeue(site: SlurmSite) -> Finding:
    if site.requeues:
        return Finding("ok", "requeue", "Slurm may requeue a batch job (JobRequeue=1)")
    text = "Slurm requeues a batch job only if it requests that (JobRequeue=0)"
    return Finding("warn", "requeue", text, 'For "tf4slurm run --requeue" submit with sbatch --requeue.')


def _judge_tracking(site: SlurmSite) -> Finding:
    text = f"Slurm finds the processes of a job by {site.process_tracking}"
    if site.process_tracking == "cgroup":
        return Finding("ok", "processes", text)
    advice = (
        "tf4slurm ends all processes that its tasks started, unless it is killed itself: start no daemons in scripts. "
        "The cluster's administrators could set ProctrackType=proctrack/cgroup."
    )
    return Finding("warn", "processes", f"{text}: a process that leaves its session may survive the job", advice)


def _judge_partition(partition: Partition, grace_period_seconds: float) -> Finding:
    name = f"{partition.name} (default)" if partition.is_default else partition.name
    limit = "no time limit" if partition.max_time == "UNLIMITED" else f"at most {partition.max_time}"
    default = "" if partition.default_time in ("NONE", "") else f", {partition.default_time} without --time"
    text = f"{name}: {limit}{default}"
    if partition.state != "UP":
        return Finding(
            "warn", "partition", f"{text}, is {partition.state}", "No job starts in it: use another partition."
        )
    if partition.preempt_mode in ("OFF", ""):
        return Finding("ok", "partition", text)
    text += f"; preemption: {partition.preempt_mode} after {partition.grace_period_seconds} s (GraceTime)"
    advice = []
    if partition.grace_period_seconds < grace_period_seconds:
        advice.append(f"Give --grace-period less than {partition.grace_period_seconds or 1} s there, and save often.")
    if partition.preempt_mode != "REQUEUE":
        advice.append('Slurm does not requeue a preempted job: "tf4slurm run --requeue N" does, within that time.')
    return Finding("warn" if advice else "ok", "partition", text, " ".join(advice))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
