"""`tf4slurm doctor`: what would keep a job from running here, and what to do about it."""

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
from tf4slurm.doctor.finding import Finding, Level, exit_code_of
from tf4slurm.doctor.here import Wishes, check_here
from tf4slurm.doctor.node import be_node
from tf4slurm.doctor.nodes import check_nodes
from tf4slurm.doctor.scheduler import check_slurm
from tf4slurm.doctor.text import conclude, describe, report
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.slurm.allocation import SlurmAllocation
from tf4slurm.spec import JobSpec

_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--on-nodes", is_flag=True, help="Look at each node of the Slurm allocation this runs in.")
@job_options("doctor", PLACE_OPTIONS)
@click.option("--quick", is_flag=True, help="Do not start TensorFlow or pip: seconds less, and less is known.")
@click.option("--report", "as_report", is_flag=True, help="Write plain text to paste into an issue.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--as-node", is_flag=True, hidden=True, help="Be one node's part (srun).")
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
    """Look at Python, TensorFlow, Slurm, the run directory and the network, and say what to do where it is needed.

    Exit code 3 if something fails. Nothing is changed: two small files are written into the run directory's place, and
    taken away.
    """
    if as_node:
        be_node(environ)
        return
    spec = JobSpec(**given(options))
    wishes = Wishes(spec.runs_directory, spec.interface, spec.ports, quick)
    findings = check_slurm(environ)
    if on_nodes:
        findings += _check_nodes(environ, wishes)
    else:
        _note("starting TensorFlow once, to see whether it works" if not quick else "")
        findings += check_here(environ, wishes, secrets.token_hex(6))[0]
    if as_json:
        shown = {"tf4slurm": __version__, "findings": [finding.to_json() for finding in findings]}
        click.echo(json.dumps({**shown, "exit_code": exit_code_of(findings)}, indent=2))
    elif as_report:
        click.echo(report(findings))
    else:
        is_plain = bool(environ.get("NO_COLOR")) or not sys.stdout.isatty()
        for line in describe(findings, lambda level, text: text if is_plain else click.style(text, _COLOURS[level])):
            click.echo(line)
        click.echo(conclude(findings, "Next: tf4slurm test"), err=True)
    sys.exit(exit_code_of(findings))


def _check_nodes(environ: dict[str, str], wishes: Wishes) -> list[Finding]:
    allocation = SlurmAllocation.from_environ(environ)
    if allocation is None or allocation.num_nodes is None:
        raise SlurmEnvironmentError(
            '"tf4slurm doctor --on-nodes" is not in a Slurm allocation. Give it one: '
            "salloc -N4 tf4slurm doctor --on-nodes; or put it into a batch script.",
            variable="SLURM_JOB_ID",
        )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the step is ended on the way out
    findings = asyncio.run(check_nodes(allocation.num_nodes, environ, wishes, _note))
    if allocation.components:
        text = f"only the nodes of the first of {len(allocation.components)} components of this job were looked at"
        findings.append(Finding("warn", "nodes", text, "Look at the others in an allocation of their own."))
    return findings


def _note(text: str) -> None:
    if text and sys.stderr.isatty():
        click.echo(f"tf4slurm | {text}", err=True)
