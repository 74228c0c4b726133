"""`tf4slurm report`: the life of a job as one file to look at."""

from __future__ import annotations

from pathlib import Path

import click

from tf4slurm.jobs.registry import find_run
from tf4slurm.reports.report import make_file
from tf4slurm.reports.summary import read_summary


@click.command()
@click.argument("job", metavar="[ID]", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help='Where to write it: "-" for standard output; a name that ends in .svg gets the drawings alone. '
    "[default: report.html in the run directory]",
)
@click.option("--open", "is_opened", is_flag=True, help="Show it in this machine's browser, too.")
@click.pass_obj
def report(environ: dict[str, str], /, job: str | None, output: Path | None, is_opened: bool) -> None:
    """Write the report of a job, running or ended, as one HTML file that needs no network; print its path.

    ID is Slurm's job id, the name of a run or the path of its directory; without one, the latest job. The file can be
    sent to somebody as it is.
    """
    run = find_run(job, environ)
    content = make_file(read_summary(run), output or "report.html")
    if output == Path("-"):
        click.echo(content, nl=False)
        return
    path = run.write_report(content, output.absolute() if output is not None else None)
    click.echo(path)
    if is_opened:
        click.launch(path.as_uri())
