"""Run a task's command in a container of Apptainer or Singularity."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf4slurm.errors import CommandError

_PROGRAMS = ("apptainer", "singularity")
_GPU_OPTIONS = {"/dev/nvidiactl": "--nv", "/dev/kfd": "--rocm"}
"""Apptainer's option that gives the container a GPU driver, by the device file of hosts with this driver."""


def container_command(
    image: str, command: Sequence[str], paths: Sequence[Path], environ: Mapping[str, str], *, sees_gpus: bool
) -> tuple[str, ...]:
    """Return the command that runs `command` in a container.

    The container shares the host's network and the environment variables. It sees the directories `paths`, the working
    directory, and what the site's configuration adds, usually the home directory and /tmp.

    This function may wait for a file system, so call it in a thread.

    Args:
        image: Path or URI of the container's image.
        environ: The environment variables whose PATH is searched for Apptainer and Singularity.
        sees_gpus: Whether the container gets the drivers of the host's GPUs.

    Raises:
        CommandError: Neither Apptainer nor Singularity is on PATH, or a path contains "," or ":".
    """
    program = next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in _PROGRAMS)), None)
    if program is None:
        raise CommandError(
            f"--container {image} needs Apptainer or Singularity on PATH of {os.uname().nodename}. Load its module, "
            "or start the job without --container.",
            command=command,
        )
    gpus = [option for device, option in _GPU_OPTIONS.items() if sees_gpus and os.path.exists(device)]
    directory = Path.cwd()
    check_bindable((*paths, directory), command)
    binds = [word for path in (*paths, directory) for word in ("--bind", str(path))]
    return (program, "exec", *gpus, *binds, "--pwd", str(directory), image, *command)


def has_gpus() -> bool:
    """Return whether this host has the driver of a GPU."""
    return any(map(os.path.exists, _GPU_OPTIONS))


def check_bindable(paths: Sequence[Path], command: Sequence[str]) -> None:
    """Raise CommandError for a path with "," or ":", because Apptainer's --bind separates paths with these.

    `command` is the command that was to run in the container, for the error's attribute.
    """
    for path in paths:
        if {",", ":"} & set(str(path)):
            raise CommandError(
                f'A container cannot have the directory {str(path)!r}: --bind of Apptainer separates paths by "," and '
                '":". Rename it, or choose another working directory, --name or --runs-directory.',
                command=command,
            )
