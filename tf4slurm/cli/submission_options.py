"""The options of a job that is given to sbatch, in Slurm's own spellings, and the submission that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from tf4slurm.cli.options import given
from tf4slurm.errors import LaunchError, SubmissionError
from tf4slurm.placeholders import placeholders_in
from tf4slurm.spec import JobSpec, make_spec
from tf4slurm.submission.options import MEMORY_OPTIONS, Submission, read_array_lines
from tf4slurm.submission.snapshot import place_snapshot

_SBATCH = (
    ("-N", "--nodes", "Number of nodes."),
    ("-n", "--ntasks", "Number of tasks. [default: what the roles need]"),
    ("", "--ntasks-per-node", "Tasks on each node."),
    ("-c", "--cpus-per-task", "CPUs of each task."),
    ("-p", "--partition", "Partition."),
    ("-A", "--account", "Account that pays."),
    ("-q", "--qos", "Quality of service."),
    ("-t", "--time", "Time limit, such as 1:00:00."),
    ("-C", "--constraint", "Features that the nodes must have."),
    ("-w", "--nodelist", "Nodes that must be among the job's."),
    ("-x", "--exclude", "Nodes that must not."),
    ("", "--mem", "Memory of each node, such as 32G."),
    ("", "--mem-per-cpu", "Memory for each CPU."),
    ("", "--mem-per-gpu", "Memory for each GPU."),
    ("", "--gpus-per-node", "GPUs of each node, such as 2 or a100:2."),
    ("", "--gpus-per-task", "GPUs of each task; ps hide theirs."),
    ("", "--gres", "Generic resources of each node, such as gpu:2."),
    ("", "--reservation", "Reservation to run in."),
    ("-o", "--output", "File for the output. [default: slurm-<id>.out]"),
    ("", "--array", "Job array, such as 0-9%2."),
    ("", "--mail-type", "When to send mail, such as END,FAIL."),
    ("", "--mail-user", "Whom to send it to."),
    ("", "--signal", "Signal before the time limit, such as USR1@120; the launcher gets it."),
)
_SHORT = {short[1:]: option[2:] for short, option, _ in _SBATCH if short}
_RAW = "K=V"
_COMPLETION_SECONDS = 2.0


def _complete_partitions(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from tf4slurm.slurm.commands import ask_partitions

    try:
        names = ask_partitions(timeout_seconds=_COMPLETION_SECONDS)
    except LaunchError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


_OPTIONS = (
    *(
        click.option(
            *filter(None, (short, option, option[2:].replace("-", "_"))),
            metavar="TEXT",
            help=text,
            shell_complete=_complete_partitions if option == "--partition" else None,
        )
        for short, option, text in _SBATCH
    ),
    click.option("--exclusive/--no-exclusive", default=None, help="Share the nodes with no other job."),
    click.option("--after", multiple=True, metavar="ID", help="Start when this job has succeeded. Repeatable."),
    click.option("--dependency", metavar="RAW", help="Dependency in Slurm's words, such as afterany:4711."),
    click.option(
        "--array-args",
        type=click.File(encoding="utf-8", errors="surrogateescape"),
        help="File of arguments: element k of the array appends those of line k, from 0, to the command.",
    ),
    click.option("--sbatch", multiple=True, metavar=_RAW, help="Any other option of sbatch. Repeatable."),
    click.option("--no-sbatch", multiple=True, metavar="K", help="Take an option of sbatch out. Repeatable."),
    click.option("--het", is_flag=True, help="ps on a component of their own, without GPUs (heterogeneous job)."),
    click.option("--ps-sbatch", multiple=True, metavar=_RAW, help="With --het: what differs for the ps. Repeatable."),
    click.option(
        "--gpu-flag",
        type=click.Choice(["gpus-per-node", "gres"]),
        default="gpus-per-node",
        show_default=True,
        help="How --gpus-per-worker is asked of Slurm.",
    ),
    click.option("--gpu-type", help="Type of these GPUs, such as a100."),
    click.option("--module", multiple=True, help="Environment module to load. Repeatable."),
    click.option("--load-env", default="", metavar="TEXT", help="Lines of bash that set up the environment."),
    click.option("--venv", default="", metavar="DIRECTORY", help="Virtual environment to activate."),
    click.option("--conda", default="", metavar="NAME", help="Conda environment to activate."),
    click.option("--env", multiple=True, metavar=_RAW, help="Variable to set; it stands in the script. Repeatable."),
    click.option("--prologue", default="", metavar="TEXT", help="Lines of bash before the job."),
    click.option("--epilogue", default="", metavar="TEXT", help="Lines of bash after the job."),
    click.option("--container", default="", help="Container for the tasks, as srun --container takes it."),
    click.option(
        "--python",
        default="",
        help="Python that has tf4slurm in the job. [default: this one; with --module, --load-env, --venv or --conda: "
        '"python" there]',
    ),
    click.option(
        "--snapshot",
        type=click.Choice(["git", "copy", "none"]),
        default="none",
        show_default=True,
        help="Run in a copy of this directory, taken now, at most 1 GB: of the files that git tracks, or of all that "
        "git does not ignore. Outside of a checkout that is everything, files with secrets such as .env too.",
    ),
    click.option("--single", is_flag=True, help="One task that runs COMMAND alone: no ps, no cluster."),
)


def submission_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a submission."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_job(context: click.Context, made_by: tuple[str, ...], options: dict[str, Any]) -> tuple[JobSpec, Submission]:
    """Make plan and submission from the values of all options of a verb.

    Raises:
        SubmissionError, PlacementError: They contradict each other.
    """
    taken = {name: options.pop(name) for name in option_names(submission_options)}
    if taken["single"]:
        _check_single(context)
        for name in placeholders_in(options["command"]):
            raise click.UsageError(f"--single has no cluster to fill in {{{name}}} from: leave one of the two out.")
        options.update(ps=0, workers=1, evaluators=0, data_workers=0, chief=False)
    sbatch = _sbatch_options(context, taken)
    available = 1 if taken["single"] else _available_tasks(sbatch)
    if options["workers"] is None and available is None:
        raise click.UsageError("How many workers are there? Give --workers N, or the number of all tasks with -n.")
    plan = make_spec(given(options), available)
    srun = parse_raw("--srun", plan.srun)
    if taken["container"]:
        srun = {"container": taken["container"], **srun}
    if taken["ps_sbatch"] and not taken["het"]:
        raise click.UsageError("--ps-sbatch says what differs for the ps of a heterogeneous job. Give --het too.")
    submission = Submission(
        options=sbatch,
        ps_options=parse_raw("--ps-sbatch", taken["ps_sbatch"]) if taken["het"] else None,
        srun=srun,
        after=tuple(taken["after"]),
        array_lines=_read_lines(taken["array_args"]),
        single=taken["single"],
        modules=tuple(taken["module"]),
        environment=_variables(taken["env"]),
        made_by=made_by,
        **{
            name: taken[name]
            for name in (
                "load_env",
                "venv",
                "conda",
                "prologue",
                "epilogue",
                "python",
                "gpu_flag",
                "gpu_type",
                "snapshot",
            )
        },
    )
    return place_snapshot(plan, submission)


def parse_srun(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return what --srun says as srun takes it."""
    return tuple(f"--{name}={text}" if text else f"--{name}" for name, text in parse_raw("--srun", values).items())


def parse_raw(option: str, values: tuple[str, ...]) -> dict[str, str]:
    """Read K=V, or K alone for what has no value; K is a long name, or a letter that tf4slurm has too."""
    found = {}
    for value in values:
        name, _, text = value.lstrip("-").partition("=")
        found[_SHORT.get(name, name)] = text
    if "" in found:
        raise click.BadParameter("expected NAME=VALUE, such as nice=100.", param_hint=option)
    return found


def option_names(options: Callable[[Callable[..., None]], Callable[..., None]]) -> dict[str, tuple[str, ...]]:
    """Return the options that a decorator adds: the name of each value, and its long spellings without dashes."""

    def nothing(**values: Any) -> None: ...

    parameters = click.command()(options(nothing)).params
    return {
        parameter.name: tuple(name[2:] for name in parameter.opts if name.startswith("--"))
        for parameter in parameters
        if parameter.name and isinstance(parameter, click.Option)
    }


def _sbatch_options(context: click.Context, taken: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for _, option, _ in _SBATCH:
        value = taken[option[2:].replace("-", "_")]
        if value:
            found[option[2:]] = value
    said = [name for name in MEMORY_OPTIONS if _is_said(context, name)]
    if said:  # on the command line: then what settings say of the other two does not count
        found = {name: value for name, value in found.items() if name not in MEMORY_OPTIONS or name in said}
    if taken["exclusive"]:
        found["exclusive"] = ""
    if taken["dependency"]:
        found["dependency"] = taken["dependency"]
    found.update(parse_raw("--sbatch", taken["sbatch"]))
    for name in taken["no_sbatch"]:
        found.pop(_SHORT.get(name.lstrip("-"), name.lstrip("-")), None)
    return found


def _is_said(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option.replace("-", "_")) is ParameterSource.COMMANDLINE


def _check_single(context: click.Context) -> None:
    for name in ("ps", "workers", "evaluators", "data-workers", "chief", "placement", "het"):
        if _is_said(context, name):
            raise click.UsageError(f"--single has one task and no roles: leave --{name} out.")


def _available_tasks(options: Mapping[str, str]) -> int | None:
    """Return how many tasks Slurm is asked for; None if the roles say it."""
    for names in (("ntasks",), ("nodes", "ntasks-per-node")):
        texts = [options.get(name, "") for name in names]
        if all(text.isdecimal() and len(text) < 10 for text in texts):
            product = 1
            for text in texts:
                product *= int(text)
            return product
    return None


def _read_lines(file: IO[str] | None) -> tuple[tuple[str, ...], ...]:
    return read_array_lines(file.read()) if file is not None else ()


def _variables(values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator:
            raise SubmissionError(f"--env {value!r} has no value. Give NAME=VALUE.", option="env")
        found[name] = text
    return found
