"""`tf4slurm config`: print the settings and their files, or create a file."""

from __future__ import annotations

import json

import click

from tf4slurm.settings import Places, create_file, describe_options, settings_here


@click.group()
def config() -> None:
    """Show the settings: defaults of options, from files, variables and profiles of sites."""


@config.command()
@click.option("--origin", is_flag=True, help="Show the file or variable that sets each option.")
@click.option("--site", help="Profile of the cluster. [default: the one that the settings name]")
@click.pass_obj
def show(environ: dict[str, str], /, origin: bool, site: str | None) -> None:
    """Print the settings that apply in this directory, in the format of a file of settings."""
    for name, setting in sorted(settings_here(environ, site).items()):
        value = json.dumps(setting.value, ensure_ascii=False)  # JSON is valid TOML for these types
        click.echo(f"{name} = {value}" + (f"  # {setting.origin}" if origin else ""))


@config.command()
def options() -> None:
    """Print a Markdown table of all options of a job that settings can give."""
    click.echo(describe_options())


@config.command()
@click.pass_obj
def profiles(environ: dict[str, str], /) -> None:
    """Print the profiles of sites: name, file, and the first line of the file."""
    for name, path in sorted(Places.here(environ).sites().items()):
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        click.echo(f"{name}  {path}  {first}")


@config.command()
@click.pass_obj
def path(environ: dict[str, str], /) -> None:
    """Print the files of settings; later ones override earlier ones."""
    places = Places.here(environ)
    for directory in reversed(places.site_directories):
        click.echo(f"{directory}/NAME.toml")
    for file in places.possible_files:
        click.echo(f"{file}{'' if file.is_file() else '  (does not exist)'}")


@config.command()
@click.option("--project", is_flag=True, help="Create tf4slurm.toml in this directory, for the jobs started in it.")
@click.pass_obj
def init(environ: dict[str, str], /, project: bool) -> None:
    """Create a file of settings to fill in; an existing one is not changed."""
    click.echo(create_file(Places.here(environ), project=project))
