"""The BatchSpec that `tf4slurm submit` makes of its arguments, for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from tf4slurm.cli.options import JobVerb, job_options
from tf4slurm.cli.submit import make_spec
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.submission.snapshot import place_snapshot

PROGRAM = "/opt/tf4slurm/bin/tf4slurm"


def job_of(*arguments: str, program: str | Path = PROGRAM) -> BatchSpec:
    """Return the job of these arguments, without any settings; `program` is the tf4slurm that the script runs."""
    jobs: list[BatchSpec] = []

    @click.command(cls=JobVerb)
    @job_options("submit", BatchSpec)
    @click.pass_context
    def command(context: click.Context, /, **options: Any) -> None:
        jobs.append(place_snapshot(make_spec(context, {**options, "site": "none"})))

    CliRunner().invoke(command, arguments, obj={}, catch_exceptions=False, standalone_mode=False)
    (spec,) = jobs
    return replace(spec, program=(str(program),))
