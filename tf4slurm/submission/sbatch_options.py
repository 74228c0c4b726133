"""Make the options of sbatch from the options of a `BatchSpec` and from its roles."""

from __future__ import annotations

import re

from tf4slurm.batch_spec import MEMORY_OPTIONS, BatchSpec
from tf4slurm.errors import OptionError
from tf4slurm.placement import PACK, SPREAD, parse_roles
from tf4slurm.slurm.parsing import parse_time_limit

_SIGNAL_BEFORE_LIMIT = "USR1@120"  # the default with --requeue
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
_NOT_FOR_PS = (*_GPU_OPTIONS, "mem-per-gpu", "nodes", "ntasks-per-node", "nodelist", "exclude")
_COUNT = re.compile(r"[1-9]\d{0,8}")
_SIGNAL = re.compile(r"(?P<target>[RB]+:)?\w+(@\d+)?")
_WARNING_SECONDS = 60  # Slurm's default for --signal; also, Slurm may send a signal this much earlier


def make_sbatch_options(spec: BatchSpec) -> tuple[dict[str, str], ...]:
    """Return all options of sbatch for each component of the job.

    Raises:
        OptionError: The options contradict the roles, or each other.
    """
    options = {"job-name": spec.name, **spec.sbatch_options}
    options.setdefault("open-mode", "append")  # else a requeue truncates the output of the previous run
    _add_signal(options, spec)
    if spec.array_lines:
        options.setdefault("array", f"0-{len(spec.array_lines) - 1}")
    if spec.after:
        others = [options["dependency"]] if "dependency" in options else []
        options["dependency"] = ",".join([f"afterok:{':'.join(spec.after)}", *others])
    if spec.het:
        return _split(options, spec)
    return (_add_gpus(_add_tasks(options, spec.num_tasks), spec),)


def place_by_component(spec: BatchSpec) -> str:
    """Return the placement of a heterogeneous job: the role of each rank, with the ps first.

    Raises:
        OptionError: The job's placement does not put the ps first, or a component has no tasks.
    """
    ps = spec.counts.get("ps", 0)
    others = [role for role, count in spec.counts.items() if role != "ps" for _ in range(count)]
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
    """Return the options of a heterogeneous job for the component of the ps, then for the other component."""
    place_by_component(spec)
    if "array" in options:
        raise OptionError("Slurm has no arrays of heterogeneous jobs: omit --array or --het.", option="array")
    if "ntasks" in options and options.pop("ntasks") != str(spec.num_tasks):
        raise OptionError("With --het the number of tasks follows from the roles. Omit -n.", option="ntasks")
    ps_options = spec.ps_options
    replaced = MEMORY_OPTIONS if set(MEMORY_OPTIONS) & set(ps_options) else ()
    ps = {name: value for name, value in options.items() if name not in (*_NOT_FOR_PS, *replaced)} | ps_options
    for component in (ps, options):  # else Slurm uses the first component's value for both
        component.setdefault("cpus-per-task", "1")
    return _add_tasks(ps, spec.ps), _add_gpus(_add_tasks(options, spec.num_tasks - spec.ps), spec)


def _add_tasks(options: dict[str, str], num_tasks: int) -> dict[str, str]:
    options = {**options, "ntasks": options.get("ntasks", str(num_tasks))}
    if options["ntasks"] != str(num_tasks):
        raise OptionError(
            f"The job has {num_tasks} tasks, but --ntasks is {options['ntasks']}. Omit --ntasks, or change the roles.",
            option="ntasks",
        )
    return options


def _add_gpus(options: dict[str, str], spec: BatchSpec) -> dict[str, str]:
    """Request the GPUs that the workers of each node need, with the tasks spread evenly over the nodes."""
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
    """Add the options for a requeue; direct --signal to the launcher, except with --single."""
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
    target = (match["target"] or ":").rstrip(":")
    if "B" not in target:
        options["signal"] = f"{target}B:{value.rpartition(':')[2]}"
    if spec.requeue is not None:
        _check_warning(options["signal"], options.get("time", ""))


def _check_warning(warning: str, limit: str) -> None:
    """Refuse a signal at the start of the job: the job would be requeued repeatedly without training."""
    before = int(warning.partition("@")[2] or _WARNING_SECONDS)
    seconds = parse_time_limit(limit)
    if seconds is not None and seconds <= before + _WARNING_SECONDS:
        raise OptionError(
            f"With --time {limit} the job would have to stop as soon as it starts: --signal {warning} comes "
            f"{before} s before the limit, or up to {_WARNING_SECONDS} s earlier. Request more time.",
            option="signal",
        )
