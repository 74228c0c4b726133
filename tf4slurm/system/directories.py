"""Find the user's directories, and create directories that no other user can write to."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path


def home_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the user's home directory from HOME, or else from the password database, or None if it is unknown."""
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user without an entry, as in containers
        return None


def user_directory(environ: Mapping[str, str], variable: str, default: str) -> Path | None:
    """Return tf4slurm's directory below the directory that an environment variable names.

    Without this variable, the directory is below `default` in the home directory. A relative path in the variable is
    ignored, as the XDG Base Directory Specification requires. The result is None for a user without a home directory.
    """
    if os.path.isabs(parent := environ.get(variable, "")):
        return Path(parent, "tf4slurm")
    home = home_directory(environ)
    return None if home is None else home / default / "tf4slurm"


def make_directories(path: Path, mode: int) -> None:
    """Create a directory and its missing parents. Only this user can write to them, whatever the umask is.

    `mode` is the mode of the directory, without write permission for others. The missing parents get 0755.

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
