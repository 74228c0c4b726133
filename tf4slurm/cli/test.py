"""`tf4slurm test`: run a short test job."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import click

from tf4slurm.cli.options import PLACE_OPTIONS, given, job_options
from tf4slurm.cli.reporter import PlainReporter
from tf4slurm.doctor.smoke_test import describe_success, smoke_test_spec
from tf4slurm.launch.result import Result
from tf4slurm.launch.start import find_allocation, run_job
from tf4slurm.system.program import LineWriter


@click.command()
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@click.option("--plain", is_flag=True, help="Test processes and addresses without TensorFlow.")
@job_options("test", names=PLACE_OPTIONS)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1, max=3600),
    default=120.0,
    show_default=True,
    help="Seconds to form the cluster, and again to train.",
)
@click.pass_obj
def test(environ: dict[str, str], /, local: bool, plain: bool, timeout: float, **options: Any) -> None:
    """Run a chief, a ps and a worker that train with ParameterServerStrategy, and report what worked.

    They run on this host; in a Slurm allocation on its hosts, as many tasks as Slurm gives. The test takes some seconds
    more than TensorFlow needs to start.
    """
    allocation = find_allocation(environ, local=local)
    is_plain = plain or importlib.util.find_spec("tensorflow") is None
    if is_plain and not plain:
        click.echo("tf4slurm | TensorFlow is not installed in this Python: the test runs without it", err=True)
    spec = smoke_test_spec(given(options), allocation, is_plain=is_plain, timeout_seconds=timeout)
    result = run_job(spec, environ, allocation, _Reporter)
    if result.outcome.is_success:
        click.echo(describe_success(result))
    else:
        on_nodes = "" if allocation is None else " --on-nodes"
        click.echo(f"tf4slurm | the test failed. Next: tf4slurm doctor{on_nodes}", err=True)
    sys.exit(result.outcome.exit_code)


class _Reporter(PlainReporter):
    """Shows the job's progress without the output of its tasks, and the result only of a failed job."""

    def __init__(self, num_tasks: int) -> None:
        writer = LineWriter(sys.stderr)
        super().__init__(num_tasks, writer, writer)

    def on_output(self, line: str) -> None:
        pass

    def on_result(self, result: Result) -> None:
        if not result.outcome.is_success:
            super().on_result(result)
