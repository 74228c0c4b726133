"""`JobSpec`: every option of a job, declared once.

The options of the command line, the keys of settings files, the variables TF4SLURM_<OPTION>, the command in a batch
script and the settings of agents are derived from these fields. `batch_spec.BatchSpec` adds the options for sbatch.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tf4slurm.cluster import Task, placeholders_in, warn_of_misspelled
from tf4slurm.errors import OptionError
from tf4slurm.network.ports import format_ranges, parse_ports
from tf4slurm.placement import PACK, fill_counts, place_tasks
from tf4slurm.spec.options import option, options_of
from tf4slurm.spec.points import parse_labels

logger = logging.getLogger(__name__)

StopSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]
"""The name of a signal in `exec_child.STOP_SIGNALS`."""

HoldPorts = Literal["auto", "always", "never"]

_PYTHON = re.compile(r"python[\d.]*")
_HEARTBEATS_PER_SECOND = 100
_MAX_INTERVAL = 0.4  # the longest heartbeat interval of a large job, as a fraction of the heartbeat timeout
_NOT_TASK = ("run", "submit", "script")
SLURM_OPTIONS = ("requeue", "srun", "stage_env", "stage_directory")
"""The fields that only a job in a Slurm allocation uses. A local job ignores the settings of these options."""
ACTIVE_ENVIRONMENT = "active"
"""The value of --stage-env for the environment that the script's Python is in."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: its command, the number of tasks of each role, the network and the limits. All times are in seconds.

    Raises:
        OptionError: A value is invalid, or two options exclude each other.
        PlacementError: The roles listed in `placement` contradict the number of tasks of each role.
    """

    command: tuple[str, ...] = field(default=(), kw_only=False)
    ps: int = option(1, "Number of parameter servers.", minimum=0, group="Roles")
    workers: int | None = option(
        None, "Number of workers. [default: the remaining tasks that Slurm provides]", minimum=0, group="Roles"
    )
    evaluators: int = option(0, "Number of evaluators, which are outside the cluster spec.", minimum=0, group="Roles")
    data_workers: int = option(
        0, "Number of workers of a tf.data service; a dispatcher is added.", minimum=0, group="Roles"
    )
    spares: int = option(
        0, "Number of idle tasks that take the place of lost ones; needs --max-attempts.", minimum=0, group="Roles"
    )
    data_python: str | None = option(
        None, "Python with TensorFlow for the tf.data service. [default: the command's]", group="Environment"
    )
    container: str | None = option(
        None,
        "Image for Apptainer or Singularity in which the command runs; tf4slurm itself runs outside.",
        metavar="IMAGE",
        group="Environment",
    )
    preload: Literal["auto", "always", "never"] = option(
        "auto",
        "Import TensorFlow once per host, and fork the processes of the tasks.",
        group="Environment",
    )
    stage_env: str | None = option(
        None,
        'Start from a copy on each node\'s local disk: "active" for the active environment, or an archive of one.',
        metavar="active|ARCHIVE",
        excludes=("container",),
        verbs=_NOT_TASK,
        group="Environment",
    )
    stage_directory: Path = option(
        Path("/tmp"),  # noqa: S108 - the copy is in a directory there that only this user can enter
        "Directory on each node's local disk for --stage-env.",
        verbs=_NOT_TASK,
        group="Environment",
    )
    chief: bool = option(True, "Start a chief. With --no-chief, worker 0 leads. [default: chief]", group="Roles")
    external_chief: bool = option(
        False,
        "The chief is another process, such as a notebook, that joins the job.",
        excludes=("chief", "max_attempts", "requeue", "stall_timeout_seconds"),
        verbs=_NOT_TASK,
        group="Roles",
    )
    placement: str = option(
        PACK,
        '"pack" by rank, "spread" the ps over the nodes, or a role for each rank, such as "ps,worker,worker".',
        group="Roles",
    )
    gpus_per_worker: int | None = option(
        None,
        "GPUs of each worker. [default: an even share of those that Slurm allocates]",
        minimum=1,
        group="Resources",
    )
    name: str = option(
        "",
        "Name of the job and of its run directory. [default: the script's]",
        flags=("-J", "--job-name"),
        group="Files",
    )
    label: tuple[str, ...] = option(
        (),
        "Name and value of a varied argument, for the page of several jobs and the status of arrays. Repeatable.",
        metavar="NAME=VALUE",
        group="Files",
    )
    runs_directory: Path = option(
        Path("runs"), "Directory of the run directories; all hosts must share it.", group="Files"
    )
    interface: str | None = option(
        None,
        "Network interface whose address is used. [default: the route to the launcher]",
        complete="interfaces",
        group="Network",
    )
    ports: tuple[int, ...] = option(
        (),
        "Ports to choose from, such as 61000-61099.",
        metavar="PORTS",
        parse=parse_ports,
        format=format_ranges,
        group="Network",
    )
    control_port: int | None = option(
        None,
        "Port of the control service. [default: the last free one of --ports, or any]",
        minimum=1,
        maximum=65535,
        group="Network",
    )
    hold_ports: HoldPorts = option(
        "auto",
        "Hold the port of each task until its server listens: for every kind of server, only for TensorFlow 2.3 or "
        "newer, or not at all.",
        group="Network",
    )
    start_timeout_seconds: float = option(
        300.0, "Timeout in seconds to form the cluster.", exceeds=0, group="Time and recovery"
    )
    heartbeat_timeout_seconds: float = option(10.0, "Heartbeat timeout in seconds.", exceeds=0, group="Advanced")
    heartbeat_interval_seconds: float = option(
        1.0, "Minimum seconds between two heartbeats of a task; more for large jobs.", exceeds=0, group="Advanced"
    )
    max_worker_restarts: int = option(
        3, "Maximum in-place restarts per worker; none with --no-chief.", minimum=0, group="Time and recovery"
    )
    max_attempts: int = option(
        1,
        "Maximum number of attempts: after the loss of a ps, the chief or, with --no-chief, a worker, a new cluster is "
        "formed.",
        minimum=1,
        group="Time and recovery",
    )
    grace_period_seconds: float = option(
        25.0,
        "Seconds that the script has to save and stop after a stop request; 0 for none.",
        minimum=0,
        group="Time and recovery",
    )
    stop_signal: StopSignal = option(
        "SIGTERM",
        "Signal that requests the stop from the chief (without one, from the workers), unless the script polls for it.",
        group="Time and recovery",
    )
    finish_timeout_seconds: float = option(
        300.0,
        "Seconds to wait for evaluators after all other tasks are done, or for the other tasks after a ps has exited "
        "with 0.",
        exceeds=0,
        group="Advanced",
    )
    stall_timeout_seconds: float | None = option(
        None,
        "Seconds without a new step after which the job fails, once steps are reported. A task that has no server "
        "after --start-timeout fails, too. [default: no limit]",
        exceeds=0,
        group="Time and recovery",
    )
    require_servers: bool = option(
        False,
        "Fail with exit code 6 if no task opens a TensorFlow server within --start-timeout. [default: warn]",
        group="Time and recovery",
    )
    requeue: int | None = option(
        None,
        "Requeue a batch job that is stopped: at most N times at its time limit, always after a preemption.",
        metavar="N",
        minimum=0,
        verbs=_NOT_TASK,
        group="Time and recovery",
    )
    srun: tuple[str, ...] = option(
        (), "Any other option of srun. Repeatable.", metavar="K=V", verbs=_NOT_TASK, group="Slurm"
    )
    all_output: bool = option(
        False,
        "Show TensorFlow's start-up messages on the terminal, too. [default: only in the log files]",
        group="Files",
    )
    reconnect_seconds: float = 1.5
    """Seconds after which a broken connection counts as the loss of the task."""
    cancels_step: bool = True
    """Under plain srun: whether the loss of a ps during training ends the step."""
    kill_wait_seconds: float = option(
        4.0, "Seconds from SIGTERM to SIGKILL for a child process.", minimum=0, group="Advanced"
    )

    @property
    def is_preloaded(self) -> bool:
        """Whether a preloader may fork the processes of the tasks. In a container they are executed."""
        return self.preload != "never" and not self.container

    def __post_init__(self) -> None:
        self._convert()
        self._check_values()
        self._check()

    @classmethod
    def check_each(cls, command: Sequence[str], options: Mapping[str, Any]) -> None:
        """Check options before settings complete them: each by itself, and whether two exclude each other.

        Rules about several options (`_check`) are not applied, because settings may still add options.

        Args:
            command: Command of each task.
            options: Values by field name.

        Raises:
            OptionError: An option is invalid, or two options exclude each other.
        """
        draft = object.__new__(cls)
        defaults = {name: each.default for name, each in options_of(cls).items()}
        draft._set(**{**defaults, "command": command, **options})
        draft._convert()
        draft._check_values()

    def _convert(self) -> None:
        words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        self._set(command=tuple(words))
        options = options_of(type(self))
        values = {name: each.convert(getattr(self, name)) for name, each in options.items()}
        self._set(**values)
        if self.command and not self.name:
            self._set(name=_name_of(self.command))
        check_exclusive(type(self), {name: value for name, value in values.items() if value != options[name].default})

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        """Check the options one by one, beyond the type and range that they declare."""
        if "/" in self.name:
            raise OptionError(
                f"--name {self.name!r} has a slash, and files are named after it. Omit the slash.", option="name"
            )
        parse_labels(self.label)

    def _check(self) -> None:
        """Check the rules about several options, such as that --spares needs --max-attempts."""
        if self.heartbeat_interval_seconds >= self.heartbeat_timeout_seconds:
            raise OptionError(
                f"--heartbeat-interval {self.heartbeat_interval_seconds:g} is not shorter than --heartbeat-timeout "
                f"{self.heartbeat_timeout_seconds:g}: every task would be lost.",
                option="heartbeat-interval",
            )
        if not self.chief and self.workers == 0:
            text = "--no-chief needs at least one worker, because worker 0 leads. Give --workers N."
            raise OptionError(text, option="workers")
        if self.external_chief and (self.ps == 0 or self.workers == 0):
            raise OptionError(
                "--external-chief needs ps and workers, which serve the chief. Give --ps 1 --workers 2, for example.",
                option="external-chief",
            )
        if self.spares and self.max_attempts == 1 and not self.external_chief:  # its `restart()` is another attempt
            raise OptionError(
                f"--spares {self.spares} needs further attempts, for lost tasks other than workers. Give "
                f"--max-attempts {self.spares + 1}.",
                option="max-attempts",
            )
        placeholders = [placeholders_in(command) for command in self.commands]
        if self.chief and any("worker_hosts" in each and "chief_hosts" not in each for each in placeholders):
            raise OptionError(
                "The command has {worker_hosts} but not {chief_hosts}: no list would contain the chief. If worker 0 "
                "is the chief in the script, give --no-chief, else add {chief_hosts}.",
                option="chief",
            )
        if self.data_workers and self.command and not self.data_service_python:
            raise OptionError(
                f"--data-workers needs a Python that has TensorFlow, and {self.command[0]!r} is not one. Name it with "
                "--data-python, such as --data-python python3.",
                option="data-python",
            )
        if self.workers is not None:
            self.place(self.counts, [""] * self.num_tasks)

    @property
    def labels(self) -> dict[str, str]:
        """The names and values of the varied arguments (--label)."""
        return parse_labels(self.label)

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The commands that the job runs: `command`, or in a job array that of each element."""
        return (self.command,)

    @property
    def command_words(self) -> tuple[str, ...]:
        """The words of all `commands`, without duplicates."""
        return tuple(dict.fromkeys(word for command in self.commands for word in command))

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks by role, for example one chief and two workers.

        Raises:
            PlacementError: `workers` is None.
        """
        return self._fill_counts(None)

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the job, with an external chief."""
        return sum(self.counts.values())

    @property
    def num_spawned(self) -> int:
        """The number of tasks that the launcher starts: all but an external chief, which has the last rank."""
        return self.num_tasks - self.external_chief

    def place(self, counts: Mapping[str, int], nodes_by_rank: Sequence[str]) -> tuple[Task, ...]:
        """Return the task of each rank, as `place_tasks` does. An external chief has the last rank.

        The launcher starts the other tasks, so that their ranks are those of srun. A list in `placement` has only them.
        """
        if not self.external_chief:
            return place_tasks(counts, self.placement, nodes_by_rank)
        others = {role: count for role, count in counts.items() if role != "chief"}
        return (*place_tasks(others, self.placement, nodes_by_rank[:-1]), Task("chief", 0))

    @property
    def service_ports(self) -> tuple[int, ...]:
        """The ports that the control service tries, in this order. If there are none, it uses any free port."""
        return self.ports[::-1] if self.control_port is None else (self.control_port,)  # tasks take the first ones

    @property
    def data_service_python(self) -> str:
        """The Python that runs the tf.data service, or an empty text if it is unknown."""
        return self.data_python or self.script_python

    @property
    def script_python(self) -> str:
        """The Python that runs the script, or an empty text if the command starts with another program."""
        program = self.command[0] if self.command else ""
        return program if _PYTHON.fullmatch(os.path.basename(program)) else ""

    def for_tasks(self, available: int | None) -> JobSpec:
        """Return this job with the number of workers filled in. Warn of options that are often given by mistake.

        Args:
            available: Number of tasks of the allocation or step. If None, `workers` must be given.

        Raises:
            OptionError: There is no command.
            PlacementError: The roles need more or fewer tasks than available, or the number of workers is unknown.
        """
        self._require_command()
        self.warn_of_mistakes()
        return dataclasses.replace(self, workers=self._fill_counts(available)["worker"])

    def warn_of_mistakes(self) -> None:
        """Log a warning for each option that is valid, but often given by mistake."""
        warn_of_misspelled(self.command_words)
        if self.chief and self.ps == 0 and self.workers:
            logger.warning(
                "--ps 0 with a chief: the chief and %d workers make %d processes that train. A script with "
                "MultiWorkerMirroredStrategy expects --no-chief, one with ParameterServerStrategy at least --ps 1.",
                self.workers,
                self.workers + 1,
            )

    def heartbeat_interval_of(self, num_tasks: int) -> float:
        """Return the heartbeat interval in seconds for a job of `num_tasks` tasks.

        It is longer in large jobs, to limit the load of the control service: num_tasks x 10 ms, but not so long that
        fewer than two heartbeats fit into the timeout. `heartbeat_interval_seconds` is the minimum in any case.
        """
        return max(
            self.heartbeat_interval_seconds,
            min(num_tasks / _HEARTBEATS_PER_SECOND, self.max_heartbeat_interval_seconds),
        )

    # These times follow from the heartbeat timeout. See also `StatusFile.stale_seconds`.

    @property
    def task_loss_seconds(self) -> float:
        """Seconds without a heartbeat after which the launcher counts a task as lost."""
        return self.heartbeat_timeout_seconds

    @property
    def launcher_loss_seconds(self) -> float:
        """Seconds without a message of the launcher after which an agent counts the launcher as lost."""
        return self.heartbeat_timeout_seconds

    @property
    def unresponsive_seconds(self) -> float:
        """Seconds for which a child process is stopped, or its server silent, before the liveness probe kills it."""
        return self.heartbeat_timeout_seconds

    @property
    def termination_seconds(self) -> float:
        """Seconds in which all tasks terminate: the time to kill child processes, plus that to notice lost agents."""
        return self.kill_wait_seconds + self.task_loss_seconds

    @property
    def max_heartbeat_interval_seconds(self) -> float:
        """The longest heartbeat interval in seconds that the size of a job can cause: 0.4 of the heartbeat timeout."""
        return _MAX_INTERVAL * self.heartbeat_timeout_seconds

    def to_arguments(self) -> list[str]:
        """Return the command-line options of `tf4slurm run` for this job, without those at their default value."""
        words: list[str] = []
        for name, each in options_of(JobSpec).items():
            value = getattr(self, name)
            words += each.to_arguments(value) if value != each.default else ()
        return words

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values by field name, with ports as a text such as "5000-5010".

        `JobSpec(command, **values)` accepts these values.
        """
        values = {name: (each, getattr(self, name)) for name, each in options_of(JobSpec).items()}
        return {
            name: each.to_text(value) if value and (each.format or isinstance(value, Path)) else value
            for name, (each, value) in values.items()
        }

    def _require_command(self) -> None:
        if not self.command:
            raise OptionError('There is no command. Give it after "--", such as: -- python train.py', option="command")

    def _fill_counts(self, available: int | None) -> dict[str, int]:
        """Return the number of tasks of each type. `available` counts only the tasks that the launcher starts."""
        is_spawned = self.chief and not self.external_chief
        counts = {"chief": int(is_spawned), "ps": self.ps, "worker": self.workers, "evaluator": self.evaluators}
        if self.data_workers:
            counts |= {"data-dispatcher": 1, "data-worker": self.data_workers}
        if self.spares:
            counts["spare"] = self.spares
        return {**fill_counts(counts, available), "chief": int(self.chief)}


def _name_of(command: Sequence[str]) -> str:
    """Return the script's file name without suffix, or the program's if there is no script."""
    script = next((word for word in command[1:] if word.endswith((".py", ".sh"))), command[0])
    return re.sub(r"[^\w.-]", "_", Path(script).stem) or "job"


def check_exclusive(cls: type, given: Mapping[str, Any]) -> None:
    """Check that no given option excludes another given option. An option at its default value excludes nothing.

    Args:
        cls: `JobSpec` or `BatchSpec`.
        given: Values by field name.

    Raises:
        OptionError: An option excludes another one. The excluded one may have its default value.
    """
    options = options_of(cls)
    for name in given:
        for other in options[name].excludes if given[name] != options[name].default else ():
            if other in given:
                texts = [" ".join(options[each].to_arguments(given[each])) for each in (name, other)]
                raise OptionError(
                    f"{' and '.join(texts)} exclude each other. Leave one out; if a settings file sets an option of "
                    "sbatch, --no-sbatch NAME removes it.",
                    option=options[name].key,
                )
