"""Check Slurm: its programs, its controller, the site's configuration, and tf4slurm's profile of the site."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import TypedDict

from tf4slurm.doctor.finding import Finding, warn_unless
from tf4slurm.errors import LaunchError
from tf4slurm.slurm import commands
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.slurm.parsing import parse_time_limit
from tf4slurm.slurm.site import Partition, SlurmSite
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.settings import Setting

_TIMEOUT_SECONDS = 15.0  # Slurm's programs give up after MessageTimeout (default 10 s)
_OLDEST_VERSION = (20, 11)  # the first version whose srun has --overlap
_MAX_PARTITIONS = 12
SETTINGS = {
    "AuthType": "auth/munge",
    "CommunicationParameters": "",
    "LaunchParameters": "",
    "MpiDefault": "none",
    "PrologFlags": "",
    "SelectType": "select/cons_tres",
    "SlurmctldParameters": "",
    "TaskPlugin": "task/none",
}
"""Settings of slurm.conf that affect how steps start, with the values with which most tests of tf4slurm run."""


class SubjectTests(TypedDict):
    """Results of tf4slurm's own tests on Slurm: of one test file, or of one kind of site.

    `passed`, `failed` and `skipped` are numbers of tests. `settings` has those settings of slurm.conf in which the site
    of the tests differs from `SETTINGS`.
    """

    passed: int
    failed: int
    skipped: int
    settings: dict[str, str]


def check_slurm(environ: Mapping[str, str], settings: Mapping[str, Setting] | None = None) -> list[Finding]:
    """Run all checks of Slurm from this host. With `settings` (`read_settings`), also run `check_profile`."""
    allocation = SlurmAllocation.from_environ(environ)
    if allocation is not None and allocation.num_nodes is None:
        text = f"the environment names job {allocation.job_id} but not its nodes, as after ssh to a node of the job"
        advice = f"Enter the job by srun --jobid={allocation.job_id} --overlap --pty bash, or start a new shell."
        return [Finding("warn", "slurm variables", text, advice), *_check_slurm(allocation, settings)]
    return _check_slurm(allocation, settings)


def _check_slurm(allocation: SlurmAllocation | None, settings: Mapping[str, Setting] | None) -> list[Finding]:
    if shutil.which("srun") is None and allocation is None:
        return [Finding("ok", "slurm", "Slurm is not installed: jobs run as local processes")]
    if missing := commands.missing_programs():
        text = f"Slurm's {', '.join(missing)} cannot be found on PATH"
        return [Finding("fail", "slurm", text, "Add the directory of Slurm's programs to PATH, or load its module.")]
    try:
        client = commands.query_client_version(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        text = f"Slurm's programs do not work on this host: {_one_line(error)}"
        if commands.has_no_cluster(error.stderr):
            text = "Slurm's programs are installed, but have no cluster"
        advice = "Jobs run as local processes. Slurm needs its slurm.conf, in /etc/slurm or named by SLURM_CONF."
        return [Finding("warn" if allocation is None else "fail", "slurm", text, advice)]
    try:
        site = commands.query_site(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        advice = "Try again; if it fails again, ask the cluster's administrators: no job starts without the controller."
        return [Finding("fail", "slurm", _one_line(error), advice)]
    findings = [check_version(client, site.version), _check_accounting(site), *check_site(site)]
    return findings + list(check_profile(settings or {}, site))


def check_version(client: str, controller: str) -> Finding:
    """Check that Slurm's programs on this host have at least version 20.11.

    The finding names the versions with which tf4slurm was tested: those of the controller's release, or if there are
    none, all.

    Args:
        client: Version of Slurm's programs on this host, such as "24.11.5".
        controller: Version of slurmctld.
    """
    text = f"Slurm {controller}"
    if client != controller:
        text += f", programs of {client} on this host"
    if tuple(map(int, re.findall(r"\d+", client)[:2])) < _OLDEST_VERSION:
        return Finding("fail", "slurm", f"{text}: its srun has no --overlap", "Use programs of Slurm 20.11 or newer.")
    tests = read_tests()
    same = [version for version in tests if version.split(".")[:2] == controller.split(".")[:2]]
    return Finding("ok", "slurm", f"{text}; tf4slurm was tested with {', '.join(same or sorted(tests))}")


def read_tests() -> dict[str, dict[str, SubjectTests]]:
    """Return the results of tf4slurm's own tests on Slurm, which slurm_tests.json contains.

    The keys are the version of Slurm, and then a description of a test file or a kind of site.
    """
    text = resources.files("tf4slurm.doctor").joinpath("slurm_tests.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, SubjectTests]] = json.loads(text)
    return found


def _check_accounting(site: SlurmSite) -> Finding:
    advice = "tf4slurm does not need it. Keep the run directory: Slurm forgets an ended job within minutes."
    if not site.has_accounting:
        return Finding("warn", "sacct", "there is no accounting, so sacct finds no jobs", advice)
    try:
        commands.check_accounting(timeout_seconds=_TIMEOUT_SECONDS)
    except LaunchError as error:
        return Finding("warn", "sacct", f"accounting does not answer: {_one_line(error)}", advice)
    return Finding("ok", "sacct", "sacct answers")


def _check_settings(site: SlurmSite) -> Finding:
    """Return an "ok" finding with the site's values of the settings in `SETTINGS`.

    It also names those values with which no test of tf4slurm has succeeded.
    """
    tested = {f"{name}={part}" for name, value in SETTINGS.items() for part in value.split(",")}
    for subjects in read_tests().values():
        for each in subjects.values():
            if each["passed"] and not each["failed"]:
                tested |= {f"{name}={part}" for name, value in each["settings"].items() for part in value.split(",")}
    shown = {name: site.settings.get(name, "").replace("(null)", "") for name in SETTINGS}
    present = [f"{name}={part}" for name, value in shown.items() for part in value.split(",") if part]
    untested = [each for each in present if each not in tested]
    text = f"{', '.join(present) or 'nothing special'}"
    if not untested:
        return Finding("ok", "settings", f"{text}: tested")
    advice = (
        "Run salloc -N 2 -n 4 tf4slurm test. If a job fails, tell the cluster's administrators about these settings."
    )
    return Finding("ok", "settings", f"{text}; not tested: {', '.join(untested)}", advice)


def check_site(site: SlurmSite, grace_period_seconds: float = JobSpec.grace_period_seconds) -> Iterator[Finding]:
    """Yield findings about the site's settings, for a job that needs `grace_period_seconds` to save and stop."""
    text, advice = f"Slurm reserves ports of {site.reserved_ports} for each step", ""
    if not site.reserved_ports:
        text = "Slurm reserves no ports (MpiParams), so jobs use any free ports"
        advice = "If a firewall allows only some ports, give --ports FIRST-LAST."
    yield Finding("ok", "step ports", text, advice)
    yield _check_settings(site)

    yield warn_unless(
        site.kill_wait_seconds >= grace_period_seconds,
        topic="kill wait",
        text=f"at a time limit or scancel Slurm kills {site.kill_wait_seconds} s after SIGTERM (KillWait)",
        problem=f", sooner than the {grace_period_seconds:g} s of --grace-period",
        advice="Let Slurm send a signal earlier: sbatch --signal=B:USR1@120 (with exec tf4slurm run); or lower "
        "--grace-period.",
    )
    yield warn_unless(
        site.requeues,
        topic="requeue",
        text=f"Slurm may requeue a batch job (JobRequeue={site.requeues:d})",
        problem=" only if it requests that",
        advice='For "tf4slurm run --requeue" submit with sbatch --requeue.',
    )
    yield warn_unless(
        site.process_tracking == "cgroup",
        topic="processes",
        text=f"Slurm finds the processes of a job by {site.process_tracking}",
        problem=": a process that leaves its session may survive the job",
        advice="tf4slurm ends all processes that its tasks started, unless it is killed itself: start no daemons in "
        "scripts. The cluster's administrators could set ProctrackType=proctrack/cgroup.",
    )
    for reservation in site.maintenance:
        yield Finding(
            "warn",
            "maintenance",
            f"{reservation.name} reserves {reservation.nodes} from {reservation.start} to {reservation.end}",
            "A job whose --time reaches into it does not start on these nodes: give less --time, or wait for its end.",
        )
    for partition in site.partitions[:_MAX_PARTITIONS]:
        yield _check_partition(partition, grace_period_seconds)


def _check_partition(partition: Partition, grace_period_seconds: float) -> Finding:
    default = "" if partition.default_time in ("NONE", "") else f", {partition.default_time} without --time"
    limit = "no time limit" if partition.max_time == "UNLIMITED" else f"at most {partition.max_time}"
    text = f"{partition.name}{' (default)' if partition.is_default else ''}: {limit}{default}"
    if partition.state != "UP":
        text += f", is {partition.state}"
        return Finding("warn", "partition", text, "No job starts in it: use another partition.")
    if partition.num_unavailable:
        text += f"; {partition.num_unavailable} of {partition.num_nodes} nodes are drained, down or reserved"
        if partition.num_unavailable == partition.num_nodes:
            return Finding("warn", "partition", text, "No job starts in it now: see sinfo -R, or use another.")
    if partition.preempt_mode in ("OFF", ""):
        return Finding("ok", "partition", text)
    text += f"; preemption: {partition.preempt_mode} after {partition.grace_period_seconds} s (GraceTime)"
    advice = []
    if partition.grace_period_seconds < grace_period_seconds:
        advice.append(f"Give --grace-period less than {partition.grace_period_seconds or 1} s there, and save often.")
    if partition.preempt_mode != "REQUEUE":
        advice.append('Slurm does not requeue a preempted job: "tf4slurm run --requeue N" does, within that time.')
    return Finding("warn" if advice else "ok", "partition", text, " ".join(advice))


def check_profile(settings: Mapping[str, Setting], site: SlurmSite) -> Iterator[Finding]:
    """Yield a finding for each of the partition, time limit, GPU type and constraint that the settings request.

    For QOS and account a finding says that they were not checked, because Slurm lists them only with accounting.

    Args:
        settings: The settings of a site profile and all settings files (`read_settings`).
        site: What Slurm has: partitions, GPU types and features.
    """

    def value(name: str) -> str:
        return str(settings[name].value) if name in settings else ""

    partitions = {each.name: each for each in site.partitions}
    present = {"partition": partitions.keys(), "gpu_type": site.gpu_types, "constraint": site.features}
    for name, names in present.items():
        if value(name):
            option = f"--{name.replace('_', '-')}"
            yield warn_unless(
                all(each in names for each in value(name).replace("&", ",").replace("|", ",").split(",")),
                topic="profile",
                text=f"{option} {value(name)} of {settings[name].origin}",
                problem=f" does not exist here; there is {', '.join(sorted(names)) or 'none'}",
                advice=f"Change it in the file, or give {option}.",
            )
    default = next((each.name for each in site.partitions if each.is_default), "")
    partition = partitions.get(value("partition") or default)
    limit, requested = parse_time_limit(partition.max_time if partition else ""), parse_time_limit(value("time"))
    if partition and requested is not None:
        yield warn_unless(
            limit is None or requested <= limit,
            topic="profile",
            text=f"--time {value('time')} of {settings['time'].origin}",
            problem=f" exceeds the limit of partition {partition.name}, {partition.max_time}",
            advice="Change it in the file, or give --time.",
        )
    for name in ("qos", "account"):
        if value(name):
            text = f"--{name} {value(name)} of {settings[name].origin} was not checked; sbatch --test-only checks it"
            yield Finding("ok", "profile", text)


def _one_line(error: LaunchError) -> str:
    return " ".join(str(error).split())
