"""Check that only this user and root can write the files that tf4slurm finds by itself.

Files that the user names explicitly are not checked.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tf4slurm.errors import UntrustedFileError

TRUST = "TF4SLURM_TRUST"


def check_trusted(path: Path, instead: str) -> None:
    """Raise an error if users other than this user and root could have created or changed a file or directory.

    They could if another user owns the file or its directory, or if others may write to either. Write permission for a
    group (or a POSIX ACL) counts, unless it is the owner's private group, with the owner's name and no other members.
    Files below the absolute paths in TF4SLURM_TRUST (separated by os.pathsep) are not checked.

    Args:
        path: The file or directory. Symbolic links are followed.
        instead: A sentence for the error message: what to do without the file.

    Raises:
        UntrustedFileError: Another user could have created or changed the file.
        OSError: The file does not exist.
    """
    for each in dict.fromkeys((path, path.parent, path.resolve().parent)):
        _check(each, each.stat(), path, instead)


def read_trusted(path: Path, instead: str) -> bytes:
    """Check a file as `check_trusted` does, and return its content.

    The owner and the mode of the opened file are checked, too. So a user who may write to a directory above cannot
    exchange the file between check and read.

    Raises:
        UntrustedFileError, OSError: See `check_trusted`.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a named pipe does not block
        _check(path, os.fstat(file.fileno()), path, instead)
        check_trusted(path, instead)
        return file.read()


def _check(each: Path, facts: os.stat_result, path: Path, instead: str) -> None:
    """Raise an error about `path` if others could have created or changed `each`: the path itself or its directory."""
    real = each.resolve()
    directory = real if stat.S_ISDIR(facts.st_mode) else real.parent
    if _is_in_trusted_directory(directory):
        return
    if facts.st_uid not in (os.getuid(), 0):
        owner = _name(each.owner, facts.st_uid)
        why = f"{str(each)!r} belongs to the user {owner!r}, not to you or root. Use a copy of your own."
    elif facts.st_mode & stat.S_IWOTH:
        why = f"all users may write {str(each)!r}. Take that permission away: chmod o-w."
    elif facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_gid, facts.st_uid):
        group = _name(each.group, facts.st_gid)
        why = f"the group {group!r} may write {str(each)!r}. Take that permission away: chmod g-w."
    else:
        return
    trust = f"If you trust all who may write there, add {str(directory)!r} to the environment variable {TRUST}."
    raise UntrustedFileError(
        f"{str(path)!r} is refused, as it could run commands as you: {why} {trust} {instead}", path=str(path)
    )


def is_owned_by(user_id: int, path: Path) -> bool:
    """Return whether a file or directory belongs to the user `user_id` or to users that are always trusted.

    These are this process's user and root. If the path is a symbolic link, the link must belong to one of the three,
    too. Below the paths in TF4SLURM_TRUST the result is always True.

    Raises:
        OSError: The file does not exist.
    """
    owners = {path.lstat().st_uid, path.stat().st_uid}
    return owners <= {user_id, os.getuid(), 0} or _is_in_trusted_directory(path.resolve())


@contextlib.contextmanager
def private_directory(path: Path, instead: str) -> Iterator[Path]:
    """Create the directory `path`, or take an existing one of this user, and make it private (mode 0700).

    The yielded path goes through a file descriptor (/proc/self/fd). So it leads to this directory in the block even if
    a user who may write to a directory above renames it. Files in the directory belong to this user, unless they were
    created before it was private.

    Args:
        instead: A sentence for the error message: what to do without the directory.

    Raises:
        UntrustedFileError: A link, a file, or another user's directory has this name.
        OSError: The directory cannot be created or opened.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    facts = path.lstat()
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.path.samestat(facts, os.fstat(descriptor)):
                os.fchmod(descriptor, 0o700)
                yield Path(f"/proc/self/fd/{descriptor}")
                return
        finally:
            os.close(descriptor)
    raise UntrustedFileError(
        f"{str(path)!r} is refused, as it could run commands as you: a link, a file, or another user's directory is in "
        f"its place. {instead}",
        path=str(path),
    )


def _is_in_trusted_directory(path: Path) -> bool:
    trusted = [Path(text).resolve() for text in os.environ.get(TRUST, "").split(os.pathsep) if os.path.isabs(text)]
    return any(path.is_relative_to(directory) for directory in trusted)


def _is_private_group(group_id: int, user_id: int) -> bool:
    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(user_id).pw_name
    except KeyError:
        return False
    return group.gr_name == user and not set(group.gr_mem) - {user}


def _name(look_up: Callable[[], str], number: int) -> str:
    try:
        return look_up()
    except KeyError:
        return str(number)
