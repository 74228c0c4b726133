"""The user's directories, and new directories that no other user can write to."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path


def home_directory(environ: Mapping[str, str]) -> Path | None:
    """Return HOME, or without it the home directory of the password database; None if neither has one."""
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user without an entry, as in containers
        return None


def user_directory(environ: Mapping[str, str], variable: str, default: str) -> Path | None:
    """Return tf4slurm's directory below the one in `variable`, by default below `default` in the home directory.

    A relative path in the variable is ignored, as the XDG Base Directory Specification requires. Return None for a user
    without a home directory.
    """
    if os.path.isabs(parent := environ.get(variable, "")):
        return Path(parent, "tf4slurm")
    home = home_directory(environ)
    return None if home is None else home / default / "tf4slurm"


def make_directories(path: Path, mode: int) -> None:
    """Create a directory and its missing parents; only this user can write to them, whatever the umask.

    `mode` is that of the directory, without write permission for others; the missing parents get 0755.

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
