"""Find the directories that contain a script's Python and its modules, and pack them into an archive for the nodes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures.thread import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from tf4slurm.errors import LaunchError
from tf4slurm.system.files import DRAFT_SUFFIX, replacing
from tf4slurm.system.program import read_line
from tf4slurm.system.trusted_files import private_directory

CACHE_BYTES = 32 * 2**30
"""Maximum size of all archives together, and of all copies on a node together. It may be exceeded, because archives and
copies in use are never removed."""
UNUSED_SECONDS = 7 * 86400
"""Archives and copies that no job has used for this time are removed."""
STAGING_SECONDS = 1800.0
"""Time limit to copy an environment to the nodes of a job."""
IN_USE_SECONDS = STAGING_SECONDS + 600
"""Archives and copies are kept for this time after a job has found or made them, so that the job can open them."""

_QUERY = """
import json, sys
print(json.dumps([sys.prefix, sys.base_prefix, sys.path, "lib/python%d.%d/site-packages" % sys.version_info[:2]]))
"""
_QUERY_SECONDS = 120.0
_SYSTEM = "/usr"  # nodes have it on their own disks
_THREADS = 16  # so that many requests wait for the file system at the same time
_MAX_SCRIPT_BYTES = 65536
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ARCHIVED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


class Relocation:
    """Replaces paths of directories in texts such as command lines, environment variables and scripts.

    `paths` maps the old path of each directory to its new path. A directory is replaced where it is a whole path or the
    start of one. If `paths` is empty, texts are unchanged.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)
        longest_first = sorted(map(re.escape, paths), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(longest_first)})(?![\w.-])")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self.paths[match[0]], text) if self.paths else text


class PythonEnvironment(NamedTuple):
    """The Python of a script, and the directories outside of /usr that contain its modules.

    Attributes:
        program: Path of the Python.
        prefix: Directory of its virtual or conda environment.
        directories: Absolute paths of the directories. None of them is below another.
        unread: Directories of packages below `directories` that are not on sys.path. They are not copied.
    """

    program: str
    prefix: str
    directories: tuple[str, ...]
    unread: tuple[str, ...]


def find_environment(python: str, environ: Mapping[str, str]) -> PythonEnvironment:
    """Return the script's Python and the directories of its modules.

    The directories of the Python that runs tf4slurm are included.

    Args:
        python: Name or path of the script's Python.
        environ: The environment variables with which the script's Python is found and run.

    Raises:
        LaunchError: The Python is not on PATH, or does not print its directories within 120 s.
    """
    program = shutil.which(python, path=environ.get("PATH"))
    if program is None:
        raise LaunchError(f"{python} is not on PATH", command=(python,))
    command = (program, "-c", _QUERY)
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=environ, timeout=_QUERY_SECONDS
        )
        prefix, base, paths, packages = read_line(done.stdout.decode(errors="replace"), "[")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{program} does not say where its modules are: {error}", command=command) from error
    paths += sys.path
    wanted = {os.path.abspath(path) for path in (prefix, base, sys.prefix, sys.base_prefix) if path}
    wanted.update(path for path in paths if path.endswith(("/site-packages", "/dist-packages")))
    outside = {path for path in wanted if not _is_below(path, {_SYSTEM}) and os.path.isdir(path)}
    directories = sorted(path for path in outside if not _is_below(path, outside - {path}))
    unread = tuple(path for each in directories if (path := os.path.join(each, packages)) not in paths)
    return PythonEnvironment(program, prefix, tuple(directories), unread)


def _is_below(path: str, directories: Iterable[str]) -> bool:
    """Return whether `path` is one of `directories` or below one of them."""
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in directories)


class File(NamedTuple):
    """A file, link or directory of an environment.

    Attributes:
        path: Its absolute path.
        name: Its path in the archive.
        facts: Its size, mode and times, from os.stat.
    """

    path: str
    name: str
    facts: os.stat_result


def list_files(environment: PythonEnvironment) -> list[File]:
    """Return all files, links and directories for the archive. Each directory comes before its files.

    The content of directories that this user cannot read is left out.
    """

    def list_directory(directory: File) -> list[File]:
        with contextlib.suppress(PermissionError), os.scandir(directory.path) as entries:
            files = (
                File(each.path, f"{directory.name}/{each.name}", each.stat(follow_symlinks=False))
                for each in entries
                if each.path not in environment.unread
            )
            return sorted(file for file in files if stat.S_IFMT(file.facts.st_mode) in _ARCHIVED)
        return []

    level = [File(path, str(index), os.stat(path)) for index, path in enumerate(environment.directories)]
    found: list[File] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        while level:
            found += level
            directories = [file for file in level if stat.S_ISDIR(file.facts.st_mode)]
            level = [file for files in threads.map(list_directory, directories) for file in files]
    return found


def fingerprint(files: Iterable[File], *texts: str) -> str:
    """Return a hash (16 hexadecimal digits) of the texts, and of each file's path, mode, size and modification time.

    Directories and files in __pycache__ do not count, because Python writes the latter while it runs.
    """
    result = hashlib.sha256(repr(texts).encode())
    for file in files:
        if not stat.S_ISDIR(file.facts.st_mode) and "/__pycache__/" not in file.name:
            facts = file.facts
            result.update(os.fsencode(f"{file.path}\0{facts.st_mode}\0{facts.st_size}\0{facts.st_mtime_ns}\n"))
    return result.hexdigest()[:16]


def open_archive(path: Path, files: list[File], relocate: Relocation, stopped: threading.Event) -> IO[bytes]:
    """Open the tar archive of `files` at `path`. Write the archive first, unless this user has written it before.

    Before the archive is written, other archives in the directory are removed: those that no job has used for a week,
    and the least recently used ones beyond `CACHE_BYTES`.

    Args:
        relocate: Changes paths in links, in pyvenv.cfg and in the scripts in bin.
        stopped: Event that another thread sets to end the writing.

    Raises:
        UntrustedFileError: The archive's directory belongs to another user.
        LaunchError: `stopped` was set during the writing. No incomplete archive is left.
        OSError: A file cannot be read, or the archive cannot be written.
    """
    with private_directory(path.parent, "Choose another --runs-directory.") as directory:
        archive = directory / path.name
        if _is_own(archive):
            os.utime(archive)
        else:
            _remove_unused(directory, sum(file.facts.st_size for file in files))
            _write_archive(archive, files, relocate, stopped)
        return archive.open("rb")


def _is_own(archive: Path) -> bool:
    """Return whether `archive` is a file that only this user can have written.

    The file itself is checked, because its directory may have been open to others before.
    """
    try:
        facts = archive.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & _OTHERS_WRITE


def _remove_unused(directory: Path, num_bytes: int) -> None:
    """Remove old archives, drafts that ended jobs have left, and archives that leave no space for `num_bytes` more.

    The limit for all archives together is `CACHE_BYTES`. Nothing is removed that a job may still open.
    """
    found = []
    for path in (*directory.glob("env-*.tar"), *directory.glob(f".env-*{DRAFT_SUFFIX}")):
        with contextlib.suppress(OSError):
            found.append((path.lstat().st_mtime, path.lstat().st_size, path))
    for used_at, size, path in sorted(found, reverse=True):
        age_seconds, num_bytes = time.time() - used_at, num_bytes + size
        is_unwanted = path.suffix == DRAFT_SUFFIX or num_bytes > CACHE_BYTES
        if age_seconds > UNUSED_SECONDS or (is_unwanted and age_seconds > IN_USE_SECONDS):
            with contextlib.suppress(OSError):
                path.unlink()


def _write_archive(archive: Path, files: list[File], relocate: Relocation, stopped: threading.Event) -> None:
    with (
        replacing(archive) as draft,
        ThreadPoolExecutor(_THREADS) as threads,
        tarfile.open(fileobj=draft, mode="w") as tar,
    ):
        for start in range(0, len(files), _THREADS):
            if stopped.is_set():
                raise LaunchError("the job has ended.", command=())
            chunk = files[start : start + _THREADS]
            for member, content in threads.map(lambda file: _member(file, relocate), chunk):
                with contextlib.closing(content) if content else contextlib.nullcontext():
                    tar.addfile(member, content)


def _member(file: File, relocate: Relocation) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
    """Return a file's entry in the archive, and its content, which the caller closes.

    The content of a directory or link is None. `relocate` changes paths as in `open_archive`.
    """
    mode = file.facts.st_mode
    member = tarfile.TarInfo(file.name)
    member.mode, member.mtime = stat.S_IMODE(mode) | stat.S_IWUSR, int(file.facts.st_mtime)
    if stat.S_ISDIR(mode):
        member.type = tarfile.DIRTYPE
        return member, None
    if stat.S_ISLNK(mode):
        member.type, member.linkname = tarfile.SYMTYPE, relocate(os.readlink(file.path))
        return member, None
    content: IO[bytes] = open(file.path, "rb")  # noqa: SIM115 - the caller closes it
    member.size = file.facts.st_size
    names_its_directory = file.name.split("/")[-2] == "bin" or file.name.endswith("/pyvenv.cfg")
    if names_its_directory and member.size <= _MAX_SCRIPT_BYTES:
        data = content.read()
        with contextlib.suppress(UnicodeDecodeError):
            data = relocate(data.decode()).encode()
        content.close()
        content, member.size = io.BytesIO(data), len(data)
    return member, content
