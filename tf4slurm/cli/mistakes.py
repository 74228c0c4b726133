"""Write the messages for usage errors of the command line: what was given, what was expected, what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import click

from tf4slurm.cluster import format_tasks
from tf4slurm.errors import OptionError
from tf4slurm.spec.options import did_you_mean, nearest

_VERBS = {
    "start": "tf4slurm run (here) or tf4slurm submit (to Slurm)",
    "launch": "tf4slurm run (here) or tf4slurm submit (to Slurm)",
    "srun": "tf4slurm run (here) or tf4slurm task (under srun)",
    "sbatch": "tf4slurm submit",
    "stop": "tf4slurm cancel ID",
    "kill": "tf4slurm cancel ID",
    "scancel": "tf4slurm cancel ID",
    "rm": "tf4slurm cancel ID",
    "ps": "tf4slurm list (all jobs) or tf4slurm status (the tasks of one)",
    "ls": "tf4slurm list",
    "jobs": "tf4slurm list",
    "queue": "tf4slurm list",
    "squeue": "tf4slurm list",
    "tail": "tf4slurm logs --follow",
    "output": "tf4slurm logs",
    "show": "tf4slurm status, or tf4slurm config show for the settings",
    "info": "tf4slurm status, or tf4slurm env for this process",
    "watch": "tf4slurm status --watch",
    "restart": "tf4slurm resume ID",
    "rerun": "tf4slurm resume ID",
    "check": "tf4slurm doctor",
    "settings": "tf4slurm config show",
}
"""What to suggest for a command name that only other programs have, such as "srun"."""

_OPTIONS = {
    "--num-gpus": "--gpus-per-worker",
    "--gpus": "--gpus-per-worker",
    "--gpu": "--gpus-per-worker",
    "--cpus": "--cpus-per-task",
    "--num-cpus": "--cpus-per-task",
    "--memory": "--mem",
    "--queue": "--partition",
    "--time-limit": "--time",
    "--walltime": "--time",
    "--job_name": "--name",
    "--parameter-servers": "--ps",
    "--image": "--container",
    "--modules": "--module",
    "--log-dir": "--runs-directory",
    "--retries": "--max-attempts",
    "--depend": "--dependency",
    "-f": "--follow",
}
"""The option to suggest for an option name that only other programs have."""

_ONE_CHIEF = " A job has one chief (TensorFlow 1: master) without an option for it. With --no-chief, worker 0 leads."
_REMARKS = dict.fromkeys(
    ("--chiefs", "--master", "--masters", "--num-chiefs", "--num-masters", "--coordinator", "--coordinators"),
    _ONE_CHIEF,
)
"""What to print about an option name to which no option of `run` or `submit` corresponds."""


def explain(error: click.UsageError) -> OptionError:
    """Convert a usage error of click into the error that tf4slurm prints. Add a hint, and a reference to --help."""
    context = error.ctx
    name = ""
    text = error.format_message()
    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        text = f"No such option {name!r}{_of(context)}.{_find_option(name, context)}"
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        text = f"{_name_of(error.param)} is missing."
        if _name_of(error.param) == "ID":
            text = "Which job? Give its id; tf4slurm list shows them."
    elif isinstance(error, click.BadParameter) and error.param is not None:
        text = f"{_name_of(error.param)}: {error.message}"
    if type(error) is not click.UsageError and context is not None:
        text += f' See "{context.command_path} --help".'
    return OptionError(re.sub(r"\s+", " ", text), option=name.lstrip("-"))


def explain_verb(name: str, verbs: Sequence[str], program: str) -> str:
    """Return the message for a command `name` that `program`, such as "tf4slurm config", does not have.

    `verbs` are the commands that it has.
    """
    if name in _VERBS and "run" in verbs:
        hint = f" Use {_VERBS[name]}."
    elif "run" in verbs and ("." in name or "/" in name or name.startswith("python")):
        script = "train.py" if name.startswith("python") else name
        hint = f" To run a script: tf4slurm run --ps 1 --workers 2 -- python {shlex.quote(script)}"
    else:
        hint = did_you_mean(nearest(name, verbs)) or f" The commands are {', '.join(verbs)}."
    return f'"{program}" has no command {name!r}.{hint}'


def check_separator(context: click.Context, arguments: Sequence[str], command: Sequence[str]) -> None:
    """Refuse a COMMAND that contains options but has no "--" before it: is an option for tf4slurm or for the script?

    Args:
        context: The context of the verb, such as "tf4slurm run".
        arguments: All arguments of the verb.
        command: The arguments that are COMMAND, at the end of `arguments`.

    Raises:
        click.UsageError: COMMAND contains options, and there is no "--" before it.
    """
    before = list(arguments[: len(arguments) - len(command)])
    if before[-1:] == ["--"] or not any(word.startswith("-") for word in command):
        return
    line = shlex.join([*context.command_path.split(), *before, "--", *command])
    text = f'Put "--" before the script\'s command, and options of tf4slurm before "--": {line}'
    raise click.UsageError(text, context)


def _name_of(parameter: click.Parameter) -> str:
    return (
        max(parameter.opts, key=len)
        if isinstance(parameter, click.Option)
        else (parameter.metavar or parameter.name or "").upper().strip("[].")
    )


def _of(context: click.Context | None) -> str:
    return f' of "{context.command_path}"' if context is not None else ""


def _find_option(name: str, context: click.Context | None) -> str:
    """Return a hint for an unknown option `name`, or "" if there is no hint.

    The hint names other verbs that have this option, or else similar options of the verb in `context`.
    """
    if context is None:
        return ""
    known = _options_of(context.command)
    if _OPTIONS.get(name) in known:
        return did_you_mean([_OPTIONS[name]])
    if name in _REMARKS and "--chief" in known:
        return _REMARKS[name]
    verbs = [verb for verb, command in _other_verbs(context) if name in _options_of(command)]
    if verbs:
        text = f" It is an option of {format_tasks(verbs)}."
        if context.info_name == "run" and "submit" in verbs:
            text += " run uses the hosts of the allocation that it is started in (salloc), or this host."
        return text
    if not name.startswith("--"):
        return ""
    return did_you_mean([f"--{each}" for each in nearest(name[2:], (each[2:] for each in known if each[:2] == "--"))])


def _options_of(command: click.Command) -> list[str]:
    return [
        flag
        for each in command.params
        if isinstance(each, click.Option) and not each.hidden
        for flag in (*each.opts, *each.secondary_opts)
    ]


def _other_verbs(context: click.Context) -> list[tuple[str, click.Command]]:
    root = context.find_root()
    if not isinstance(root.command, click.Group):
        return []
    found = ((verb, root.command.get_command(root, verb)) for verb in root.command.list_commands(root))
    return [(verb, command) for verb, command in found if command is not None and verb != context.info_name]
