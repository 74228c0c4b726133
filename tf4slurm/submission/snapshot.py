"""Copy the code at submission, because it may change while the job waits in the queue."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tf4slurm.errors import OptionError, RunDirectoryError
from tf4slurm.jobs.run_directory import make_parent
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.settings import repository_of
from tf4slurm.system.directories import make_directories
from tf4slurm.system.files import replacing
from tf4slurm.system.versions import COMMIT_FILE, read_commit

_TIMEOUT_SECONDS = 60.0
_ENDING = ".code"
_MAX_BYTES = 10**9
_COPY = "Use --snapshot copy."
_Ignore = Callable[[str, list[str]], list[str]]
"""Returns which of the names in a directory are left out."""


def place_snapshot(spec: BatchSpec) -> BatchSpec:
    """Return the job with a path for its snapshot, beside the run directories. Create nothing.

    If the path is taken, `take_snapshot` chooses another one. A job without a snapshot, or with a directory for it, is
    returned unchanged.
    """
    if spec.snapshot == "none" or spec.directory is not None:
        return spec
    runs = spec.runs_directory.absolute()
    name = f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}{_ENDING}"
    return replace(spec, runs_directory=runs, directory=runs / name)


def _paths(path: Path) -> Iterator[Path]:
    """Yield train.code, train-2.code, train-3.code and so on."""
    yield path
    yield from (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))


def take_snapshot(
    kind: str, source: Path, target: Path, command: Sequence[str] = (), *, is_fixed: bool = False
) -> Path:
    """Copy files to a new directory, which only this user can enter (0700). Return its path.

    The path is `target`, such as train.code, or train-2.code and so on if the name is taken. After an error the new
    directory is removed. The parent of `target` contains the run directories.

    Args:
        kind: "git" for the files of `source` that git tracks, "copy" for all but .git and the run directories. See
            `_fill`.
        command: The words of the job's commands. Their files must be in the snapshot.
        is_fixed: Whether a `target` that exists is an error.

    Raises:
        OptionError: Git fails, tracks no file or does not list the files of a submodule; or a file of `command` would
            be missing; or the snapshot exceeds 1 GB.
        RunDirectoryError: The snapshot cannot be written.
    """
    made = None
    try:
        make_parent(target.parent)
        made = _make_directory(target, is_fixed=is_fixed)
        _fill(kind, source, made, command)
    except BaseException as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, (OSError, shutil.Error)):
            place = str(made or target)
            raise RunDirectoryError(f"The snapshot {place!r} cannot be written: {error}.", path=place) from error
        raise
    return made


def _make_directory(target: Path, *, is_fixed: bool) -> Path:
    """Create the directory `target`, or the first path of `_paths` that does not exist. Return its path.

    If `is_fixed`, an existing `target` raises FileExistsError. Two processes that call this function at the same time
    never get the same directory.
    """
    for path in [target] if is_fixed else _paths(target):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def _fill(kind: str, source: Path, target: Path, command: Sequence[str]) -> None:
    """Copy the files of `source` that git tracks (kind "git"), or all but .git and the run directories ("copy").

    Tracked files include those of submodules. Links are copied as links. A relative link that leads out of `source`
    becomes absolute, so that it leads to the same place.

    In a git checkout "copy" omits the files that git ignores. Outside of a checkout, or if git ignores every file of
    the source (as in a repository of dotfiles), "copy" includes files with secrets, such as .env.
    """
    if kind == "git":
        names = _tracked_files(source)
        if not names:
            raise OptionError(f"git tracks no file in {source}. {_COPY}", option="snapshot")
        _check_size(source, [source / name for name in names])
        for name in names:
            make_directories((target / name).parent, 0o755)
            shutil.copy2(source / name, target / name, follow_symlinks=False)
    else:
        source = source.resolve()
        left_out = {source / ".git", target.resolve(), target.parent.resolve(), *_ignored_files(source)}

        def ignore(directory: str, names: list[str]) -> list[str]:
            return [name for name in names if Path(directory, name) in left_out]

        _check_size(source, _walk(source, ignore))
        _copy_content(source, target, ignore)
    _keep_links(source, target)
    _check_command(source, target, command)
    if (commit := read_commit(source)) is not None:
        with replacing(target / COMMIT_FILE) as file:
            file.write(json.dumps(commit).encode())


def _copy_content(source: Path, target: Path, ignore: _Ignore) -> None:
    """Copy the content of the directory `source` into the existing directory `target`.

    shutil.copytree would also copy the mode of `source`, with which other users might be able to enter `target`.
    `ignore` is as in shutil.copytree: it returns which names of a directory are not copied.
    """
    names = os.listdir(source)
    left_out = ignore(str(source), names)
    for path in (source / name for name in names if name not in left_out):
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target / path.name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(path, target / path.name, follow_symlinks=False)


def _tracked_files(source: Path) -> list[str]:
    """Return the names of the tracked files and links that exist, including those of submodules."""
    names = []
    submodules = {entry.partition("\t")[2] for entry in _list_files(source, "--stage") if entry.startswith("160000 ")}
    for name in _list_files(source, "--cached"):
        path = source / name
        if path.is_symlink() or path.is_file():
            names.append(name)
        elif name in submodules and (path / ".git").exists():
            names += [f"{name}/{inner}" for inner in _tracked_files(path)]
        elif path.is_dir() and any(path.iterdir()):
            why = "tracks a file or link, where there is now a directory: run git add or git rm"
            if name in submodules:
                why = "does not list the files of this submodule, which is no checkout: run git submodule update --init"
            raise OptionError(f"{str(path)!r}: git {why}. {_COPY}", option="snapshot")
    return names


def _keep_links(source: Path, target: Path) -> None:
    """Make each relative link in `target` that led out of `source` absolute."""
    root = os.path.realpath(source)
    for directory, directories, files in os.walk(target):
        origin = os.path.realpath(source / Path(directory).relative_to(target))
        for link in (Path(directory, name) for name in (*directories, *files)):
            if not link.is_symlink() or os.path.isabs(text := os.readlink(link)):
                continue
            if os.path.commonpath((root, os.path.normpath(f"{origin}/{text}"))) != root:
                link.unlink()
                link.symlink_to(f"{origin}/{text}")


def _ignored_files(source: Path) -> list[Path]:
    """Return the files and directories that git ignores: none outside of a checkout, or if git ignores all files."""
    if repository_of(source) is None or not _list_files(source, "--cached", "--others", "--exclude-standard"):
        return []
    options = ("--others", "--ignored", "--exclude-standard", "--directory")
    return [source / name for name in _list_files(source, *options)]


def _list_files(source: Path, *options: str) -> list[str]:
    command = ("git", "-C", str(source), "ls-files", "-z", *options)
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="surrogateescape", timeout=_TIMEOUT_SECONDS
        )
        why = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        why = "git is not installed, or not in PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        repository = repository_of(source.resolve())
        trust = f"git config --global --add safe.directory {shlex.quote(str(repository))}"
        todo = _COPY if repository is None else f"If you trust a checkout that others own: {trust}. Or --snapshot none."
        raise OptionError(f"git does not list the files in {source}: {why}. {todo}", option="snapshot")
    return [name for name in done.stdout.split("\0") if name]


def _walk(source: Path, ignore: _Ignore) -> Iterator[Path]:
    """Yield the files that shutil.copytree with this `ignore` would copy."""
    for directory, directories, files in os.walk(source):
        left_out = ignore(directory, [*directories, *files])
        directories[:] = [name for name in directories if name not in left_out]
        yield from (Path(directory, name) for name in files if name not in left_out)


def _check_size(source: Path, files: Iterable[Path]) -> None:
    num_bytes = sum(file.lstat().st_size for file in files)
    if num_bytes > _MAX_BYTES:
        raise OptionError(
            f"The snapshot of {source} would have {num_bytes / 1e9:.1f} GB; the limit is {_MAX_BYTES / 1e9:g} GB. "
            "Keep data and checkpoints elsewhere, let git ignore them, or omit --snapshot.",
            option="snapshot",
        )


def _check_command(source: Path, target: Path, command: Sequence[str]) -> None:
    for word in command:
        if not Path(word).is_absolute() and (source / word).is_file() and not (target / word).is_file():
            raise OptionError(
                f"{word!r} would not be in the snapshot, because git does not track it. Run git add.",
                option="snapshot",
            )
