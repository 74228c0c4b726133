"""The verbs that check whether jobs can run here: doctor and test."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import signal
import sys
from dataclasses import asdict
from typing import Any

import click

from tf4slurm import __version__
from tf4slurm.cli.options import HOST_OPTIONS, given, isolated_option, job_options, verb_option
from tf4slurm.cli.shared import Verb, paint
from tf4slurm.doctor.finding import Level, exit_code_of_findings, format_findings, format_report, summarize
from tf4slurm.doctor.host import check_host
from tf4slurm.doctor.nodes import check_nodes, run_node
from tf4slurm.doctor.notebook import check_notebook
from tf4slurm.doctor.pythons import check_versions
from tf4slurm.doctor.scheduler import check_slurm
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.settings import fill_in, read_settings

_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(
    cls=Verb, examples=("tf4slurm doctor", "salloc -N 2 tf4slurm doctor --on-nodes", "tf4slurm doctor --site lumi")
)
@click.option("--on-nodes", is_flag=True, help="Check each node of the Slurm allocation in which this runs.")
@click.option(
    "--notebook", is_flag=True, help="Check that a node and this host, where a notebook runs, reach each other."
)
@job_options("doctor", names=HOST_OPTIONS)
@click.option("--site", help="Check this profile too: its partition, time limit, GPUs and network.")
@click.option("--module", "modules", multiple=True, help="Name the TensorFlow of this module, too. Repeatable.")
@click.option("--container", metavar="IMAGE", help="Name the TensorFlow of this image, too.")
@click.option("--quick", is_flag=True, help="Skip the checks that start TensorFlow and pip, which take seconds.")
@click.option("--report", "as_report", is_flag=True, help="Write plain text to paste into an issue.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--as-node", is_flag=True, hidden=True, help="Run the part of one node (srun).")
@click.pass_obj
def doctor(
    environ: dict[str, str],
    /,
    on_nodes: bool,
    notebook: bool,
    site: str | None,
    modules: tuple[str, ...],
    container: str | None,
    quick: bool,
    as_report: bool,
    as_json: bool,
    as_node: bool,
    **options: Any,
) -> None:
    """Check Python, TensorFlow, Slurm, the run directory and the network, with advice for each problem.

    The exit code is 3 if a check fails. This command changes nothing: it writes small test files beside the run
    directories, and removes them.
    """
    if as_node:
        run_node(environ)
        return
    if on_nodes and notebook:
        raise click.UsageError("--on-nodes checks this allocation, --notebook starts a task in another. Give one.")
    settings = {} if site is None else read_settings(environ, site)
    hosts = {name: setting for name, setting in settings.items() if name in HOST_OPTIONS}
    spec = JobSpec(**fill_in(JobSpec, given(options), hosts))
    findings = check_slurm(environ, settings)
    if on_nodes or notebook:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # exit normally, to end the step too
    if on_nodes:
        findings += asyncio.run(check_nodes(environ, spec, is_quick=quick, on_progress=_show_progress))
    elif notebook:
        scheduling = fill_in(BatchSpec, {}, settings or read_settings(environ, None))
        checks = check_notebook(environ, spec, scheduling, is_quick=quick, on_progress=_show_progress)
        findings += asyncio.run(checks)
    else:
        if not quick:
            _show_progress("starting TensorFlow once")
        findings += check_host(environ, spec, is_quick=quick, probe_name=secrets.token_hex(6))[0]
        findings += check_versions(environ, modules, container)
    if as_json:
        shown = {"tf4slurm": __version__, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps({**shown, "exit_code": exit_code_of_findings(findings)}, indent=2))
    elif as_report:
        click.echo(format_report(findings))
    else:
        click.echo("\n".join(format_findings(findings, lambda level, text: paint(text, _COLOURS[level]))))
        click.echo(summarize(findings, "Next: tf4slurm test"), err=True)
    sys.exit(exit_code_of_findings(findings))


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"tf4slurm | {text}", err=True)


@click.command(cls=Verb, examples=("tf4slurm test", "salloc -N 2 -n 4 tf4slurm test --interface ib0"))
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@isolated_option
@click.option("--plain", is_flag=True, help="Test processes and addresses without TensorFlow.")
@job_options("test", names=HOST_OPTIONS)
@verb_option(
    "timeout_seconds",
    float,
    "Seconds for each part: form the cluster, import TensorFlow, connect, train.",
    120.0,
    minimum=1,
    maximum=3600,
)
@click.pass_obj
def test(
    environ: dict[str, str], /, local: bool, isolated: bool, plain: bool, timeout_seconds: float, **options: Any
) -> None:
    """Run a chief, a ps and a worker that train with ParameterServerStrategy, and print what worked.

    The tasks run on this host. In a Slurm allocation they run on its hosts, with as many workers as it has tasks for.
    The test takes some seconds more than TensorFlow needs to start.
    """
    from tf4slurm.cli.terminal_output import PlainOutput
    from tf4slurm.doctor.smoke_test import describe_success, smoke_test_spec
    from tf4slurm.launch.start import find_allocation, run_job
    from tf4slurm.system.output import LineWriter

    allocation = find_allocation(environ, local=local)
    is_plain = plain or importlib.util.find_spec("tensorflow") is None
    if is_plain and not plain:
        click.echo("tf4slurm | TensorFlow is not installed in this Python: the test runs without it", err=True)
    spec = smoke_test_spec(given(options), allocation, is_plain=is_plain, timeout_seconds=timeout_seconds)
    result = run_job(
        *(spec, environ, allocation, lambda num: PlainOutput(num, None, LineWriter(sys.stderr))), isolated=isolated
    )
    if result.file.exit_code == 0:
        click.echo(describe_success(result))
    else:
        on_nodes = "" if allocation is None else " --on-nodes"
        click.echo(f"tf4slurm | the test failed. Next: tf4slurm doctor{on_nodes}", err=True)
    sys.exit(result.file.exit_code)
