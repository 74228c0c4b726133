"""The command `tf4slurm`. Each verb is a file of its own, imported when it is asked for: each starts fast."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from tf4slurm import __version__
from tf4slurm.system.guard import start_guard
from tf4slurm.system.program import run_program

_VERBS = {
    "run": "Run a job: local processes, or hosts of a Slurm allocation.",
    "submit": "Give a job to Slurm: make its batch script, and sbatch it.",
    "script": "Print the batch script that submit would give to sbatch.",
    "status": "Show where jobs stand, task by task.",
    "list": "List the jobs of before.",
    "logs": "Show what the tasks of a job printed.",
    "wait": "Wait until jobs have ended.",
    "cancel": "Ask jobs to save and stop.",
    "resume": "Start a job again as it was.",
    "report": "Write a job's report: one HTML file.",
    "tensorboard": "Start TensorBoard on a job's event files, or say how.",
    "doctor": "Look for what would keep a job from running, and say what to do.",
    "test": "Run a job of half a minute, to see that jobs run.",
    "config": "Show the settings, and where they come from.",
    "env": "Show what this process sees of its job.",
    "nodes": "Expand, fold or count Slurm's nodelists.",
    "task": "Be one task of a job (srun).",
    "completion": "Print the completion for a shell.",
}
_FUNCTIONS = {"list": "list_"}
_MODULES = {"script": "submit", "task": "run"}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"tf4slurm.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command = getattr(module, _FUNCTIONS.get(cmd_name, cmd_name))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="tf4slurm")
def cli() -> None:
    """Run TensorFlow parameter-server jobs on Slurm, or on this machine: from the first process to the last exit."""


def main() -> NoReturn:
    """Run the command line; verbs get the environment as it was."""
    if sys.argv[1:2] == ["task"]:  # here: the guard stays as small as this process is when it forks
        start_guard()
    run_program(lambda environ: cli(obj=environ))
