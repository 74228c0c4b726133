"""Make the batch script of a job from its `BatchSpec`: the text, and the options of sbatch."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence

from tf4slurm import __version__
from tf4slurm.cluster import Task, fill_in, placeholders_in
from tf4slurm.errors import OptionError
from tf4slurm.placement import PACK, SPREAD, parse_roles
from tf4slurm.slurm.parsing import parse_time_limit
from tf4slurm.spec.batch_spec import MEMORY_OPTIONS, BatchSpec
from tf4slurm.spec.points import format_labels
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS, NOW_SIGNAL

_SIGNAL_BEFORE_LIMIT = "USR1@120"  # the default with --requeue
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
_NOT_FOR_PS = (*_GPU_OPTIONS, "mem-per-gpu", "nodes", "ntasks-per-node", "nodelist", "exclude")
_COUNT = re.compile(r"[1-9]\d{0,8}")
_SIGNAL = re.compile(r"(?P<target>[RB]+:)?(?P<name>\w+)(@\d+)?")
_NOW_SIGNAL = (NOW_SIGNAL.name.removeprefix("SIG"), str(int(NOW_SIGNAL)))
_WARNING_SECONDS = 60  # Slurm's default for --signal, and how much earlier Slurm may send it (manual of sbatch)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SIGNALS = sorted(number.name.removeprefix("SIG") for number in LAUNCHER_SIGNALS)
_STOP = "exit 3"  # EXIT_PREFLIGHT


def make_script(spec: BatchSpec) -> str:
    """Return the text of the batch script. It has all options that are not at their default, also those of settings.

    So the job itself reads no settings.

    Raises:
        OptionError: The options contradict the roles, or each other.
    """
    components = make_sbatch_options(spec)
    how = f"with:\n#   {quote(spec.made_by)}" if spec.made_by else "from Python."
    blocks = [
        f"#!/bin/bash\n# Made by tf4slurm {__version__} {how}",
        "\n#SBATCH hetjob\n".join(_directives(options) for options in components),
        _output(spec, is_array="array" in components[0]),
        _environment(spec),
        _array(spec),
        _filled_in(spec),
        _end(_command(spec), spec.epilogue),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def quote(words: Sequence[str]) -> str:
    """Quote the words for bash, and join them to one line. Control characters, such as line breaks, are escaped."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if not _CONTROL.search(word):
        return shlex.quote(word)
    # sbatch refuses a script with CR LF, and a line break ends a comment: control characters are written as \x0a
    text = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text) + "'"


def _directives(options: dict[str, str]) -> str:
    return "\n".join(
        f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}" for name, value in options.items()
    )


def _output(spec: BatchSpec, *, is_array: bool) -> str:
    if "output" in spec.sbatch_options:
        return ""
    name = "slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if is_array else "slurm-$SLURM_JOB_ID"
    return (
        "# After a requeue: a file of its own for the output of each run.\n"
        f'if [ -n "${{SLURM_RESTART_COUNT:-}}" ]; then exec >"{name}.$SLURM_RESTART_COUNT.out" 2>&1; fi'
    )


def environment_lines(spec: BatchSpec) -> list[tuple[str, str]]:
    """Return the lines of bash that set up the environment, each after its option, such as "venv"."""
    lines = []
    if spec.module:
        lines.append(("module", "type module >/dev/null 2>&1 || . /etc/profile"))
        lines += [("module", f"module load {_quote(module)} || {_STOP}") for module in spec.module]
    if spec.load_env:
        lines.append(("load-env", spec.load_env))
    if spec.venv:
        lines.append(("venv", f". {_quote(spec.venv.rstrip('/') + '/bin/activate')} || {_STOP}"))
    if spec.conda:
        activate = f'eval "$(conda shell.bash hook)" && conda activate {_quote(spec.conda)} || {_STOP}'
        lines.append(("conda", activate))
    return [*lines, *(("env", f"export {name}={_quote(value)}") for name, value in spec.environment.items())]


def _environment(spec: BatchSpec) -> str:
    lines = [line for _, line in environment_lines(spec)]
    if spec.prologue:
        lines.append(spec.prologue)
    if spec.directory is not None:
        lines.append(f"cd {_quote(str(spec.directory))} || {_STOP}")
    if spec.snapshot != "none":
        lines.append(f'[ -O . ] || {{ echo "The snapshot $PWD belongs to another user." >&2; {_STOP}; }}')
    return "\n".join(lines)


def _array(spec: BatchSpec) -> str:
    """Return the lines that set the variables `labels`, and `command` or `arguments`, for this element of the array.

    If the elements have no varied arguments, return "".
    """
    if not spec.varied:
        return ""
    name, values = ("command", spec.commands) if spec.points else ("arguments", spec.array_lines)
    cases = []
    for index, (varied, words) in enumerate(zip(spec.varied, values, strict=True)):
        labels = quote([word for text in format_labels(varied) for word in ("--label", text)])
        start = f"  {index})" if spec.single else f"  {index}) labels=({labels})"
        cases.append(f"{start} {name}=({quote(words)}) ;;")
    unknown = '  *) echo "This script has no element $SLURM_ARRAY_TASK_ID." >&2; exit 2 ;;'
    return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, unknown, "esac"])


def _filled_in(spec: BatchSpec) -> str:
    """Return a comment that shows the command of one task with its placeholders, such as {ps_hosts}, filled in.

    Of a job array it is a task of element 0. If the command has no placeholders, return "".
    """
    command = spec.commands[0]
    if not placeholders_in(command):
        return ""
    task = Task("worker" if spec.counts.get("worker") else "chief", 0)
    hosts = {role: ["HOST:PORT"] * count for role, count in spec.counts.items()}
    name = f"{task} of element 0" if spec.varied else str(task)
    return f"# Each task gets its own values; {name} runs:\n#   {quote(fill_in(command, hosts, task))}"


def _command(spec: BatchSpec) -> str:
    srun = tuple(f"{name}={value}" if value else name for name, value in spec.srun_options.items())
    if spec.single:
        start = quote(["srun", *(f"--{each}" for each in srun)] if srun else [])
    else:
        placement = place_by_component(spec) if spec.het else spec.placement
        options = dataclasses.replace(spec, placement=placement, srun=srun).to_arguments()
        labels = ' "${labels[@]}"' if spec.varied else ""
        start = f"{quote([*spec.tf4slurm, 'run', '--site', 'none', *options])}{labels} --"
    command = '"${command[@]}"' if spec.points else quote(spec.command)
    arguments = '"${arguments[@]}"' if spec.array_lines else ""
    return " ".join(part for part in (start, command, arguments) if part)


def _end(command: str, epilogue: str) -> str:
    """Return the last lines of the script, which run `command` with exec, so that it receives Slurm's signals.

    With an epilogue, bash starts the command as a child, forwards the signals to it, and runs the epilogue after its
    end.
    """
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


# The options of sbatch


def make_sbatch_options(spec: BatchSpec) -> tuple[dict[str, str], ...]:
    """Return all options of sbatch by long name, for each component of the job.

    With --het there are two components: the ps, and all other tasks. Other jobs have one component.

    Raises:
        OptionError: The options contradict the roles, or each other.
    """
    options = {"job-name": spec.name, **spec.sbatch_options}
    options.setdefault("open-mode", "append")  # else a requeue truncates the output of the previous run
    _add_signal(options, spec)
    if spec.external_chief and "requeue" not in options:
        options.setdefault("no-requeue", "")  # another run would wait for a chief that does not come
    if spec.spares:
        options.setdefault("no-kill", "")  # else Slurm ends the job when it loses a node
    if spec.varied:
        options.setdefault("array", f"0-{len(spec.varied) - 1}")
    if spec.at_most is not None:
        options["array"] += f"%{spec.at_most}"
    if spec.after:
        others = [options["dependency"]] if "dependency" in options else []
        options["dependency"] = ",".join([f"afterok:{':'.join(spec.after)}", *others])
    if spec.het:
        return _split(options, spec)
    return (_add_gpus(_add_tasks(options, spec.num_spawned), spec),)


def place_by_component(spec: BatchSpec) -> str:
    """Return the role of each rank of a heterogeneous job, such as "ps,chief,worker". The ps are the first.

    Raises:
        OptionError: The job's placement does not put the ps first, or a component has no tasks.
    """
    ps = spec.counts.get("ps", 0)
    counts = {**spec.counts, "chief": int(spec.chief and not spec.external_chief)}
    others = [role for role, count in counts.items() if role != "ps" for _ in range(count)]
    if not ps or not others:
        raise OptionError("--het needs at least one ps and one other task.", option="het")
    if spec.placement == PACK:
        return ",".join(["ps"] * ps + others)
    if spec.placement == SPREAD or parse_roles(spec.placement)[:ps] != ["ps"] * ps:
        raise OptionError(
            f"--het gives the first {ps} ranks to the ps, but --placement {spec.placement} does not. Omit "
            "--placement, or put the ps first.",
            option="placement",
        )
    return spec.placement


def _split(options: dict[str, str], spec: BatchSpec) -> tuple[dict[str, str], ...]:
    """Return the options of sbatch for the two components of a heterogeneous job: the ps, and all other tasks."""
    place_by_component(spec)
    if "array" in options:
        raise OptionError("Slurm has no arrays of heterogeneous jobs: omit --array or --het.", option="array")
    if "ntasks" in options and options.pop("ntasks") != str(spec.num_spawned):
        raise OptionError("With --het the number of tasks follows from the roles. Omit -n.", option="ntasks")
    ps_options = spec.ps_options
    replaced = MEMORY_OPTIONS if set(MEMORY_OPTIONS) & set(ps_options) else ()
    ps = {name: value for name, value in options.items() if name not in (*_NOT_FOR_PS, *replaced)} | ps_options
    for component in (ps, options):  # else Slurm uses the first component's value for both
        component.setdefault("cpus-per-task", "1")
    return _add_tasks(ps, spec.ps), _add_gpus(_add_tasks(options, spec.num_spawned - spec.ps), spec)


def _add_tasks(options: dict[str, str], num_tasks: int) -> dict[str, str]:
    options = {**options, "ntasks": options.get("ntasks", str(num_tasks))}
    if options["ntasks"] != str(num_tasks):
        raise OptionError(
            f"The job has {num_tasks} tasks, but --ntasks is {options['ntasks']}. Omit --ntasks, or change the roles.",
            option="ntasks",
        )
    return options


def _add_gpus(options: dict[str, str], spec: BatchSpec) -> dict[str, str]:
    """Return `options` with those that --gpus-per-worker needs: GPUs of each node, and tasks of each node.

    The tasks are spread evenly over the nodes, unless --ntasks-per-node is given. Without --gpus-per-worker, without
    workers, or if `options` request GPUs already, they are returned unchanged.
    """
    workers = spec.counts.get("worker", 0)
    if spec.gpus_per_worker is None or not workers or set(_GPU_OPTIONS) & set(options):
        return options
    nodes = "1" if spec.single else options.get("nodes", "")
    if not _COUNT.fullmatch(nodes):
        raise OptionError(
            f"With --gpus-per-worker {spec.gpus_per_worker} the GPUs of a node depend on the number of nodes. Give "
            "that with -N, or request GPUs with --gpus-per-node or --gres.",
            option="gpus-per-worker",
        )
    per_node = options.get("ntasks-per-node", str(-(-int(options["ntasks"]) // int(nodes))))
    most = min(int(per_node), workers) if _COUNT.fullmatch(per_node) else workers
    kind = f"{spec.gpu_type}:" if spec.gpu_type else ""
    gpus = f"{'gpu:' if spec.gpu_flag == 'gres' else ''}{kind}{spec.gpus_per_worker * most}"
    return {**options, "ntasks-per-node": per_node, spec.gpu_flag: gpus}


def _add_signal(options: dict[str, str], spec: BatchSpec) -> None:
    """Add to `options` what --requeue of the job needs, and let only the batch script receive the signal of --signal.

    --requeue adds the options requeue and, unless given, signal of sbatch. The batch script's process is the launcher,
    or forwards signals to it. With --single there is no launcher, and --signal is kept.
    """
    if spec.requeue is not None:
        options.setdefault("requeue", "")
        options.setdefault("signal", _SIGNAL_BEFORE_LIMIT)
    if spec.single or "signal" not in options:
        return
    value = options["signal"]
    match = _SIGNAL.fullmatch(value)
    if match is None:
        raise OptionError(
            f"--signal {value!r} is not a signal with the seconds before the time limit, such as USR1@120.",
            option="signal",
        )
    if match["name"].upper().removeprefix("SIG") in _NOW_SIGNAL:
        raise OptionError(
            f"--signal {value!r} would end the job without its grace period, as tf4slurm cancel --now does. Give "
            "another signal, such as USR1@120.",
            option="signal",
        )
    target = (match["target"] or ":").rstrip(":")
    if "B" not in target:
        options["signal"] = f"{target}B:{value.rpartition(':')[2]}"
    if spec.requeue is not None:
        _check_warning(options["signal"], options.get("time", ""))


def _check_warning(warning: str, limit: str) -> None:
    """Check that the job can train before Slurm sends it the signal of --signal.

    Args:
        warning: The value of --signal, such as "B:USR1@120".
        limit: The value of --time, or "".

    Raises:
        OptionError: Slurm might send the signal as soon as the job starts.
    """
    before = int(warning.partition("@")[2] or _WARNING_SECONDS)
    seconds = parse_time_limit(limit)
    if seconds is not None and seconds <= before + _WARNING_SECONDS:
        raise OptionError(
            f"With --time {limit} the job would have to stop as soon as it starts: --signal {warning} comes "
            f"{before} s before the limit, or up to {_WARNING_SECONDS} s earlier. Request more time.",
            option="signal",
        )
