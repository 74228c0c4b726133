"""Settings: defaults for options that were not given, from files and environment variables.

Later sources override earlier ones:

    profile of a site    NAME.toml in sites/ of the user's directory or /etc/tf4slurm, or one of tf4slurm's own
    host                 /etc/tf4slurm/config.toml
    user                 $XDG_CONFIG_HOME/tf4slurm/config.toml, by default in ~/.config
    project              tf4slurm.toml in the current directory or its nearest parent, up to the root of the
                         repository or the home directory; outside of both, in the current directory only
    environment          TF4SLURM_<OPTION>, such as TF4SLURM_PARTITION

A file is TOML: long names of options and their values, such as partition = "short". `site` names the profile. A list
replaces an earlier list. Settings become commands, so files that other users own or can write are refused
(`trusted_files.py`), except for tf4slurm's own profiles.
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
from tf4slurm.spec import JobSpec, check_exclusive
from tf4slurm.system.trusted_files import check_trusted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "TF4SLURM_"
SITE = "site"
NO_SITE = "none"
"""The site that disables all settings."""

ETC = Path("/etc/tf4slurm")
SHIPPED = Path(__file__).parent / "sites"
PROJECT_FILE = "tf4slurm.toml"
DEFAULT_SITE = "generic"
_BATCH_VERBS = ("submit", "script")
_JOB_VERBS = ("run", "task", *_BATCH_VERBS)
_CONFIG_FILE = "config.toml"
_NEW_FILE = """\
# Settings of tf4slurm: long names of options, as in "tf4slurm submit --help", without the dashes.
# The command line overrides TF4SLURM_<OPTION>, then a project's tf4slurm.toml, this file, the profile of the site.

# site = "generic"              # a profile: see "tf4slurm config profiles"
# partition = "short"
# account = "me"
# time = "01:00:00"
# module = ["python/3.11", "tensorflow/2.16"]
# interface = "infiniband"
# runs-directory = "/scratch/me/runs"
"""


@dataclass(frozen=True)
class Setting:
    """The value of one option, and the file or variable that sets it."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Places:
    """The directories and files of settings; `project` is None without a project file."""

    user: Path
    project: Path | None
    etc: Path = ETC
    shipped: Path = SHIPPED

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], directory: Path) -> Places:
        """Return the places of settings for the working directory `directory`."""
        home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME') or '~'}/.config"
        within = project_directories(directory, Path(environ.get("HOME") or "~").expanduser().resolve())
        project = next((path / PROJECT_FILE for path in within if os.path.isfile(path / PROJECT_FILE)), None)
        return cls(Path(home).expanduser() / "tf4slurm", project)

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Places:
        """Return the places of settings for the current directory, or for / if it was removed."""
        try:
            return cls.from_environ(environ, Path.cwd())
        except OSError:
            return cls.from_environ(environ, Path("/"))

    @property
    def files(self) -> tuple[Path, ...]:
        """The settings files without the profile, which need not exist; later files override earlier files."""
        return (self.etc / _CONFIG_FILE, self.user / _CONFIG_FILE, *([self.project] if self.project else []))

    @property
    def possible_files(self) -> tuple[Path, ...]:
        """`files`, and the project file that could be created in the current directory."""
        return self.files if self.project else (*self.files, Path.cwd() / PROJECT_FILE)

    @property
    def site_directories(self) -> tuple[Path, ...]:
        """The directories of profiles; earlier directories override later ones."""
        return (self.user / "sites", self.etc / "sites", self.shipped)

    def sites(self) -> dict[str, Path]:
        """Return the files of the profiles by profile name."""
        found: dict[str, Path] = {}
        for directory in self.site_directories:
            for path in sorted(directory.glob("*.toml")):
                found.setdefault(path.stem, path)
        return found


def project_directories(directory: Path, home: Path) -> tuple[Path, ...]:
    """Return the directories of a project: `directory` and its parents, up to a repository's root or `home`.

    Outside of both, return `directory` alone, because its parents may not belong to the project.
    """
    above = (directory, *directory.parents)
    roots = (number for number, path in enumerate(above) if path in (home, repository_of(directory)))
    return above[: next(roots, 0) + 1]


def repository_of(directory: Path) -> Path | None:
    """Return the root of the git checkout that contains a directory; None outside of a checkout."""
    return next((path for path in (directory, *directory.parents) if os.path.exists(path / ".git")), None)


def create_file(places: Places, *, project: bool) -> Path:
    """Create the user's settings file, or a project file in the current directory; return its path.

    Raises:
        ProfileError: The file exists, or cannot be written.
    """
    path = Path.cwd() / PROJECT_FILE if project else places.user / _CONFIG_FILE
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # 0644 at most, whatever the umask, because a group-writable file is refused.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            file.write(_NEW_FILE)
    except FileExistsError:
        raise ProfileError(f"{path} exists already, and is not changed.", source=str(path)) from None
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror}.", source=str(path)) from error
    return path


def describe_options() -> str:
    """Return a Markdown table of all options of a job, with their variables and verbs."""
    rows = ["| option | variable | verbs | description |", "|---|---|---|---|"]
    for name, each in options_of(BatchSpec).items():
        verbs = each.verbs or (_JOB_VERBS if name in options_of(JobSpec) else _BATCH_VERBS)
        names = (*each.flags, f"--{each.key}", *([f"--no-{each.key}"] if each.is_switch else []))
        flags = " ".join(f"`{name}`" for name in names)
        rows.append(f"| {flags} | `{_variable(each.key)}` | {', '.join(verbs)} | {each.help} |")
    return "\n".join(rows).replace("<", "&lt;")


def settings_here(environ: Mapping[str, str], site: str | None = None) -> dict[str, Setting]:
    """Return the settings for the current directory; see `read_settings`."""
    return read_settings(Places.here(environ), environ, site)


def read_settings(places: Places, environ: Mapping[str, str], site: str | None = None) -> dict[str, Setting]:
    """Return the settings from all places, by the long names of options without leading dashes.

    Args:
        site: The profile that the command line names; None for the profile that the settings name.

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
    """Return values for the fields of a dataclass of options: the given values, else the settings.

    Raises:
        OptionError: A value is invalid, or two options exclude each other, even if one has its default value.
    """
    options, by_key = options_of(cls), options_by_key(cls)
    defaults = {key: setting.value for key, setting in settings.items() if key in by_key}
    values = _override(defaults, {options[name].key: value for name, value in given.items() if name in options})
    others = {name: value for name, value in given.items() if name not in options}
    fields = {by_key[key].name: by_key[key].convert(value) for key, value in values.items()}
    check_exclusive(cls, fields)
    return {**fields, **others}


def _override(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options; later options remove earlier ones that they exclude: --mem removes a profile's mem-per-cpu."""
    options, by_key = options_of(BatchSpec), options_by_key(BatchSpec)
    excluded: set[str] = set()
    for key, value in later.items():
        each = by_key.get(key)
        if each is not None and each.convert(getattr(value, "value", value)) != each.default:
            excluded.update(options[name].key for name in each.excludes)
    return {**{key: value for key, value in earlier.items() if key not in excluded}, **later}


def _read(path: Path, *, is_shipped: bool = False) -> dict[str, Setting]:
    try:
        if not is_shipped:  # these profiles are part of tf4slurm
            check_trusted(path, f"To run without settings: --{SITE} {NO_SITE}.")
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
