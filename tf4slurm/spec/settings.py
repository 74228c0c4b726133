"""Read settings: defaults for options that were not given, from files and environment variables.

A TOML file has long names of options and their values, such as partition = "short". The key `site` names a profile, a
file with the settings of a site.
Settings become parts of commands. So files that other users own or can write are refused (`trusted_files.py`), except
for tf4slurm's own profiles.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tf4slurm.errors import OptionError, SettingsError
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import check_exclusive
from tf4slurm.spec.options import Option, options_by_key, options_of, unknown
from tf4slurm.system.directories import home_directory, make_directories, user_directory
from tf4slurm.system.trusted_files import read_trusted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SITE = "site"
NO_SITE = "none"
"""The value of --site, or of the setting `site`, with which no settings are used."""

ETC = Path("/etc/tf4slurm")
SHIPPED = Path(__file__).parent / "sites"
PROJECT_FILE = "tf4slurm.toml"
_CONFIG_FILE = "config.toml"
_NEW_FILE = """\
# Settings of tf4slurm: long names of options, as in "tf4slurm submit --help", without the dashes.
# The command line overrides TF4SLURM_<OPTION>, then a project's tf4slurm.toml, the user's config.toml, the profile.

# site = "generic"              # a profile: see "tf4slurm config profiles"
# partition = "short"
# account = "me"
# time = "01:00:00"
# module = ["python/3.11", "tensorflow/2.16"]
# interface = "infiniband"
# runs-directory = "/scratch/me/runs"
"""


class Setting(NamedTuple):
    """The value of one option, and the file or variable that sets it."""

    value: Any
    origin: str


@dataclass(frozen=True)
class SettingsPaths:
    """The places from which settings are read. Later ones override earlier ones.

    profile of a site    NAME.toml in sites/ of the user's directory or /etc/tf4slurm, or one of tf4slurm's own
    host                 /etc/tf4slurm/config.toml
    user                 $XDG_CONFIG_HOME/tf4slurm/config.toml, by default in ~/.config; None without a home directory
    project              tf4slurm.toml in the nearest of `project_directories`
    environment          TF4SLURM_<OPTION>, such as TF4SLURM_PARTITION
    """

    user: Path | None
    project: Path
    etc: Path = ETC
    shipped: Path = SHIPPED

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], directory: Path | None = None) -> SettingsPaths:
        """Return the paths for jobs that are started in `directory`.

        The default is the current directory, or / if that was removed.
        """
        if directory is None:
            try:
                directory = Path.cwd()
            except OSError:
                directory = Path("/")
        home = home_directory(environ)
        files = [path / PROJECT_FILE for path in project_directories(directory, home and home.resolve())]
        project = next((path for path in files if os.path.isfile(path)), files[0])
        return cls(user_directory(environ, "XDG_CONFIG_HOME", ".config"), project)

    @property
    def files(self) -> tuple[Path, ...]:
        """The settings files of host, user and project, which need not exist. Later files override earlier ones."""
        users = () if self.user is None else (self.user / _CONFIG_FILE,)
        return (self.etc / _CONFIG_FILE, *users, self.project)

    @property
    def site_directories(self) -> tuple[Path, ...]:
        """The directories with site profiles (NAME.toml). Earlier directories override later ones."""
        users = () if self.user is None else (self.user / "sites",)
        return (*users, self.etc / "sites", self.shipped)

    def sites(self) -> dict[str, Path]:
        """Return the files of all site profiles, by name of the profile."""
        paths = [path for directory in reversed(self.site_directories) for path in directory.glob("*.toml")]
        return {path.stem: path for path in paths}


def project_directories(directory: Path, home: Path | None) -> tuple[Path, ...]:
    """Return the directories of a project: `directory` and its parents, up to a git checkout's root or `home`.

    If `directory` is neither in a git checkout nor in `home`, return it alone, because its parents may not belong to
    the project.
    """
    above = (directory, *directory.parents)
    roots = (number for number, path in enumerate(above) if path in (home, repository_of(directory)))
    return above[: next(roots, 0) + 1]


def repository_of(directory: Path) -> Path | None:
    """Return the root of the git checkout that contains a directory, or None outside of a checkout."""
    return next((path for path in (directory, *directory.parents) if os.path.exists(path / ".git")), None)


def create_file(paths: SettingsPaths, *, project: bool) -> Path:
    """Create the user's settings file, or with `project` one in the current directory. Return its path.

    Raises:
        SettingsError: The file exists or cannot be written, or the user has no home directory.
    """
    directory = Path.cwd() if project else paths.user
    if directory is None:
        text = "This user has no home directory for settings. Set HOME or XDG_CONFIG_HOME, or give --project."
        raise SettingsError(text, source="HOME")
    path = directory / (PROJECT_FILE if project else _CONFIG_FILE)
    try:
        make_directories(directory, 0o755)
        # 0644 at most, whatever the umask, because a group-writable file is refused.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            file.write(_NEW_FILE)
    except FileExistsError:
        raise SettingsError(f"{path} exists already, and is not changed.", source=str(path)) from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}.", source=str(path)) from error
    return path


def read_settings(
    environ: Mapping[str, str], site: str | None = None, paths: SettingsPaths | None = None
) -> dict[str, Setting]:
    """Return the settings of all files and variables by field name. The entry `site` is the chosen profile.

    Args:
        site: The profile that the command line names, or "none" for no settings. By default the settings name it, or
            else it is "generic".
        paths: The files to read (default: those for the current directory).

    Raises:
        SettingsError: A file cannot be read, has an unknown option or an invalid value, or the profile does not exist.
        UntrustedFileError: Another user could have written the file.
    """
    if site == NO_SITE:
        return {}
    paths = paths or SettingsPaths.from_environ(environ)
    layers = [_read(path) for path in paths.files if os.path.isfile(path)]
    layers.append(_from_environ(environ))
    if site is not None:
        layers.append({SITE: Setting(site, "command line")})
    named = next((layer[SITE] for layer in reversed(layers) if SITE in layer), Setting("generic", "default"))
    if named.value == NO_SITE:
        return {}
    profiles = paths.sites()
    profile = profiles.get(str(named.value))
    if profile is None:
        text = unknown(str(named.value), profiles, f"a profile ({named.origin} names it)")
        raise SettingsError(f"{text} The profiles are {', '.join(sorted(profiles))}.", source=named.origin)
    settings: dict[str, Setting] = {}
    for layer in (_read(profile, is_shipped=profile.parent == paths.shipped), *layers):
        settings = _override(settings, layer)
    return {**settings, SITE: named}


def fill_in(cls: type, given: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the given options, completed with settings, as values for the fields of the dataclass `cls`.

    A given option overrides its setting. If it is not at its default value, it also removes the settings of options
    that it excludes.

    Args:
        cls: `JobSpec` or `BatchSpec`.
        given: Values by field name, from the command line or a Python program.
        settings: Settings by field name (`read_settings`).

    Raises:
        OptionError: A value is invalid, or two options exclude each other.
    """
    options = options_of(cls)
    defaults = {name: setting for name, setting in settings.items() if name in options}
    found = _override(defaults, {name: Setting(value, "command line") for name, value in given.items()})
    fields = {name: options[name].convert(setting.value) for name, setting in found.items() if name in options}
    check_exclusive(cls, fields)
    return {**given, **fields}


def _override(earlier: Mapping[str, Setting], later: Mapping[str, Setting]) -> dict[str, Setting]:
    """Merge two sets of settings. An option in `later` overrides the same option in `earlier`.

    It also removes the options in `earlier` that it excludes: mem removes mem-per-cpu.
    """
    options = options_of(BatchSpec)
    excluded = {
        other
        for name, setting in later.items()
        if name in options and options[name].convert(setting.value) != options[name].default
        for other in options[name].excludes
    }
    return {**{name: setting for name, setting in earlier.items() if name not in excluded}, **later}


def _read(path: Path, *, is_shipped: bool = False) -> dict[str, Setting]:
    try:
        instead = f"To run without settings: --{SITE} {NO_SITE}."
        data = path.read_bytes() if is_shipped else read_trusted(path, instead)  # shipped profiles are part of tf4slurm
        content = tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f'{path} cannot be read as TOML: {error}. Texts need quotes, such as partition = "short".', source=str(path)
        ) from error
    options = _known_options()
    given = []
    for name, value in content.items():
        each = options.get(name.replace("_", "-"))
        if each is None:
            text = unknown(name, options, "an option")
            raise SettingsError(f'{path}: {text} "tf4slurm submit --help" shows the options.', source=str(path))
        given.append((each, Setting(value, str(path))))
    return _checked(given)


def _from_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    variables = {"TF4SLURM_" + key.upper().replace("-", "_"): each for key, each in _known_options().items()}
    return _checked((each, Setting(environ[name], name)) for name, each in variables.items() if environ.get(name))


def _checked(given: Iterable[tuple[Option, Setting]]) -> dict[str, Setting]:
    found = {}
    for each, setting in given:
        try:
            each.convert(setting.value)
        except OptionError as error:
            raise SettingsError(f"{setting.origin} sets {error}", source=setting.origin) from error
        found[each.name] = setting
    return found


def _known_options() -> dict[str, Option]:
    return {**options_by_key(BatchSpec), SITE: Option(SITE, str, is_list=False, choices=(), default=None, help="")}
