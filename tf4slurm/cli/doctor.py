"""`tf4slurm doctor`: find what would prevent a job from running here."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from typing import Any

import click

from tf4slurm import __version__
from tf4slurm.cli.options import PLACE_OPTIONS, given, job_options
from tf4slurm.doctor.finding import Level, exit_code_of, format_findings, format_report, summarize
from tf4slurm.doctor.host import check_host
from tf4slurm.doctor.node import run_node
from tf4slurm.doctor.nodes import check_nodes
from tf4slurm.doctor.scheduler import check_slurm
from tf4slurm.spec import JobSpec

_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--on-nodes", is_flag=True, help="Check each node of the Slurm allocation in which this runs.")
@job_options("doctor", names=PLACE_OPTIONS)
@click.option("--quick", is_flag=True, help="Skip the checks that start TensorFlow and pip, which take seconds.")
@click.option("--report", "as_report", is_flag=True, help="Write plain text to paste into an issue.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--as-node", is_flag=True, hidden=True, help="Run the part of one node (srun).")
@click.pass_obj
def doctor(
    environ: dict[str, str],
    /,
    on_nodes: bool,
    quick: bool,
    as_report: bool,
    as_json: bool,
    as_node: bool,
    **options: Any,
) -> None:
    """Check Python, TensorFlow, Slurm, the run directory and the network, with advice for each problem.

    The exit code is 3 if a check fails. This command changes nothing: it writes two small files beside the run
    directories, and removes them.
    """
    if as_node:
        run_node(environ)
        return
    spec = JobSpec(**given(options))
    findings = check_slurm(environ)
    if on_nodes:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # exit normally, to end the step too
        findings += asyncio.run(check_nodes(environ, spec, is_quick=quick, on_progress=_show_progress))
    else:
        if not quick:
            _show_progress("starting TensorFlow once")
        findings += check_host(environ, spec, is_quick=quick, probe_name=secrets.token_hex(6))[0]
    if as_json:
        shown = {"tf4slurm": __version__, "findings": [finding.to_json() for finding in findings]}
        click.echo(json.dumps({**shown, "exit_code": exit_code_of(findings)}, indent=2))
    elif as_report:
        click.echo(format_report(findings))
    else:
        is_plain = bool(environ.get("NO_COLOR")) or not sys.stdout.isatty()
        lines = format_findings(findings, lambda level, text: text if is_plain else click.style(text, _COLOURS[level]))
        click.echo("\n".join(lines))
        click.echo(summarize(findings, "Next: tf4slurm test"), err=True)
    sys.exit(exit_code_of(findings))


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"tf4slurm | {text}", err=True)
