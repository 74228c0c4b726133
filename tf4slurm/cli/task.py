"""`tf4slurm task`: one task of a job, with the launcher's environment or without a launcher."""

from __future__ import annotations

import sys
from typing import Any

import click

from tf4slurm.agent.agent import run_agent
from tf4slurm.agent.bootstrap import is_under_launcher
from tf4slurm.cli.options import given, job_options
from tf4slurm.system.output import LineWriter


@click.command()
@job_options("task")
@click.pass_obj
def task(environ: dict[str, str], /, **options: Any) -> None:
    """Be one task of a job: what srun starts on every task.

    Under "tf4slurm run" everything is known from the environment. Alone, as in "srun -n4 tf4slurm task --ps 1 --
    python train.py", the options say which roles there are, and rank 0 takes the launcher's part. COMMAND is that of
    "tf4slurm run".
    """
    if is_under_launcher(environ):
        sys.exit(run_agent(options["command"], environ))
    sys.exit(_run_alone(environ, options))


def _run_alone(environ: dict[str, str], options: dict[str, Any]) -> int:
    # only here: an agent under a launcher needs none of it, and starts faster
    from tf4slurm.cli.reporter import PlainReporter
    from tf4slurm.launch.checks import check_command
    from tf4slurm.launch.self_hosted import run_self_hosted_task
    from tf4slurm.slurm.step import SlurmStep
    from tf4slurm.spec import make_spec

    step = SlurmStep.from_environ(environ)
    spec = make_spec(given(options), step.num_tasks)
    check_command(spec.command)
    if spec.data_workers:
        check_command((spec.python,))
    writer = LineWriter(sys.stdout)
    reporter = PlainReporter(spec.num_tasks, writer, writer)
    try:
        return run_self_hosted_task(spec, step, environ, writer, reporter)
    finally:
        reporter.close()
