"""Find the directories of a script's Python and its modules, and pack them with the paths that nodes will use."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
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

_QUERY = """
import json, sys
print(json.dumps([sys.prefix, sys.base_prefix, sys.path, "lib/python%d.%d/site-packages" % sys.version_info[:2]]))
"""
_QUERY_SECONDS = 120.0
_SYSTEM = "/usr"  # on each node's own disk
_THREADS = 16  # so that many requests wait for the file system at the same time
_MAX_SCRIPT_BYTES = 65536
_UNUSED_SECONDS = 7 * 86400
_ARCHIVED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


class Relocation:
    """Replaces directories in texts such as command lines, environment variables and scripts.

    A directory is replaced wherever it is a whole path or the start of one.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)
        longest_first = sorted(map(re.escape, paths), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(longest_first)})(?![\w.-])")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self.paths[match[0]], text) if self.paths else text


class PythonEnvironment(NamedTuple):
    """The Python `program` of a script, and the directories of its modules that are not part of the system.

    Attributes:
        prefix: Directory of its virtual or conda environment.
        directories: Absolute paths; none contains another.
        unread: Directories below them that the Python does not read.
    """

    program: str
    prefix: str
    directories: tuple[str, ...]
    unread: tuple[str, ...]


def find_environment(python: str, environ: Mapping[str, str]) -> PythonEnvironment:
    """Return the environment of the script's Python, together with that of tf4slurm's own Python.

    Raises:
        LaunchError: The Python is not on PATH, or does not answer.
    """
    program = shutil.which(python, path=environ.get("PATH"))
    if program is None:
        raise LaunchError(f"{python} is not on PATH", command=(python,))
    command = (program, "-c", _QUERY)
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=environ, timeout=_QUERY_SECONDS
        )
        prefix, base, paths, packages = json.loads(done.stdout)
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
    """Return whether a path is one of these directories or below one."""
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in directories)


class File(NamedTuple):
    """A file, link or directory of an environment; `name` is its path in the archive."""

    path: str
    name: str
    facts: os.stat_result


def list_files(environment: PythonEnvironment) -> list[File]:
    """Return everything that the archive contains, each directory before its files."""

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
    """Return 16 digits that change with the path, mode, size and time of each file, and with the texts.

    Bytecode does not count, because Python writes it while it runs.
    """
    result = hashlib.sha256(repr(texts).encode())
    for file in files:
        if not stat.S_ISDIR(file.facts.st_mode) and "/__pycache__/" not in file.name:
            facts = file.facts
            result.update(os.fsencode(f"{file.path}\0{facts.st_mode}\0{facts.st_size}\0{facts.st_mtime_ns}\n"))
    return result.hexdigest()[:16]


def write_archive(archive: Path, files: list[File], relocate: Relocation, stopped: threading.Event) -> None:
    """Write files into a tar archive, and remove archives beside it that no job has used for a week.

    Links, pyvenv.cfg and the scripts in bin are changed by `relocate`. Nothing is left if `stopped` is set meanwhile.

    Raises:
        OSError: A file cannot be read, or the archive cannot be written.
    """
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in archive.parent.glob("*.tar*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _UNUSED_SECONDS:
                old.unlink()
    draft = archive.with_name(f"{archive.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with ThreadPoolExecutor(_THREADS) as threads, tarfile.open(draft, "w") as tar:
            for start in range(0, len(files), _THREADS):
                chunk = files[start : start + _THREADS]
                for member, content in threads.map(lambda file: _member(file, relocate), chunk):
                    with contextlib.closing(content) if content else contextlib.nullcontext():
                        tar.addfile(member, content)
                if stopped.is_set():
                    return
        draft.rename(archive)
    finally:
        draft.unlink(missing_ok=True)


def _member(file: File, relocate: Relocation) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
    """Return a file's entry in the archive, and its content."""
    member, mode = tarfile.TarInfo(file.name), file.facts.st_mode
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
