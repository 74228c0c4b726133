"""`tf4slurm config`: the settings, and where they come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from tf4slurm.errors import ProfileError
from tf4slurm.settings import PROJECT_FILE, Places, settings_here

_FIRST_FILE = """\
# Settings of tf4slurm: the long names of options, as in "tf4slurm submit --help", without the dashes.
# The command line wins, then TF4SLURM_<OPTION>, a project's tf4slurm.toml, this file, the profile of the site.

# site = "generic"              # a profile: see "tf4slurm config profiles"
# partition = "short"
# account = "me"
# time = "01:00:00"
# module = ["python/3.11", "tensorflow/2.16"]
# interface = "infiniband"
# runs-directory = "/scratch/me/runs"
"""


@click.group()
def config() -> None:
    """Show what options are where the command line does not say it: files, variables and profiles of sites."""


@config.command()
@click.option("--origin", is_flag=True, help="Show which file or variable says it.")
@click.option("--site", help="Profile of the cluster. [default: the one that the settings name]")
@click.pass_obj
def show(environ: dict[str, str], /, origin: bool, site: str | None) -> None:
    """Write the settings that count here, as a file of settings has them."""
    for name, setting in sorted(settings_here(environ, site).items()):
        click.echo(f"{name} = {_toml(setting.value)}" + (f"  # {setting.origin}" if origin else ""))


@config.command()
@click.pass_obj
def profiles(environ: dict[str, str], /) -> None:
    """Write the profiles of sites that there are: name, file, and the first line of the file."""
    for name, path in sorted(Places.here(environ).sites().items()):
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        click.echo(f"{name}  {path}  {first}")


@config.command()
@click.pass_obj
def path(environ: dict[str, str], /) -> None:
    """Write the files that are read, where they are there; of two, what the later says wins."""
    places = Places.here(environ)
    for directory in reversed(places.site_directories):
        click.echo(f"{directory}/NAME.toml")
    for file in (*places.files, *([] if places.project else [Path.cwd() / PROJECT_FILE])):
        click.echo(f"{file}{'' if file.is_file() else '  (is not there)'}")


@config.command()
@click.option("--project", is_flag=True, help=f"Make {PROJECT_FILE} here, for what you start in this directory.")
@click.pass_obj
def init(environ: dict[str, str], /, project: bool) -> None:
    """Make a file of settings to fill in; one that is there is left as it is."""
    file = Path.cwd() / PROJECT_FILE if project else Places.here(environ).user / "config.toml"
    try:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # 0644 at most, whatever the umask: a file that a group may write would be refused.
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as stream:
            stream.write(_FIRST_FILE)
    except FileExistsError:
        raise ProfileError(f"{file} is there already, and is left as it is.", source=str(file)) from None
    except OSError as error:
        raise ProfileError(f"{file} cannot be made: {error.strerror}.", source=str(file)) from error
    click.echo(file)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # the same, for texts, numbers, truths and lists of texts
