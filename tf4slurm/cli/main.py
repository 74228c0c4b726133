"""Run the command `tf4slurm`. Each verb is imported only when it is used, to start fast."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class

from tf4slurm import __version__
from tf4slurm.cli.shared import Verb, VerbGroup
from tf4slurm.system.program import run_program

_INTERRUPTED = 130  # 128 + SIGINT
_MAX_WIDTH = 120  # of help texts
_GROUPS = {
    "Start a job": {
        "run": ("run.run", "Run a job: local processes, or hosts of a Slurm allocation."),
        "submit": ("submit.submit", "Submit a job to Slurm."),
        "grow": ("workers.grow", "Add workers to a running job."),
        "shrink": ("workers.shrink", "Remove workers that were added."),
        "resume": ("jobs.resume", "Start a job again with the same options."),
    },
    "Watch and stop": {
        "status": ("jobs.status", "Show the state of jobs, task by task."),
        "list": ("jobs.list_", "List your jobs."),
        "logs": ("results.logs", "Print the output of a job's tasks."),
        "wait": ("jobs.wait", "Wait until jobs have ended."),
        "cancel": ("jobs.cancel", "Ask jobs to save and stop."),
    },
    "After the end": {
        "report": ("results.report", "Write a job's report: one HTML file."),
        "tensorboard": ("results.tensorboard", "Start TensorBoard on a job's event files."),
    },
    "Check": {
        "test": ("doctor.test", "Run a short test job."),
        "doctor": ("doctor.doctor", "Check this host or cluster for problems, with advice."),
        "env": ("show.env", "Show how this process sees its job."),
        "config": ("show.config", "Show the settings and their sources."),
    },
    "Advanced": {
        "script": ("submit.script", "Print the batch script that submit gives to sbatch."),
        "join": ("workers.join", "Run one more worker of a running job."),
        "task": ("run.task", "Run one task of a job (with srun)."),
        "client": ("show.client", "Print the variables for scripts with another Python."),
        "nodes": ("show.nodes", "Expand, fold or count Slurm's nodelists."),
        "completion": ("main.completion", "Print the completion script of a shell."),
    },
}
"""The verbs by group of the help text. Each has "MODULE.FUNCTION" in `tf4slurm.cli`, and its line in the help text."""

_VERBS = {verb: place for verbs in _GROUPS.values() for verb, place in verbs.items()}
_EXAMPLES = (
    "tf4slurm test",
    "tf4slurm run --ps 1 --workers 2 -- python train.py",
    "tf4slurm submit --ps 1 --workers 8 -t 2h -- python train.py",
)


class _Verbs(VerbGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, function = _VERBS[cmd_name][0].split(".")
        command = getattr(importlib.import_module(f"tf4slurm.cli.{module}"), function)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)

    def main(self, *args: Any, **values: Any) -> Any:
        """Run the command line. A usage error of click becomes an `OptionError`, so that all errors have one form."""
        try:
            return super().main(*args, **{**values, "standalone_mode": False})
        except click.UsageError as error:
            from tf4slurm.cli.mistakes import explain

            raise explain(error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _VERBS))
        for group, verbs in _GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(verb.ljust(width), summary) for verb, (_, summary) in verbs.items()])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _MAX_WIDTH},
    examples=_EXAMPLES,
    subcommand_metavar="COMMAND [ARGUMENTS]...",
)
@click.version_option(__version__, package_name="tf4slurm")
def cli() -> None:
    """Run TensorFlow parameter-server jobs on Slurm, or on this machine."""


@click.command(cls=Verb, examples=('eval "$(tf4slurm completion bash)"', "tf4slurm completion fish | source"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, /, shell: str) -> None:
    """Print a script that completes commands, options, jobs and tasks in SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "tf4slurm", "_TF4SLURM_COMPLETE").source())


def main() -> NoReturn:
    """Run the command line of this process, and exit with its exit code."""
    if sys.argv[1:2] == ["task"]:  # before further imports, because the guard keeps the memory of this process
        from tf4slurm.system.guard import start_guard

        start_guard()
    run_program(lambda environ: cli(obj=environ))
