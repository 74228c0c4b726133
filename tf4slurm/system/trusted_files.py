"""Check that only this user and root can write a file that the user did not name explicitly."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

from tf4slurm.errors import UntrustedFileError

TRUST = "TF4SLURM_TRUST"


def check_trusted(path: Path, instead: str) -> None:
    """Refuse a file or directory that users other than this user and root could have created or changed.

    This is the case if another user owns the file or its directory, or if others may write to either. Write permission
    for a group (or a POSIX ACL) counts, unless it is the owner's private group, with the owner's name and no other
    members. Files below the absolute paths in TF4SLURM_TRUST (separated by os.pathsep) are not checked.

    Args:
        path: The file or directory. Symbolic links are followed.
        instead: A sentence for the error message: what to do without the file.

    Raises:
        UntrustedFileError: Another user could have created or changed the file.
        OSError: The file does not exist.
    """
    for each in dict.fromkeys((path, path.parent, path.resolve().parent)):
        facts, real = each.stat(), each.resolve()
        directory = real if stat.S_ISDIR(facts.st_mode) else real.parent
        if any(directory.is_relative_to(trusted) for trusted in _trusted_directories()):
            continue
        if facts.st_uid not in (os.getuid(), 0):
            owner = _name(each.owner, facts.st_uid)
            why = f"{str(each)!r} belongs to the user {owner!r}, not to you or root. Use a copy of your own."
        elif facts.st_mode & stat.S_IWOTH:
            why = f"all users may write {str(each)!r}. Take that permission away: chmod o-w."
        elif facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_gid, facts.st_uid):
            group = _name(each.group, facts.st_gid)
            why = f"the group {group!r} may write {str(each)!r}. Take that permission away: chmod g-w."
        else:
            continue
        trust = f"If you trust all who may write there, add {str(directory)!r} to the environment variable {TRUST}."
        raise UntrustedFileError(
            f"{str(path)!r} is refused, as it could run commands as you: {why} {trust} {instead}", path=str(path)
        )


def _trusted_directories() -> list[Path]:
    return [Path(text).resolve() for text in os.environ.get(TRUST, "").split(os.pathsep) if os.path.isabs(text)]


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
