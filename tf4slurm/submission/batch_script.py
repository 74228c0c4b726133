"""Make the text of a job's batch script from its `BatchSpec`."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence

from tf4slurm import __version__
from tf4slurm.batch_spec import BatchSpec
from tf4slurm.cluster import Task, fill_in, placeholders_in, warn_of_misspelled
from tf4slurm.submission.sbatch_options import make_sbatch_options, place_by_component

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ARGUMENTS = '"${arguments[@]}"'
# The output file after a requeue; Slurm's own file has the output of the first run.
_NEXT_OUTPUT = 'exec >"{name}.$SLURM_RESTART_COUNT.out" 2>&1'
_JOB_OUTPUT = "slurm-$SLURM_JOB_ID"
_ELEMENT_OUTPUT = "slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
_SIGNALS = ("HUP", "INT", "TERM", "USR1", "USR2")
_STOP = "exit 3"  # EXIT_PREFLIGHT


def make_script(spec: BatchSpec) -> str:
    """Return the batch script of a job.

    The script contains all options of the job that differ from their defaults; the job does not read settings files.

    Raises:
        OptionError: The options contradict the roles, or each other.
    """
    warn_of_misspelled(spec.command)
    components = make_sbatch_options(spec)
    blocks = [
        _header(spec.made_by),
        "\n#SBATCH hetjob\n".join(_directives(options) for options in components),
        _output(spec, is_array="array" in components[0]),
        _environment(spec),
        _array(spec.array_lines),
        _filled_in(spec),
        _end(_command(spec), spec.epilogue),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def quote(words: Sequence[str]) -> str:
    """Quote words as one line of bash, which bash splits into the same words."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if not _CONTROL.search(word):
        return shlex.quote(word)
    # sbatch refuses a script with CR LF, and a line break ends a comment: control characters are written as \x0a
    text = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text) + "'"


def _header(made_by: Sequence[str]) -> str:
    how = f"with:\n#   {quote(made_by)}" if made_by else "from Python."
    return f"#!/bin/bash\n# Made by tf4slurm {__version__} {how}"


def _directives(options: dict[str, str]) -> str:
    return "\n".join(
        f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}" for name, value in options.items()
    )


def _output(spec: BatchSpec, *, is_array: bool) -> str:
    if "output" in spec.sbatch_options:
        return ""
    redirect = _NEXT_OUTPUT.format(name=_ELEMENT_OUTPUT if is_array else _JOB_OUTPUT)
    why = "# After a requeue: a file of its own for the output of each run."
    return f'{why}\nif [ -n "${{SLURM_RESTART_COUNT:-}}" ]; then {redirect}; fi'


def _environment(spec: BatchSpec) -> str:
    lines = []
    if spec.module:
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
        lines += [f"module load {_quote(module)} || {_STOP}" for module in spec.module]
    if spec.load_env:
        lines.append(spec.load_env)
    if spec.venv:
        lines.append(f". {_quote(spec.venv.rstrip('/') + '/bin/activate')} || {_STOP}")
    if spec.conda:
        lines.append(f'eval "$(conda shell.bash hook)" && conda activate {_quote(spec.conda)} || {_STOP}')
    lines += [f"export {name}={_quote(value)}" for name, value in spec.environment.items()]
    if spec.prologue:
        lines.append(spec.prologue)
    if spec.directory is not None:
        lines.append(f"cd {_quote(str(spec.directory))} || {_STOP}")
    if spec.snapshot != "none":
        lines.append(f'[ -O . ] || {{ echo "The snapshot $PWD belongs to another user." >&2; {_STOP}; }}')
    return "\n".join(lines)


def _array(lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    cases = [f"  {number}) arguments=({quote(words)}) ;;" for number, words in enumerate(lines)]
    unknown = '  *) echo "--array-args has no line for element $SLURM_ARRAY_TASK_ID." >&2; exit 2 ;;'
    return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, unknown, "esac"])


def _filled_in(spec: BatchSpec) -> str:
    """Return a comment with the command of one task, as an example of the placeholders' values."""
    if not placeholders_in(spec.command):
        return ""
    task = Task("worker" if spec.counts.get("worker") else "chief", 0)
    hosts = {role: ["HOST:PORT"] * count for role, count in spec.counts.items()}
    return f"# Each task gets its own values; {task} runs:\n#   {quote(fill_in(spec.command, hosts, task))}"


def _command(spec: BatchSpec) -> str:
    srun = tuple(f"{name}={value}" if value else name for name, value in spec.srun_options.items())
    if spec.single:
        words = [*(["srun", *(f"--{each}" for each in srun)] if srun else []), *spec.command]
    else:
        placement = place_by_component(spec) if spec.het else spec.placement
        options = dataclasses.replace(spec, placement=placement, srun=srun).to_arguments()
        words = [*spec.tf4slurm, "run", "--site", "none", *options, "--", *spec.command]
    line = quote(words)
    return f"{line} {_ARGUMENTS}" if spec.array_lines else line


def _end(command: str, epilogue: str) -> str:
    """Return the last lines: exec, so that the command receives Slurm's signals, or before an epilogue, traps."""
    if not epilogue:
        return f"exec {command}"
    passing = "\n".join(f"trap 'again=1; kill -{name} $job' {name}" for name in _SIGNALS)
    return (
        f"set -m  # without job control the command would ignore SIGINT\n{command} &\njob=$!\nset +m\n"
        f"{passing}\nagain=1\n"
        'while [ "$again" ]; do again= code=0; wait "$job" || code=$?; done  # a signal ends the wait, not the job\n'
        f"trap '' {' '.join(_SIGNALS)}  # Slurm signals every process of a job that it ends\n"
        f'{epilogue}\nexit "$code"'
    )
