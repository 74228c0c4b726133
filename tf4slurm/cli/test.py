"""`tf4slurm test`: a job of half a minute, to see that jobs run."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import click

from tf4slurm.cli.options import PLACE_OPTIONS, given, job_options
from tf4slurm.cli.reporter import PlainReporter
from tf4slurm.cli.run import check_place, launch
from tf4slurm.launch.launcher import Result
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.spec import JobSpec
from tf4slurm.system.output import LineWriter

# Not "-m": that would let a json.py in the user's directory take the place of Python's own.
_SCRIPT = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from tf4slurm.{module} import main; main({seconds})"
_LOG_BYTES = 64 * 1024


@click.command()
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@click.option("--plain", is_flag=True, help="Leave TensorFlow out: only processes, addresses and their end.")
@job_options("test", PLACE_OPTIONS)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1, max=3600),
    default=120.0,
    show_default=True,
    help="Seconds to form the cluster, and again to train.",
)
@click.pass_obj
def test(
    environ: dict[str, str],
    /,
    local: bool,
    plain: bool,
    timeout: float,
    **options: Any,
) -> None:
    """Run a chief, a ps and a worker that train with ParameterServerStrategy, and say what was proved.

    On this host; in a Slurm allocation on its hosts, with one task for each that Slurm gives. It takes some seconds
    more than TensorFlow needs to start.
    """
    allocation = None if local else SlurmAllocation.from_environ(environ)
    check_place(environ, allocation)
    is_plain = plain or importlib.util.find_spec("tensorflow") is None
    if is_plain and not plain:
        click.echo("tf4slurm | there is no TensorFlow in this Python: plain processes are used", err=True)
    module = "doctor.plain_smoke" if is_plain else "tensorflow.smoke"
    available = allocation.num_tasks if allocation else None
    spec = JobSpec(
        command=(sys.executable, "-c", _SCRIPT.format(module=module, seconds=timeout)),
        name="test",
        workers=1 if available is None else None,
        start_timeout_seconds=timeout,
        grace_period_seconds=5.0,
        max_worker_restarts=0,
        **given(options),
    ).for_tasks(available)
    result = launch(spec, environ, allocation, _Reporter)
    if result.outcome.is_success:
        click.echo(_what_was_proved(result))
    else:
        on_nodes = "" if allocation is None else " --on-nodes"
        click.echo(f"tf4slurm | the test failed. Next: tf4slurm doctor{on_nodes}", err=True)
    sys.exit(result.outcome.exit_code)


class _Reporter(PlainReporter):
    """Says how the job is getting on; what the tasks print is in their logs, and after a failure shown."""

    def __init__(self, num_tasks: int) -> None:
        notes = LineWriter(sys.stderr)
        super().__init__(num_tasks, notes, notes)

    def on_output(self, line: str) -> None:
        pass

    def on_result(self, result: Result) -> None:
        if not result.outcome.is_success:
            super().on_result(result)


def _what_was_proved(result: Result) -> str:
    chief = next(record for record in result.records if record.task.task_type == "chief")
    with result.run_directory.log(chief.task, result.attempt).open("rb") as log:
        words = log.read()[-_LOG_BYTES:].decode(errors="replace").strip().splitlines()[-1:]
    hosts = list(dict.fromkeys(record.node for record in result.records))
    where = (
        f"on {len(hosts)} hosts ({', '.join(hosts)}), each address proved from another" if hosts[1:] else "on this host"
    )
    return (
        f"It works: {len(result.records)} tasks {where}; {words[0] if words else 'the chief said nothing'}; all "
        f"processes ended. {result.seconds:.1f} s, logs in {result.run_directory.path}"
    )
