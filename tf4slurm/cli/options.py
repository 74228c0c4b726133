"""The options that `run` and `task` share, and the plan that they make."""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tf4slurm.agent.placeholders import likely_slips, placeholders_in
from tf4slurm.control.limits import Limits
from tf4slurm.launch.plan import LaunchPlan
from tf4slurm.network.ports import parse_ports
from tf4slurm.placement import PACK, fill_counts, place_tasks

logger = logging.getLogger(__name__)

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
"""The names of those in `agent.py`, which loads asyncio: a help page need not wait for that."""

_COUNT = click.IntRange(min=0)


class _Seconds(click.FloatRange):
    name = "SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


_SECONDS = _Seconds(min=0, min_open=True)
_GRACE = _Seconds(min=0)


if TYPE_CHECKING:
    _PortsType = click.ParamType[tuple[int, ...]]
else:
    _PortsType = click.ParamType  # not generic before click 8.3


class Ports(_PortsType):
    """Ports as Slurm writes them, as an option's value."""

    name = "PORTS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_ports(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_PLACE_OPTIONS = (
    click.option(
        "--runs-directory",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="Where run directories are made; all hosts must share it.",
    ),
    click.option("--interface", help="Network interface whose address is used. [default: the route to the launcher]"),
    click.option("--ports", type=Ports(), default=(), help="Ports to choose from, such as 40000-40099."),
)

_OPTIONS = (
    click.option("--ps", type=_COUNT, default=1, show_default=True, help="Number of parameter servers."),
    click.option(
        "--workers", type=_COUNT, help="Number of workers. [default: the tasks that Slurm gives beyond these]"
    ),
    click.option("--evaluators", type=_COUNT, default=0, help="Number of evaluators, outside the cluster spec."),
    click.option(
        "--data-workers", type=_COUNT, default=0, help="Number of workers of a tf.data service, beside its dispatcher."
    ),
    click.option("--data-python", help="The Python, with TensorFlow, of that service. [default: the command's]"),
    click.option("--chief/--no-chief", default=True, help="Whether a chief leads (else worker 0). [default: chief]"),
    click.option(
        "--placement",
        default=PACK,
        show_default=True,
        help='"pack" by rank, "spread" the ps over the nodes, or a role for each rank, such as "ps,worker,worker".',
    ),
    click.option(
        "--gpus-per-worker", type=click.IntRange(min=1), help="GPUs of each worker. [default: an even share of Slurm's]"
    ),
    click.option(
        *("-J", "--name", "--job-name", "name"),
        help="Name of the job, and of its run directory. [default: the script's]",
    ),
    *_PLACE_OPTIONS,
    click.option(
        "--control-port",
        type=click.IntRange(1, 65535),
        help="Port of the control service. [default: the last of --ports that is free, or any]",
    ),
    click.option(
        "--start-timeout", type=_SECONDS, default=300.0, show_default=True, help="Seconds to form the cluster."
    ),
    click.option(
        "--heartbeat-timeout", type=_SECONDS, default=10.0, show_default=True, help="Seconds of silence that are death."
    ),
    click.option(
        "--heartbeat-interval",
        type=_SECONDS,
        default=1.0,
        show_default=True,
        help="Least seconds between two signs of life.",
    ),
    click.option("--max-worker-restarts", type=_COUNT, default=3, show_default=True, help="In place, of each worker."),
    click.option(
        "--max-attempts",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="How often the cluster is formed: after the loss of a ps or the chief it is formed anew.",
    ),
    click.option(
        "--grace-period",
        type=_GRACE,
        default=25.0,
        show_default=True,
        help="Seconds that the script has to save and stop, once that is asked; 0 for none.",
    ),
    click.option(
        "--stop-signal",
        type=click.Choice(STOP_SIGNALS),
        default="SIGTERM",
        show_default=True,
        help="What the chief (without one, the workers) is sent then, unless it asks by itself.",
    ),
    click.option(
        "--finish-timeout",
        type=_SECONDS,
        default=300.0,
        show_default=True,
        help="Seconds for an evaluator after all others are done, and for all others after a ps has left by itself.",
    ),
    click.option(
        "--stall-after",
        type=_SECONDS,
        help="Seconds without a new step, once steps are reported; and a task that has no server after --start-timeout "
        "counts as dead. [default: no limit]",
    ),
    click.option(
        "--require-servers",
        is_flag=True,
        help="Fail, with exit code 6, if no task opens a TensorFlow server within --start-timeout. [default: warn]",
    ),
    click.argument("command", nargs=-1, type=click.UNPROCESSED),
)


def job_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a job, and the command after `--`."""
    return _add(_OPTIONS, function)


def place_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add those of them that tell where a job keeps what it writes, and how its tasks reach each other."""
    return _add(_PLACE_OPTIONS, function)


def _add(options: Sequence[Callable[..., Any]], function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(options):
        function = option(function)
    return function


def make_plan(
    available_tasks: int | None,
    *,
    ps: int,
    workers: int | None,
    evaluators: int,
    data_workers: int,
    data_python: str | None,
    chief: bool,
    placement: str,
    gpus_per_worker: int | None,
    name: str | None,
    runs_directory: Path,
    interface: str | None,
    ports: tuple[int, ...],
    control_port: int | None,
    start_timeout: float,
    heartbeat_timeout: float,
    heartbeat_interval: float,
    max_worker_restarts: int,
    max_attempts: int,
    grace_period: float,
    stop_signal: str,
    finish_timeout: float,
    stall_after: float | None,
    require_servers: bool,
    command: tuple[str, ...],
) -> LaunchPlan:
    """Make the plan from the values of the options; `available_tasks` is what Slurm gives, None if not limited."""
    if not command:
        raise click.UsageError('There is no command. Give it after "--", such as: -- python train.py')
    if heartbeat_interval >= heartbeat_timeout:
        raise click.UsageError(
            f"--heartbeat-interval {heartbeat_interval:g} is not shorter than --heartbeat-timeout "
            f"{heartbeat_timeout:g}: every task would be lost."
        )
    counts = fill_counts(int(chief), ps, workers, evaluators, available_tasks, data_workers)
    if not (chief or counts["worker"]):
        raise click.UsageError("Nobody would lead: --no-chief needs at least one worker. Give --workers N.")
    _check_placeholders(command, has_chief=chief)
    place_tasks(counts, placement, [""] * sum(counts.values()))  # a list that does not fit is told before all else
    limits = Limits(
        start_timeout_seconds=start_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout,
        heartbeat_interval_seconds=heartbeat_interval,
        grace_period_seconds=grace_period,
        finish_seconds=finish_timeout,
        stall_seconds=stall_after,
        require_servers=require_servers,
        max_worker_restarts=max_worker_restarts,
        max_attempts=max_attempts,
    )
    plan = LaunchPlan(
        counts=counts,
        command=command,
        name=name or _name_of(command),
        runs_directory=runs_directory,
        limits=limits,
        interface=interface,
        ports=ports,
        control_port=control_port,
        placement=placement,
        gpus_per_worker=gpus_per_worker,
        stop_signal=signal.Signals[stop_signal],
        data_python=data_python if data_workers else None,
    )
    if data_workers and not plan.python:
        raise click.UsageError(
            f"--data-workers needs to know the Python that has TensorFlow, and {command[0]!r} is not one. Name it with "
            "--data-python, such as --data-python python3."
        )
    return plan


def _check_placeholders(command: tuple[str, ...], *, has_chief: bool) -> None:
    found = placeholders_in(command)
    if has_chief and "worker_hosts" in found and "chief_hosts" not in found:
        raise click.UsageError(
            "The command has {worker_hosts} but not {chief_hosts}: the chief of this job would be in no list. For a "
            "script in which worker 0 is the chief give --no-chief, else add {chief_hosts}."
        )
    for name, meant in likely_slips(command).items():
        logger.warning("{%s} in the command stays as it is; if it is to be filled in, write {%s}", name, meant)


def _name_of(command: tuple[str, ...]) -> str:
    """Return the stem of the script, or of the program where there is none."""
    script = next((word for word in command[1:] if word.endswith((".py", ".sh"))), command[0])
    return re.sub(r"[^\w.-]", "_", Path(script).stem) or "job"
