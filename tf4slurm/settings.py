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

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf4slurm.batch_spec import BatchSpec
from tf4slurm.errors import OptionError, ProfileError
from tf4slurm.options import Option, options_by_key, options_of, unknown
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

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Places:
        """Return the places of a user who works in the current directory; a directory that was removed has none."""
        try:
            return cls.from_environ(environ, Path.cwd())
        except OSError:
            return cls.from_environ(environ, Path("/"))

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


def settings_here(environ: Mapping[str, str], site: str | None = None) -> dict[str, Setting]:
    """Return the settings for a user who works in the current directory; see `read_settings`."""
    return read_settings(Places.here(environ), environ, site)


def read_settings(places: Places, environ: Mapping[str, str], site: str | None = None) -> dict[str, Setting]:
    """Return the settings from all places, by the long names of options, without dashes in front.

    Args:
        site: The profile that the command line names; None for the one that the settings name.

    Raises:
        ProfileError: A file cannot be read, has an unknown option or an invalid value, or the profile does not exist.
        UntrustedFileError: Another user could have written the file.
    """
    if site == NO_SITE:
        return {}
    layers = [_read(path) for path in places.files if os.path.isfile(path)]
    layers.append(_from_environ(environ))
    named = next((layer[SITE] for layer in reversed(layers) if SITE in layer), Setting(DEFAULT_SITE, "default"))
    if site is not None:
        named = Setting(site, "command line")
    if named.value == NO_SITE:
        return {}
    profile = places.sites().get(str(named.value))
    if profile is None:
        names = sorted(places.sites())
        text = unknown(str(named.value), names, f"a profile ({named.origin} names it)")
        raise ProfileError(f"{text} The profiles are {', '.join(names)}.", source=named.origin)
    settings: dict[str, Setting] = {}
    for layer in (_read(profile, is_shipped=profile.parent == places.shipped), *layers):
        settings = _override(settings, layer)
    return {**settings, SITE: named}


def fill_in(cls: type, given: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return values for the fields of a dataclass of options: those given, else those of the settings."""
    options, by_key = options_of(cls), options_by_key(cls)
    defaults = {key: setting.value for key, setting in settings.items() if key in by_key}
    values = _override(defaults, {options[name].key: value for name, value in given.items() if name in options})
    others = {name: value for name, value in given.items() if name not in options}
    return {**{by_key[key].name: value for key, value in values.items()}, **others}


def _override(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, without what the later excludes of the earlier: --mem replaces a profile's mem-per-cpu."""
    options = options_of(BatchSpec)
    by_key = options_by_key(BatchSpec)
    excluded = {options[name].key for key in later if key in by_key for name in by_key[key].excludes}
    return {**{key: value for key, value in earlier.items() if key not in excluded}, **later}


def _read(path: Path, *, is_shipped: bool = False) -> dict[str, Setting]:
    try:
        if not is_shipped:  # those are trusted as much as the code beside them
            check_trusted(path, f"To use no files of settings: --{SITE} {NO_SITE}.")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read as TOML: {error}.", source=str(path)) from error
    known, origin = options_by_key(BatchSpec), str(path)
    found: dict[str, Setting] = {}
    for name, value in content.items():
        key = name.replace("_", "-")
        if key == SITE:
            found[SITE] = Setting(value, origin)
        elif key not in known:
            text = unknown(name, (*known, SITE), "an option")
            raise ProfileError(f'{path}: {text} "tf4slurm submit --help" shows the options.', source=origin)
        else:
            found[known[key].key] = _checked(known[key], Setting(value, origin))
    return found


def _from_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    found = {}
    for key, each in options_by_key(BatchSpec).items():
        variable = _variable(key)
        if environ.get(variable):
            found[each.key] = _checked(each, Setting(environ[variable], variable))
    if environ.get(_variable(SITE)):
        found[SITE] = Setting(environ[_variable(SITE)], _variable(SITE))
    return found


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace("-", "_")


def _checked(each: Option, setting: Setting) -> Setting:
    try:
        each.convert(setting.value)
    except OptionError as error:
        raise ProfileError(f"{setting.origin} sets {error}", source=setting.origin) from error
    return setting
