"""What the command line makes of the arguments of `tf4slurm submit`, as tests see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from tf4slurm.cli.options import job_options
from tf4slurm.cli.recorded import RecordedCommand, made_by
from tf4slurm.cli.submission_options import make_job, submission_options
from tf4slurm.spec import JobSpec
from tf4slurm.submission.options import Submission

PROGRAM = "/opt/tf4slurm/bin/tf4slurm"


def invoke(*arguments: str) -> tuple[Result, list[tuple[JobSpec, Submission]]]:
    """Give these arguments to a command with the options of `submit`, without any settings."""
    jobs: list[tuple[JobSpec, Submission]] = []

    @click.command(cls=RecordedCommand)
    @submission_options
    @job_options("submit")
    @click.pass_context
    def command(context: click.Context, /, **options: Any) -> None:
        jobs.append(make_job(context, made_by(context), options))

    return CliRunner().invoke(command, arguments), jobs


def job_of(*arguments: str, program: str | Path = PROGRAM) -> tuple[JobSpec, Submission]:
    """Return plan and submission of these arguments; `program` is the tf4slurm that the script names."""
    result, jobs = invoke(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    ((plan, submission),) = jobs
    return plan, replace(submission, program=(str(program),))
