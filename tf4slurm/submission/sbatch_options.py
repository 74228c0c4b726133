"""What sbatch is asked in the end: what a submission says, and what follows from the spec. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tf4slurm.batch_spec import MEMORY_OPTIONS, BatchSpec, check_option
from tf4slurm.errors import OptionError
from tf4slurm.placement import PACK, SPREAD, parse_roles

SIGNAL_BEFORE_LIMIT = "USR1@120"
"""What a job with `requeue` asks for by default: it learns of its time limit two minutes before."""

_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
_NOT_OF_A_PS = (*_GPU_OPTIONS, "mem-per-gpu", "nodes", "ntasks-per-node", "nodelist", "exclude")
_COUNT = re.compile(r"[1-9]\d{0,8}")
_SIGNAL = re.compile(r"(?P<who>[RB]+:)?\w+(@\d+)?")
_WARNING_SECONDS = 60  # Slurm's default for --signal, and how much earlier than asked it may send it


def ask_sbatch(spec: BatchSpec) -> tuple[dict[str, str], ...]:
    """Return the options of each component of the job, complete: what was asked and what follows from the spec.

    Raises:
        OptionError: They do not fit the spec.
    """
    if "/" in spec.name:
        raise OptionError(f"The name {spec.name!r} has a slash, and files are named after it.", option="name")
    options = dict(spec.sbatch_options)
    if spec.requeue is not None:
        options.setdefault("requeue", "")
        options.setdefault("signal", SIGNAL_BEFORE_LIMIT)
    if not spec.single and "signal" in options:
        options["signal"] = _to_batch_script(options["signal"])
        if spec.requeue is not None:
            _check_warning(options["signal"], options.get("time", ""))
    if spec.array_lines:
        options.setdefault("array", f"0-{len(spec.array_lines) - 1}")
    if spec.after:
        others = [options["dependency"]] if "dependency" in options else []
        options["dependency"] = ",".join([f"afterok:{':'.join(spec.after)}", *others])
    options = {"job-name": spec.name, **options}
    options.setdefault("open-mode", "append")  # else a requeue empties the output of the run before
    if spec.single:
        if spec.requeue is not None:
            raise OptionError(
                "--single has nothing of tf4slurm in the job that could requeue it. Leave --requeue out; "
                "--sbatch requeue lets Slurm do it after a preemption.",
                option="requeue",
            )
        if options.setdefault("ntasks", "1") != "1":
            raise OptionError("--single is a job of one task. Leave --ntasks out.", option="ntasks")
    components: tuple[dict[str, str], ...]
    if spec.ps_options is None:
        components = (_add_gpus(_add_tasks(options, spec.num_tasks), spec),)
    else:
        components = _ask_components(options, spec.ps_options, spec)
    for component in components:
        for name, value in component.items():  # the job's name and the type of GPU are not yet checked
            check_option(name, value)
    return components


def place_by_component(spec: BatchSpec) -> str:
    """Return the placement of a heterogeneous job, a role for each rank: the ranks of the ps come first.

    Raises:
        OptionError: The plan has another placement, or nothing for a component.
    """
    ps = spec.counts.get("ps", 0)
    others = [role for role, count in spec.counts.items() if role != "ps" for _ in range(count)]
    if not ps or not others:
        raise OptionError("--het is for ps on one component and others on another; one has no task.", option="het")
    if spec.placement == PACK:
        return ",".join(["ps"] * ps + others)
    if spec.placement == SPREAD or parse_roles(spec.placement)[:ps] != ["ps"] * ps:
        raise OptionError(
            f"--het gives the first {ps} ranks to the ps, but --placement {spec.placement} does not. Leave --placement "
            "out, or put the ps first.",
            option="placement",
        )
    return spec.placement


def _ask_components(
    options: dict[str, str], ps_options: Mapping[str, str], spec: BatchSpec
) -> tuple[dict[str, str], ...]:
    place_by_component(spec)
    if "array" in options:
        raise OptionError("Slurm has no arrays of heterogeneous jobs: leave --array or --het out.", option="array")
    if "ntasks" in options and options.pop("ntasks") != str(spec.num_tasks):
        raise OptionError("With --het the number of tasks follows from the roles. Leave -n out.", option="ntasks")
    memory = set(MEMORY_OPTIONS) & set(ps_options)
    kept = {name: value for name, value in options.items() if name not in _NOT_OF_A_PS}
    ps = {**{name: value for name, value in kept.items() if not (memory and name in MEMORY_OPTIONS)}, **ps_options}
    others = {role: count for role, count in spec.counts.items() if role != "ps"}
    for component in (ps, options):  # else the first one's would be taken for that of both
        component.setdefault("cpus-per-task", "1")
    return (_add_tasks(ps, spec.counts["ps"]), _add_gpus(_add_tasks(options, sum(others.values())), spec))


def _add_tasks(options: dict[str, str], num_tasks: int) -> dict[str, str]:
    options = {**options, "ntasks": options.get("ntasks", str(num_tasks))}
    if options["ntasks"] != str(num_tasks):
        raise OptionError(
            f"The roles are {num_tasks} tasks, but ntasks={options['ntasks']} is asked for. Leave it out, or change a "
            "count.",
            option="ntasks",
        )
    return options


def _add_gpus(options: dict[str, str], spec: BatchSpec) -> dict[str, str]:
    """Ask for as many GPUs on each node as its workers need, with the tasks dealt evenly over the nodes."""
    workers = spec.counts.get("worker", 0)
    if spec.gpus_per_worker is None or not workers or set(_GPU_OPTIONS) & set(options):
        return options
    nodes = "1" if spec.single else options.get("nodes", "")
    if not _COUNT.fullmatch(nodes):
        raise OptionError(
            f"With --gpus-per-worker {spec.gpus_per_worker} the GPUs of a node depend on the number of nodes. Give "
            "that with -N, or ask for the GPUs yourself with --gpus-per-node or --gres.",
            option="gpus-per-worker",
        )
    per_node = options.get("ntasks-per-node", str(-(-int(options["ntasks"]) // int(nodes))))
    most = min(int(per_node), workers) if _COUNT.fullmatch(per_node) else workers
    kind = f"{spec.gpu_type}:" if spec.gpu_type else ""
    gpus = f"{'gpu:' if spec.gpu_flag == 'gres' else ''}{kind}{spec.gpus_per_worker * most}"
    return {**options, "ntasks-per-node": per_node, spec.gpu_flag: gpus}


def _to_batch_script(value: str) -> str:
    """Return --signal so that the launcher gets it: it is the batch script, and decides what the tasks are told."""
    match = _SIGNAL.fullmatch(value)
    if match is None:
        raise OptionError(
            f"--signal {value!r} is not a signal with the seconds before the time limit, such as USR1@120.",
            option="signal",
        )
    who = (match["who"] or ":").rstrip(":")
    return value if "B" in who else f"{who}B:{value.rpartition(':')[2]}"


def _check_warning(warning: str, limit: str) -> None:
    """Refuse a warning that comes at the start: the job would be requeued again and again, and never train."""
    before = int(warning.partition("@")[2] or _WARNING_SECONDS)
    seconds = _to_seconds(limit)
    if seconds is not None and seconds <= before + _WARNING_SECONDS:
        raise OptionError(
            f"With --time {limit} the job would be told to stop as soon as it starts: --signal {warning} comes "
            f"{before} s before the limit, or up to {_WARNING_SECONDS} s earlier. Ask for more time, or a later one.",
            option="signal",
        )


def _to_seconds(limit: str) -> int | None:
    """Read a time limit as sbatch does: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None if it is something else."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
