"""Decide how the cluster forms, or why it did not form. No function here has side effects."""

from __future__ import annotations

from collections import Counter

from tf4slurm.cluster import Task, format_tasks
from tf4slurm.control.messages import PortFailure
from tf4slurm.control.records import Outcome, TaskRecord
from tf4slurm.control.task_table import TaskTable
from tf4slurm.errors import EXIT_NOT_FORMED
from tf4slurm.network.interfaces import is_loopback
from tf4slurm.spec.job_spec import HoldPorts, JobSpec


def spread_tasks(tasks: TaskTable, spec: JobSpec) -> list[Task]:
    """Return the task of each member, by rank, for a job with placement "spread".

    Members that are already lost become spares, with the highest indices.
    """
    present = tasks.present_members
    counts = Counter(record.task.task_type for record in present)
    placed = iter(spec.place(counts, [record.node for record in present]))
    numbers = iter(range(counts["spare"], len(tasks.members)))
    return [Task("spare", next(numbers)) if record.is_gone else next(placed) for record in tasks.members]


def find_local_address(tasks: TaskTable) -> Outcome | None:
    """Return the outcome of a job that must end because a member has a loopback address. Return None if none has.

    Other nodes cannot reach such an address. In a job on a single node, loopback addresses are valid.
    """
    present = tasks.present_members
    for record in present if len({record.node for record in present}) > 1 else ():
        if record.address is not None and is_loopback(record.address.host):
            reason = f"{record} has the address {record.address.host}, which no other host can reach. Choose a network "
            return Outcome(EXIT_NOT_FORMED, f"{reason}with --interface.", record.task)
    return None


def not_attached(tasks: TaskTable, seconds: float) -> Outcome:
    """Return the outcome of a job whose external chief has left, if no other chief registers within `seconds`."""
    chief = tasks.chief
    reason = f"No other chief has attached within {seconds:g} s after restart()."
    return Outcome(EXIT_NOT_FORMED, reason, None if chief is None else chief.task, has_timed_out=True)


def not_formed(tasks: TaskTable, attempt: int, spec: JobSpec) -> Outcome:
    """Return the outcome of a job whose cluster did not form within the start timeout."""
    present = tasks.present_members
    missing = [record for record in present if record.attempt != attempt]
    late = missing or [record for record in present if record.observed.state != "ready"] or list(tasks.members)
    what = "did not register" if missing else "did not check the addresses of other tasks"
    return Outcome(
        EXIT_NOT_FORMED,
        f"The cluster did not form within {spec.start_timeout_seconds:g} s: {format_tasks(late)} {what}. "
        "Look at their logs, or raise --start-timeout.",
        late[0].task,
        has_timed_out=True,
    )


def describe_port_failure(record: TaskRecord, port_failure: PortFailure) -> str:
    """Return as a sentence why the server of a task could not listen."""
    port = record.address.port if record.address is not None else 0
    if port_failure == "taken":
        return f"Another process listens on port {port} of {record}."
    return f"The server of {record} could not listen on port {port}, on which no other process listens."


def port_failure_cure(port_failure: PortFailure, hold_ports: HoldPorts, num_other_ports: int) -> str:
    """Return as sentences what has been tried after a port failure, and what the user can do."""
    times = "once" if num_other_ports == 1 else f"{num_other_ports} times"
    tried = f"The cluster has formed on other ports {times}. " if num_other_ports else ""
    if port_failure == "held":
        if hold_ports == "always":
            return f"{tried}With --hold-ports always it needs TensorFlow 2.3 or newer. Give --hold-ports auto or never."
        return f"{tried}If the script opens another port, let it choose a free one: port 0."
    held = "" if hold_ports == "always" else ", or with TensorFlow 2.3 or newer --hold-ports always"
    return f"{tried}Give --ports a range that no other program uses{held}."
