"""`make notebooks`: execute the notebooks in place, and run their console commands again on a real Slurm.

python -m tests.tutorials [NAME…] [--no-slurm]
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

import click
import nbformat

from tests.processes import MARK_VARIABLE, kill_leftovers
from tests.slurm.lab import SlurmLab, missing_slurm
from tests.tutorials.notebook import NOTEBOOKS, clean, execute, lay_out, runs_on_slurm
from tests.tutorials.session import NODES, session_of, type_again


@click.command()
@click.argument("names", nargs=-1)
@click.option("--slurm/--no-slurm", default=True, help="Whether to run the blocks marked console again.")
def main(names: tuple[str, ...], slurm: bool) -> None:
    """Execute the notebooks whose file names begin with one of NAMES (default: all)."""
    chosen = [path for path in NOTEBOOKS if path.name.startswith(names or "")]
    if slurm and (reason := missing_slurm()):
        raise click.UsageError(f"{reason} Or omit these blocks: --no-slurm")
    os.environ[MARK_VARIABLE] = mark = uuid.uuid4().hex
    try:
        for path in chosen:
            remake(path, slurm)
    finally:  # processes that a failed notebook started
        kill_leftovers(mark, timeout_seconds=3)


def remake(path: Path, slurm: bool) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tf4slurm-notebook-") as temporary:
        directory = Path(temporary)
        with SlurmLab(NODES) if runs_on_slurm(path) else nullcontext() as cluster:
            notebook = execute(lay_out(directory) / path.name, directory, cluster)
        seconds = time.monotonic() - started
        if slurm and session_of(notebook):
            with SlurmLab(NODES) as lab:
                type_again(notebook, lab, directory)
        clean(notebook, directory, seconds)
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
    click.echo(f"{path.name}: executed in {seconds:.0f} s, in total {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
