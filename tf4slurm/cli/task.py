"""`tf4slurm task`: one task of a job without a launcher."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

from tf4slurm.cli.options import job_options, make_plan
from tf4slurm.cli.reporter import PlainReporter
from tf4slurm.launch.plan import check_command
from tf4slurm.launch.self_hosted import run_self_hosted_task
from tf4slurm.output import LineWriter
from tf4slurm.slurm.step import SlurmStep


@click.command()
@job_options
@click.pass_obj
def task(environ: dict[str, str], /, **options: Any) -> None:
    """Be one task of a job without a launcher, as in "srun -n4 tf4slurm task --ps 1 -- python train.py".

    The options say which roles there are, and rank 0 takes the launcher's part.
    """
    step = SlurmStep.from_environ(environ)
    plan = make_plan(step.num_tasks, **options)
    check_command(plan.command)
    if plan.data_python is not None:
        check_command((plan.data_python,))
    writer = LineWriter(sys.stdout)
    reporter = PlainReporter(plan.num_tasks, writer, writer)
    try:
        sys.exit(asyncio.run(run_self_hosted_task(plan, step, environ, writer, reporter)))
    finally:
        reporter.close()
