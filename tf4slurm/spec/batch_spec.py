"""`BatchSpec`: a `JobSpec` with the options for sbatch and the batch script, declared once."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tf4slurm.cluster import placeholders_in
from tf4slurm.errors import OptionError
from tf4slurm.placement import sum_text
from tf4slurm.spec.durations import parse_time_limit
from tf4slurm.spec.job_spec import JobSpec, check_exclusive
from tf4slurm.spec.options import option, options_by_key, options_of
from tf4slurm.spec.points import (
    ArrayElement,
    check_indices,
    check_points,
    fill_point,
    format_labels,
    make_points,
    parse_array,
    parse_grid,
    parse_labels,
)

_OPTION = re.compile(r"[a-z][a-z0-9-]*[a-z0-9]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_JOB = re.compile(r"\d+(_\d+)?")
_LINE_LABEL = "arguments"  # the name of the label that shows a line of --array-args
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")


def own_program() -> tuple[str, ...]:
    """Return the command that runs this installation of tf4slurm.

    It is the program `tf4slurm` in the directory of this Python, or else this Python with `-m tf4slurm`.
    """
    program = shutil.which("tf4slurm", path=str(Path(sys.executable).parent))
    return (program,) if program else (sys.executable, "-m", "tf4slurm")


def _sbatch(help: str, *flags: str, **declaration: Any) -> Any:
    """Return a dataclass field for a text that is passed to the option of sbatch with the field's name.

    `flags` are further flags, such as "-N". `declaration` has other attributes of `Option`.
    """
    return option("", help, flags=flags, sbatch=True, **{"group": "Slurm", **declaration})


@dataclass(frozen=True, kw_only=True)
class BatchSpec(JobSpec):
    """A job for sbatch. The attributes below are no options of the command line or of settings files.

    Attributes:
        directory: Working directory of the job; None for the directory of the submission. With `snapshot`, a directory
            that does not exist, for the snapshot; None for one beside the run directories.
        program: Command that runs the submitting tf4slurm.
        made_by: The command line that created this value; empty for a Python program.
        array_lines: The arguments of each element of the job array, read from `array_args`.
        points: The varied arguments of each element of the job array by name, made from `grid` (`points.make_points`).
            A Python program may give them in place of `grid`, such as those of `points.random_points`.

    Raises:
        OptionError: A value is invalid, or two options exclude each other.
        PlacementError: The roles need more or fewer tasks than the job requests from Slurm, or contradict `placement`.
    """

    nodes: str | int = _sbatch("Number of nodes.", "-N", group="Resources")
    ntasks: str | int = _sbatch("Number of tasks. [default: as many as the roles need]", "-n", group="Resources")
    ntasks_per_node: str | int = _sbatch("Tasks on each node.", group="Resources")
    cpus_per_task: str | int = _sbatch("CPUs of each task.", "-c", group="Resources")
    partition: str = _sbatch("Partition.", "-p", complete="partitions")
    account: str = _sbatch("Account that is charged.", "-A")
    qos: str = _sbatch("Quality of service.", "-q")
    time: str | int = _sbatch(
        "Time limit in Slurm's format, such as 1:30:00 or 2-12:00:00, or such as 90m, 8h or 2d.",
        "-t",
        parse=parse_time_limit,
        group="Time and recovery",
    )
    constraint: str = _sbatch("Features that the nodes must have.", "-C", group="Resources")
    nodelist: str = _sbatch("Nodes that the job must have.", "-w", group="Resources")
    exclude: str = _sbatch("Nodes that the job must not have.", "-x", group="Resources")
    mem: str | int = _sbatch(
        "Memory of each node, such as 32G.", excludes=("mem_per_cpu", "mem_per_gpu"), group="Resources"
    )
    mem_per_cpu: str | int = _sbatch("Memory for each CPU.", excludes=("mem", "mem_per_gpu"), group="Resources")
    mem_per_gpu: str | int = _sbatch("Memory for each GPU.", excludes=("mem", "mem_per_cpu"), group="Resources")
    gpus_per_node: str | int = _sbatch("GPUs of each node, such as 2 or a100:2.", group="Resources")
    gpus_per_task: str | int = _sbatch("GPUs of each task; ps hide theirs.", group="Resources")
    gres: str = _sbatch("Generic resources of each node, such as gpu:2.", group="Resources")
    reservation: str = _sbatch("Reservation to run in.")
    output: str = _sbatch("File for the output. [default: slurm-<id>.out]", "-o", group="Files")
    array: str = _sbatch("Job array, such as 0-9%2.")
    mail_type: str = _sbatch("When to send mail, such as END,FAIL.")
    mail_user: str = _sbatch("Recipient of the mail.")
    signal: str = _sbatch(
        "Signal before the time limit, such as USR1@120; the launcher receives it.", group="Time and recovery"
    )
    exclusive: bool = option(False, "Share the nodes with no other job.", sbatch=True, group="Resources")
    dependency: str = _sbatch("Dependency in Slurm's syntax, such as afterany:4711.")
    after: tuple[str, ...] = option((), "Start when this job has succeeded. Repeatable.", metavar="ID", group="Slurm")
    array_args: Path | None = option(
        None,
        "File of arguments: element k of the array appends those of line k, from 0, to the command. Blank lines and "
        "lines that start with # are left out.",
        excludes=("grid",),
        group="Files",
    )
    grid: tuple[str, ...] = option(
        (),
        "Values of an argument: one job runs for each combination (submit: one job array). {NAME} in the command is "
        "filled in, else --NAME=VALUE is appended. Repeatable.",
        metavar="NAME=VALUE,VALUE",
        excludes=("array_args", "het"),
        group="Slurm",
    )
    at_most: int | None = option(
        None,
        "Maximum number of elements of the job array, or of jobs of --grid, that run at once. [default: no limit; with "
        "tf4slurm run: 1]",
        minimum=1,
        group="Slurm",
    )
    sbatch: tuple[str, ...] = option((), "Any other option of sbatch. Repeatable.", metavar="K=V", group="Slurm")
    no_sbatch: tuple[str, ...] = option((), "Remove an option of sbatch. Repeatable.", metavar="K", group="Slurm")
    het: bool = option(False, "Heterogeneous job: the ps have their own component, without GPUs.", group="Slurm")
    ps_sbatch: tuple[str, ...] = option(
        (), "With --het: an option of sbatch for the component of the ps. Repeatable.", metavar="K=V", group="Slurm"
    )
    gpu_flag: Literal["gpus-per-node", "gres"] = option(
        "gpus-per-node", "The option of sbatch that requests --gpus-per-worker.", group="Resources"
    )
    gpu_type: str = option("", "Type of these GPUs, such as a100.", group="Resources")
    module: tuple[str, ...] = option((), "Environment module to load. Repeatable.", group="Environment")
    load_env: str = option("", "Lines of bash that set up the environment.", group="Environment")
    venv: str = option("", "Virtual environment to activate.", metavar="DIRECTORY", group="Environment")
    conda: str = option("", "Conda environment to activate.", metavar="NAME", group="Environment")
    env: tuple[str, ...] = option(
        (), "Variable to set, which the script contains. Repeatable.", metavar="NAME=VALUE", group="Environment"
    )
    prologue: str = option("", "Lines of bash before the job.", group="Environment")
    epilogue: str = option("", "Lines of bash after the job.", group="Environment")
    python: str = option(
        "",
        "Python with tf4slurm in the job. [default: this one; with --module, --load-env, --venv or --conda: "
        '"python" of that environment]',
        group="Environment",
    )
    check_env: bool = option(
        True,
        "Check before the submission that --module, --load-env, --venv, --conda and --python work on this host, with "
        "this version of tf4slurm. [default: check-env]",
        verbs=("submit", "grow"),
        group="Environment",
    )
    snapshot: Literal["git", "copy", "none"] = option(
        "none",
        "Run in a copy of this directory, made now, at most 1 GB: of the files that git tracks, or of all that git "
        "does not ignore. Outside of a git checkout all files are copied, including secrets such as .env.",
        group="Files",
    )
    single: bool = option(
        False,
        "One task that runs COMMAND alone: no ps, no cluster.",
        excludes=(
            *("ps", "workers", "evaluators", "data_workers", "chief", "placement", "het", "requeue", "container"),
            "label",
        ),
        group="Roles",
    )
    directory: Path | None = None
    program: tuple[str, ...] = field(default_factory=own_program)
    made_by: tuple[str, ...] = ()
    array_lines: tuple[tuple[str, ...], ...] = ()
    points: tuple[Mapping[str, str], ...] = ()

    @property
    def sbatch_options(self) -> dict[str, str]:
        """The requested options of sbatch by long name, such as {"nodes": "2", "exclusive": ""}. A switch has ""."""
        values = {each.key: getattr(self, name) for name, each in options_of(BatchSpec).items() if each.sbatch}
        found = {key: "" if value is True else value for key, value in values.items() if value not in ("", False)}
        found.update(parse_pairs("sbatch", self.sbatch))
        for name in self.no_sbatch:
            found.pop(_long_name(name.lstrip("-")), None)
        return found

    @property
    def ps_options(self) -> dict[str, str]:
        """With --het: the options of sbatch for the component of the ps, where they differ from the other component."""
        return parse_pairs("ps-sbatch", self.ps_sbatch)

    @property
    def srun_options(self) -> dict[str, str]:
        """The requested options of srun (--srun) by long name, such as {"cpu-bind": "cores"}."""
        return parse_pairs("srun", self.srun)

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The command of each element of the job array. Without varied arguments, `command` is the only one."""
        if self.points:
            return tuple(fill_point(self.command, point) for point in self.points)
        return tuple((*self.command, *line) for line in self.array_lines) or (self.command,)

    @property
    def varied(self) -> tuple[Mapping[str, str], ...]:
        """The names and values that differ between the elements of the job array, such as {"lr": "0.1"}, by index.

        With --array-args the name is "arguments", and the value is the line. Without varied arguments the tuple is
        empty.
        """
        return self.points or tuple({_LINE_LABEL: shlex.join(line)} for line in self.array_lines)

    @property
    def elements(self) -> tuple[ArrayElement, ...]:
        """The elements of the job array with their labels: those of --label, and the varied arguments.

        If the job is no array, the tuple is empty.
        """
        labels, varied = self.labels, self.varied
        array = self.sbatch_options.get("array", f"0-{len(varied) - 1}" if varied else "")
        indices = parse_array(array) if array else []
        return tuple(ArrayElement(index, {**labels, **(varied[index] if varied else {})}) for index in indices)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the batch script sets (--env), by name."""
        return {name: value for name, _, value in (text.partition("=") for text in self.env)}

    @property
    def has_environment(self) -> bool:
        """Whether the batch script loads modules or activates an environment, which may change the Python on PATH."""
        return bool(self.module or self.load_env or self.venv or self.conda)

    @property
    def tf4slurm(self) -> tuple[str, ...]:
        """The command that starts tf4slurm in the job.

        With --python, tf4slurm is a module of that Python. If `has_environment`, it is a module of the "python" in that
        environment. Otherwise the command is `program`.
        """
        if self.python or self.has_environment:
            return (self.python or "python", "-m", "tf4slurm")
        return self.program

    def _check_values(self) -> None:
        super()._check_values()
        own = {"name": self.name, "gpu-type": self.gpu_type}
        for found in (own, self.sbatch_options, self.ps_options, self.srun_options):
            for name, value in found.items():
                _check_option(name, value)
        for job_id in self.after:
            if not _JOB.fullmatch(job_id):
                raise OptionError(
                    f"--after {job_id!r} is not the id of a job, such as 4711 or 4711_3. For other dependencies use "
                    "--dependency, in Slurm's syntax.",
                    option="after",
                )
        for text in self.env:
            if not _VARIABLE.match(text):
                raise OptionError(f"--env {text!r}: expected NAME=VALUE with the name of a variable.", option="env")
        parse_grid(self.grid)

    def _check(self) -> None:
        if self.array_args is not None and not self.array_lines:
            self._set(array_lines=_read_array_lines(self.array_args))
        points = self.points or (make_points(parse_grid(self.grid)) if self.grid else ())
        self._set(points=check_points(points))
        self._check_sbatch()
        self._check_array()
        self._require_command()
        if self.single:
            for name in sorted(placeholders_in(self.command_words)):
                text = f"--single has no cluster to fill in {{{name}}} from: leave one of the two out."
                raise OptionError(text, option="single")
            return
        available = _available_tasks(self.sbatch_options)
        if self.workers is None and available is None:
            text = "The number of workers is unknown. Give --workers N, or the number of all tasks with -n."
            raise OptionError(text, option="workers")
        self._set(workers=self._fill_counts(available)["worker"])
        super()._check()
        nodes = self.sbatch_options.get("nodes", "")
        if nodes.isdecimal() and int(nodes) > self.num_spawned and not self.het:
            text = f"--nodes {nodes}: the job has {self.num_spawned} tasks ({sum_text(self.counts)}), one process each."
            raise OptionError(f"{text} Give --nodes {self.num_spawned} or fewer, or more --workers.", option="nodes")

    def _check_sbatch(self) -> None:
        options, fields = self.sbatch_options, options_by_key(BatchSpec)
        for found in (options, self.ps_options):
            check_exclusive(BatchSpec, {fields[key].name: value for key, value in found.items() if key in fields})
        if self.ps_sbatch and not self.het:
            raise OptionError("--ps-sbatch is for the ps of a heterogeneous job. Give --het too.", option="ps-sbatch")

    def _check_array(self) -> None:
        array = self.sbatch_options.get("array", "")
        if self.points and self.array_lines:
            raise OptionError("Points and lines of arguments exclude each other. Leave one out.", option="grid")
        if self.at_most is not None and not array and not self.varied:
            text = f"--at-most {self.at_most} is for a job array. Give --grid, --array-args or --array too."
            raise OptionError(text, option="at-most")
        if self.at_most is not None and "%" in array:
            text = f"--at-most {self.at_most} and the % in --array {array} are the same option. Leave one out."
            raise OptionError(text, option="at-most")
        if array:
            check_indices(array, len(self.varied), "--grid" if self.points else "--array-args")
        if self.varied:
            parse_labels((*self.label, *format_labels(self.varied[0])))

    def _fill_counts(self, available: int | None) -> dict[str, int]:
        return {"worker": 1} if self.single else super()._fill_counts(available)


def parse_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse options of Slurm in the form K=V, or K for a switch. Return the values by long name, "" for a switch.

    K is a long name, or the letter of an option of sbatch that `BatchSpec` declares, such as "N" for "nodes".

    Args:
        option: The option of tf4slurm that contains `texts`, such as "sbatch", for error messages.
        texts: The options of Slurm.

    Raises:
        OptionError: K is empty.
    """
    found = {}
    for text in texts:
        name, _, value = text.lstrip("-").partition("=")
        if not name:
            raise OptionError(f"--{option} {text!r}: expected NAME=VALUE, such as nice=100.", option=option)
        found[_long_name(name)] = value
    return found


def _check_option(name: str, value: str) -> None:
    """Check that `name` has the form of a long option, and that `value` fits into one line of the batch script."""
    if not _OPTION.fullmatch(name):
        raise OptionError(
            f"{name!r} is not a long option of Slurm. Give it as NAME=VALUE without dashes, such as nice=100.",
            option=name,
        )
    if "\n" in value or "\r" in value:
        raise OptionError(f"The value of --{name} has a line break: {value!r}. sbatch cannot read it.", option=name)


def _long_name(name: str) -> str:
    """Return the long name for the letter of an option of sbatch, such as "nodes" for "N".

    Only letters of options that `BatchSpec` declares are known. Any other name is returned unchanged.
    """
    flags = {flag[1:]: each.key for each in options_of(BatchSpec).values() if each.sbatch for flag in each.flags}
    return flags.get(name, name)


def _available_tasks(options: Mapping[str, str]) -> int | None:
    """Return the number of tasks requested from Slurm, or None if the options of sbatch do not contain it."""
    for names in (("ntasks",), ("nodes", "ntasks-per-node")):
        texts = [options.get(name, "") for name in names]
        if all(text.isdecimal() and len(text) < 10 for text in texts):
            return math.prod(map(int, texts))
    return None


def _read_array_lines(path: Path) -> tuple[tuple[str, ...], ...]:
    """Read a file with one line of arguments per array element, quoted as in a shell. "-" is standard input.

    Blank lines and lines that start with # are skipped.
    """
    try:
        source = Path("/dev/stdin") if path == Path("-") else path
        lines = source.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        text = f"--array-args {str(path)!r} cannot be read: {error.strerror}."
        raise OptionError(text, option="array-args") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip() and not line.lstrip().startswith("#"):
                found.append(tuple(shlex.split(line)))
        except ValueError as error:
            raise OptionError(f"--array-args, line {number}: {error}: {line!r}", option="array-args") from error
    if not found:
        raise OptionError("--array-args: the file has no line of arguments.", option="array-args")
    return tuple(found)
