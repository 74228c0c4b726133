"""What sbatch is asked for a job, on top of its plan: a frozen value, and its checks."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tf4slurm.errors import SubmissionError

MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""The three ways to ask for memory; Slurm takes one of them."""

_OPTION = re.compile(r"[a-z][a-z0-9-]*[a-z0-9]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_JOB = re.compile(r"\d+(_\d+)?")
_RANGE = re.compile(r"(?P<first>\d{1,9})(-(?P<last>\d{1,9})(:(?P<step>[1-9]\d{0,8}))?)?")


def own_program() -> tuple[str, ...]:
    """Return how this tf4slurm is started, by absolute paths: as a program, else as a module of this Python."""
    program = shutil.which("tf4slurm", path=str(Path(sys.executable).parent))
    return (program,) if program else (sys.executable, "-m", "tf4slurm")


@dataclass(frozen=True)
class Submission:
    """What sbatch is asked.

    Attributes:
        options: Options of sbatch, by their long names: {"nodes": "2", "exclusive": ""}. "" is for one without a value.
        ps_options: Of a heterogeneous job: what differs on the component of the ps. None for a job of one component.
        srun: Options of srun, in the same way.
        after: Ids of jobs that must have succeeded first.
        gpu_flag: How the GPUs that the plan gives to its workers are asked for: "gpus-per-node" or "gres".
        gpu_type: Such as "a100"; empty for any.
        array_lines: Arguments that the element k of a job array appends to the command: those of line k, from 0.
        single: One task and nothing of tf4slurm: no ps, no cluster.
        modules, load_env, venv, conda, environment, prologue: What is set up before, in this order. `environment` are
            variables; `load_env`, `prologue` and `epilogue` (afterwards) are lines of bash.
        snapshot: Whether the job runs in a copy of the code: of what git tracks, of all, or in none.
        directory: Where the job runs, with a snapshot the place of that; None for where it is submitted.
        python: The Python that has tf4slurm in the job. By default the one that submits, by its absolute path; where an
            environment is set up, that environment's: it may have another TensorFlow, and the script's imports must
            come from the same.
        program: How the tf4slurm that submits is started.
        made_by: The command line that made this; empty for a Python program.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    ps_options: Mapping[str, str] | None = None
    srun: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    gpu_flag: str = "gpus-per-node"
    gpu_type: str = ""
    array_lines: tuple[tuple[str, ...], ...] = ()
    single: bool = False
    modules: tuple[str, ...] = ()
    load_env: str = ""
    venv: str = ""
    conda: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    prologue: str = ""
    epilogue: str = ""
    snapshot: Literal["git", "copy", "none"] = "none"
    directory: Path | None = None
    python: str = ""
    program: tuple[str, ...] = field(default_factory=own_program)
    made_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what can be checked without a plan.

        Raises:
            SubmissionError: Two options exclude each other, or one has no meaning.
        """
        for options in (self.options, self.ps_options or {}, self.srun):
            for name, value in options.items():
                check_option(name, value)
        for options in (self.options, self.ps_options or {}):
            _check_memory(options)
        for job_id in self.after:
            if not _JOB.fullmatch(job_id):
                raise SubmissionError(
                    f"--after {job_id!r} is not the id of a job, such as 4711 or 4711_3. For other dependencies there "
                    "is --dependency, in Slurm's words.",
                    option="after",
                )
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise SubmissionError(f"--env: {name!r} is not the name of a variable. Give NAME=VALUE.", option="env")
        if "array" in self.options:
            _check_array(self.options["array"], len(self.array_lines))

    @property
    def has_environment(self) -> bool:
        """Whether the job sets up an environment that has a Python of its own."""
        return bool(self.modules or self.load_env or self.venv or self.conda)

    @property
    def tf4slurm(self) -> tuple[str, ...]:
        """How the job starts tf4slurm."""
        if self.python or self.has_environment:
            return (self.python or "python", "-m", "tf4slurm")
        return self.program


def check_option(name: str, value: str) -> None:
    """Check that an option of sbatch or srun can be written.

    Raises:
        SubmissionError: It cannot.
    """
    if not _OPTION.fullmatch(name):
        raise SubmissionError(
            f"{name!r} is not a long option of Slurm. Give it as NAME=VALUE without dashes, such as nice=100.",
            option=name,
        )
    if "\n" in value or "\r" in value:
        raise SubmissionError(f"The value of --{name} has a line break: {value!r}. sbatch cannot read it.", option=name)


def _check_memory(options: Mapping[str, str]) -> None:
    asked = [name for name in MEMORY_OPTIONS if name in options]
    if len(asked) > 1:
        raise SubmissionError(
            f"--{asked[0]} {options[asked[0]]} and --{asked[1]} {options[asked[1]]} exclude each other: memory is "
            "asked for per node, per CPU or per GPU. Keep one; --no-sbatch NAME takes one of a profile out.",
            option=asked[1],
        )


def _check_array(value: str, lines: int) -> None:
    """Check that each element of an array has its line of arguments; what Slurm thinks of it, it says itself."""
    if not lines:
        return
    for item in value.partition("%")[0].split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise SubmissionError(f"--array {value!r} is not numbers and ranges, such as 0-9%2.", option="array")
        last = int(match["last"] or match["first"])
        if last >= lines:
            raise SubmissionError(
                f"--array {value} has an element {last}, but --array-args has the lines 0 to {lines - 1}.",
                option="array",
            )


def read_array_lines(text: str) -> tuple[tuple[str, ...], ...]:
    """Read a file of arguments, one line for each element of an array, in the shell's quoting. Empty lines count.

    Raises:
        SubmissionError: A quote is not closed, or there is no line.
    """
    lines = []
    for number, line in enumerate(text.splitlines()):
        try:
            lines.append(tuple(shlex.split(line)))
        except ValueError as error:
            raise SubmissionError(
                f"--array-args, line {number} (from 0): {error}: {line!r}", option="array-args"
            ) from error
    if not lines:
        raise SubmissionError("--array-args: the file has no line.", option="array-args")
    return tuple(lines)
