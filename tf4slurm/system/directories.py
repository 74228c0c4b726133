"""Find the user's directories, and create directories that no other user can write to."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path


def home_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the user's home directory from HOME or the password database, or None if neither has it."""
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user without an entry, as in containers
        return None


def user_directory(environ: Mapping[str, str], variable: str, default: str) -> Path | None:
    """Return the path of tf4slurm's own directory for settings or state, such as ~/.config/tf4slurm.

    A relative path in the environment variable is ignored, as the XDG Base Directory Specification requires.

    Args:
        variable: Environment variable that names the parent directory, such as "XDG_CONFIG_HOME".
        default: Parent directory without this variable, relative to the home directory, such as ".config".

    Returns:
        The path, or None if the variable does not name a directory and there is no home directory.
    """
    if os.path.isabs(parent := environ.get(variable, "")):
        return Path(parent, "tf4slurm")
    home = home_directory(environ)
    return None if home is None else home / default / "tf4slurm"


def make_directories(path: Path, mode: int) -> None:
    """Create a directory and its missing parents, to which only this user can write, whatever the umask is.

    The directory gets the mode `mode`, which must not let others write. The missing parents get 0755. The umask can
    take further permissions away. A directory that exists is not changed.

    Raises:
        OSError: A directory cannot be created, or a file is in its place.
    """
    try:
        path.mkdir(mode)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directories(path.parent, 0o755)
        path.mkdir(mode, exist_ok=True)
    except OSError:
        if not path.is_dir():
            raise
