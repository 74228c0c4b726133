"""The verbs that show how tf4slurm sees this process and its settings: env, config and nodes."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click

from tf4slurm.cli.options import given, job_options
from tf4slurm.cli.shared import Verb, VerbGroup
from tf4slurm.slurm.nodelist import expand_nodelist, fold_nodelist
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.options import key_of
from tf4slurm.spec.settings import SettingsPaths, create_file, read_settings
from tf4slurm.system.variables import client_environ


@click.command(
    cls=Verb, examples=("tf4slurm env", "srun -n 4 tf4slurm env --tasks chief,ps,worker,worker", "tf4slurm env --json")
)
@click.option("--interface", help="The network whose address a task would use.")
@click.option(
    "--tasks",
    help="A task type for each rank, such as ps,worker,worker: show the cluster spec without communication.",
)
@job_options("env", names=("ports",))
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_obj
def env(environ: dict[str, str], /, interface: str | None, tasks: str | None, as_json: bool, **options: Any) -> None:
    """Show the Slurm step of this process, its layout, the address it would use, TF_CONFIG, and warnings."""
    from tf4slurm.doctor.environment import describe_environment, format_environment

    task_types = None if tasks is None else tasks.split(",")
    description = describe_environment(environ, interface, task_types, JobSpec(**given(options)).ports)
    click.echo(json.dumps(description, indent=2) if as_json else format_environment(description))


@click.command(cls=Verb, examples=('eval "$(tf4slurm client)"; srun -n 4 python3.7 train.py',))
@click.pass_obj
def client(environ: dict[str, str], /) -> None:
    """Print shell commands that let scripts under plain srun use tf4slurm with another Python, from 3.6 on."""
    for name, value in client_environ(environ).items():
        click.echo(f"export {name}={shlex.quote(value)}")


@click.group(
    cls=VerbGroup,
    examples=("tf4slurm config show --origin", "tf4slurm config init", "tf4slurm config show --site generic"),
)
def config() -> None:
    """Show the settings: default values of options that settings files, variables and site profiles set."""


@config.command(examples=("tf4slurm config show --origin",))
@click.option("--origin", is_flag=True, help="Show the file or variable that sets each option.")
@click.option("--site", help="Profile of the cluster. [default: the one that the settings name]")
@click.pass_obj
def show(environ: dict[str, str], /, origin: bool, site: str | None) -> None:
    """Print the settings that apply in this directory, in the format of a settings file."""
    for name, setting in sorted(read_settings(environ, site).items()):
        value = json.dumps(setting.value, ensure_ascii=False)  # JSON is valid TOML for these types
        click.echo(f"{key_of(name)} = {value}" + (f"  # {setting.origin}" if origin else ""))


@config.command(examples=("tf4slurm config profiles",))
@click.pass_obj
def profiles(environ: dict[str, str], /) -> None:
    """Print the site profiles: name, file, and the first line of the file."""
    for name, path in sorted(SettingsPaths.from_environ(environ).sites().items()):
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        click.echo(f"{name}  {path}  {first}")


@config.command(examples=("tf4slurm config path",))
@click.pass_obj
def path(environ: dict[str, str], /) -> None:
    """Print the paths of the settings files. Later files override earlier ones."""
    paths = SettingsPaths.from_environ(environ)
    for directory in reversed(paths.site_directories):
        click.echo(f"{directory}/NAME.toml")
    for file in paths.files:
        click.echo(f"{file}{'' if file.is_file() else '  (does not exist)'}")


@config.command(examples=("tf4slurm config init", "tf4slurm config init --project"))
@click.option("--project", is_flag=True, help="Create tf4slurm.toml in this directory, for the jobs started in it.")
@click.pass_obj
def init(environ: dict[str, str], /, project: bool) -> None:
    """Create a settings file to fill in. An existing file is not changed."""
    click.echo(create_file(SettingsPaths.from_environ(environ), project=project))


@click.group(
    cls=VerbGroup, examples=('tf4slurm nodes expand "n[1-3]"', "tf4slurm nodes fold n1 n2 n3", "tf4slurm nodes count")
)
def nodes() -> None:
    """Expand, fold or count nodelists such as "n[001-003],gpu7": arguments, or lines of standard input."""


def _one_nodelist(_context: click.Context, _parameter: click.Parameter, nodelists: tuple[str, ...]) -> str:
    if nodelists:
        return ",".join(nodelists)
    if sys.stdin.isatty():
        raise click.UsageError('No nodelist is given. Give it as an argument, such as "n[1-3]", or on standard input.')
    return sys.stdin.read()


_nodelist = click.argument("nodelist", metavar="[NODELISTS]...", nargs=-1, callback=_one_nodelist)


@nodes.command(examples=('tf4slurm nodes expand "n[1-3],gpu7"', "squeue --me -h -o %N | tf4slurm nodes expand"))
@_nodelist
def expand(nodelist: str) -> None:
    """Write one node name per line, in Slurm's order, with duplicates."""
    click.echo("\n".join(expand_nodelist(nodelist)))


@nodes.command(examples=("tf4slurm nodes fold n9 n10 gpu7",))
@_nodelist
def fold(nodelist: str) -> None:
    """Fold node names into one nodelist, such as n[9-10],gpu7."""
    click.echo(fold_nodelist(expand_nodelist(nodelist)))


@nodes.command(examples=('tf4slurm nodes count "n[1-3],gpu7"',))
@_nodelist
def count(nodelist: str) -> None:
    """Write the number of nodes, including duplicates."""
    click.echo(len(expand_nodelist(nodelist)))
