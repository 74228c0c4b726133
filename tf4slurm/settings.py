"""Settings from files and from the environment: what an option is where the command line does not say it.

The later wins:

    a site's profile     NAME.toml: the user's, the one in /etc/tf4slurm/sites, else one that comes with tf4slurm
    the host's           /etc/tf4slurm/config.toml
    the user's           $XDG_CONFIG_HOME/tf4slurm/config.toml, by default in ~/.config
    the project's        tf4slurm.toml, in this directory or the nearest one above it, no higher than the root of the
                         repository or the home directory; outside of both, in this directory alone
    the environment      TF4SLURM_<OPTION>, such as TF4SLURM_PARTITION

A file is TOML: the long names of options and their values, such as partition = "short". `site` names the profile.
A list takes the place of one that is said earlier; it is not added to it. Settings become commands, so a file that
others own or may write is refused (`trust.py`), but for the profiles that come with tf4slurm. No file of settings can
set TF4SLURM_TRUST, which names the directories whose files are used all the same.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf4slurm.errors import ProfileError
from tf4slurm.system.trusted_files import check_trusted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "TF4SLURM_"
SITE = "site"
NO_SITE = "none"
"""The site that stands for: no file and no variable, only the command line."""

ETC = Path("/etc/tf4slurm")
SHIPPED = Path(__file__).parent / "sites"
PROJECT_FILE = "tf4slurm.toml"
DEFAULT_SITE = "generic"
_CONFIG_FILE = "config.toml"
_EXCLUSIVE = (frozenset(("mem", "mem-per-cpu", "mem-per-gpu")),)


@dataclass(frozen=True)
class Setting:
    """The value of one option, and the file or variable that says it."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Places:
    """Where settings are looked for. `project` is the nearest file of the project, if there is one."""

    user: Path
    project: Path | None
    etc: Path = ETC
    shipped: Path = SHIPPED

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], directory: Path) -> Places:
        """Return the places of a user who works in `directory`."""
        home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME') or '~'}/.config"
        within = project_directories(directory, Path(environ.get("HOME") or "~").expanduser().resolve())
        project = next((path / PROJECT_FILE for path in within if os.path.isfile(path / PROJECT_FILE)), None)
        return cls(Path(home).expanduser() / "tf4slurm", project)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of settings beside the site's profile; the later wins. Not all need be there."""
        return (self.etc / _CONFIG_FILE, self.user / _CONFIG_FILE, *([self.project] if self.project else []))

    @property
    def site_directories(self) -> tuple[Path, ...]:
        """Where profiles of sites are; the earlier wins."""
        return (self.user / "sites", self.etc / "sites", self.shipped)

    def sites(self) -> dict[str, Path]:
        """Return the profiles that there are, by their names."""
        found: dict[str, Path] = {}
        for directory in self.site_directories:
            for path in sorted(directory.glob("*.toml")):
                found.setdefault(path.stem, path)
        return found


def project_directories(directory: Path, home: Path) -> tuple[Path, ...]:
    """Return where a project's file is looked for: `directory` and those above, up to a repository's root or `home`.

    Where neither is above there is only `directory`: what is above that is not known to be the project's.
    """
    above = (directory, *directory.parents)
    roots = (number for number, path in enumerate(above) if path in (home, repository_of(directory)))
    return above[: next(roots, 0) + 1]


def repository_of(directory: Path) -> Path | None:
    """Return the root of the checkout of git that a directory is in; None outside of one."""
    return next((path for path in (directory, *directory.parents) if os.path.exists(path / ".git")), None)


def read_settings(
    places: Places, environ: Mapping[str, str], known: Collection[str], site: str | None = None
) -> dict[str, Setting]:
    """Return the settings from all places, by the long names of options, without dashes in front.

    Args:
        known: The options that there are; another one in a file is an error, in the environment it is another's.
        site: The profile that the command line asks for; None for the one that the settings name.

    Raises:
        ProfileError: A file cannot be read, has an unknown option, or there is no such profile.
        UntrustedFileError: A file could be another user's work.
    """
    if site == NO_SITE:
        return {}
    layers = [_read(path, known) for path in places.files if os.path.isfile(path)]
    layers.append(_from_environ(environ, known))
    named = next((layer[SITE] for layer in reversed(layers) if SITE in layer), Setting(DEFAULT_SITE, "default"))
    if site is not None:
        named = Setting(site, "command line")
    if named.value == NO_SITE:
        return {}
    profile = places.sites().get(str(named.value))
    if profile is None:
        raise ProfileError(
            f"There is no profile {named.value!r} (asked for by {named.origin})."
            f"{_guess(str(named.value), places.sites())} There are: {', '.join(sorted(places.sites()))}.",
            source=named.origin,
        )
    settings: dict[str, Setting] = {}
    for layer in (_read(profile, known, is_shipped=profile.parent == places.shipped), *layers):
        for group in _EXCLUSIVE:
            if group & set(layer):
                settings = {name: setting for name, setting in settings.items() if name not in group}
        settings.update(layer)
    return {**settings, SITE: named}


def _read(path: Path, known: Collection[str], *, is_shipped: bool = False) -> dict[str, Setting]:
    try:
        if not is_shipped:  # those are trusted as much as the code beside them
            check_trusted(path, f"To use no files of settings: --{SITE} {NO_SITE}.")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read as TOML: {error}.", source=str(path)) from error
    found: dict[str, Setting] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ProfileError(
                f"{path} sets {key!r}, which is no option.{_guess(name, known)} Expected are the long "
                'names that "tf4slurm submit --help" shows.',
                source=str(path),
            )
        if not _is_plain(value):
            raise ProfileError(
                f"{path} sets {key!r} to {value!r}: expected a text, a number, true, false, or a list of texts.",
                source=str(path),
            )
        found[name] = Setting(value, str(path))
    return found


def _from_environ(environ: Mapping[str, str], known: Collection[str]) -> dict[str, Setting]:
    variables = {name: PREFIX + name.upper().replace("-", "_") for name in known}
    return {name: Setting(environ[variable], variable) for name, variable in variables.items() if environ.get(variable)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, (str, int, float, bool))


def _guess(name: str, known: Iterable[str]) -> str:
    close: Sequence[str] = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
