"""Checks of a job's command before the job starts or is submitted."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tf4slurm.agent.container import check_bindable
from tf4slurm.errors import CommandError, OptionError
from tf4slurm.jobs.known_errors import RESOLVER
from tf4slurm.spec import ACTIVE_ENVIRONMENT, JobSpec

logger = logging.getLogger(__name__)

_INTERPRETER = re.compile(r"python[\d.]*|bash|sh")
_NO_SCRIPT_FOLLOWS = re.compile(r"-[A-Za-z]*[cms]|-$")  # -c CODE, -m MODULE, bash -lc, or - for standard input
_SCRIPT_ENDINGS = (".py", ".sh")
_TENSORFLOWS_RESOLVER = re.compile(
    r"^[^#\n]*\b(slurm_)?cluster_resolver(\.| import [\w, (]*)SlurmClusterResolver\b", re.MULTILINE
)


def check_command(spec: JobSpec) -> None:
    """Check that the command's program exists and is executable, and after Python or a shell, that the script exists.

    What is in a container is not checked, only that its image exists.

    Raises:
        CommandError: The program, script, image or working directory does not exist, or the program is not executable.
        OptionError: The archive of --stage-env does not exist.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "The working directory does not exist any more. Change to an existing one with cd."
        raise CommandError(text, command=spec.command) from None
    if spec.stage_env not in (None, ACTIVE_ENVIRONMENT) and not os.path.isfile(spec.stage_env):
        raise OptionError(
            f"The archive {spec.stage_env!r} of --stage-env does not exist. Give its path, or {ACTIVE_ENVIRONMENT!r}.",
            option="stage-env",
        )
    if spec.container:
        if "://" not in spec.container and not os.path.exists(spec.container):
            raise CommandError(f"The image {spec.container!r} of --container does not exist.", command=spec.command)
        check_bindable((Path.cwd(), spec.runs_directory.absolute()), spec.command)
        return
    _check_program(spec.command)
    if spec.data_workers:
        _check_program((spec.data_service_python,))


def warn_of_resolver(command: Sequence[str]) -> None:
    """Log a warning if the command's script uses TensorFlow's resolver, whose tasks wait at other addresses."""
    for path in (Path(word) for word in command if word.endswith(".py")):
        with contextlib.suppress(OSError):
            if _TENSORFLOWS_RESOLVER.search(path.read_text(encoding="utf-8", errors="replace")):
                logger.warning("%s: %s", path, RESOLVER)
                return


def _check_program(command: Sequence[str]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        if os.path.exists(program):
            text = f'is not executable. Start it with its interpreter, such as "python {program}", or chmod +x it.'
        else:
            text = "does not exist. Check its name, or the environment that should provide it."
        raise CommandError(f"The program {program!r} {text}", command=command)
    if not _INTERPRETER.fullmatch(os.path.basename(program)):
        return
    for argument in command[1:]:
        if _NO_SCRIPT_FOLLOWS.match(argument) or os.path.isfile(argument):
            return
        if argument.endswith(_SCRIPT_ENDINGS) and not argument.startswith("-"):
            raise CommandError(
                f"The script {argument!r} does not exist in {os.getcwd()}. Check its path.", command=command
            )
