"""Placeholders such as {ps_hosts} in the user's command, replaced for each task after the rendezvous."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence

from tf4slurm.cluster import Task

logger = logging.getLogger(__name__)

_ROLES_WITH_HOSTS = ("ps", "worker", "chief")
PLACEHOLDERS = (*(f"{role}_hosts" for role in _ROLES_WITH_HOSTS), "job_name", "task_type", "task_index")
_IN_BRACES = re.compile(r"\{(\w+)\}")
_LEAST_SIMILARITY = 0.8  # finds {worker_host} and {task_id}, but not {name}


def fill_in(command: Sequence[str], cluster_spec: Mapping[str, Sequence[str]], task: Task) -> tuple[str, ...]:
    """Replace the placeholders for one task: hosts by "host:port,host:port". Other braces stay unchanged."""
    values = {f"{role}_hosts": ",".join(cluster_spec.get(role, ())) for role in _ROLES_WITH_HOSTS}
    values.update(job_name=task.task_type, task_type=task.task_type, task_index=str(task.task_index))
    return tuple(_IN_BRACES.sub(lambda match: values.get(match[1], match[0]), word) for word in command)


def placeholders_in(command: Sequence[str]) -> set[str]:
    """Return the names of the placeholders in the command."""
    return _names_in(command) & set(PLACEHOLDERS)


def warn_of_misspelled(command: Sequence[str]) -> None:
    """Log a warning for each name in braces that resembles a placeholder."""
    for name in sorted(_names_in(command) - set(PLACEHOLDERS)):
        for meant in difflib.get_close_matches(name.lower(), PLACEHOLDERS, 1, _LEAST_SIMILARITY):
            logger.warning("{%s} in the command is not a placeholder; did you mean {%s}?", name, meant)


def _names_in(command: Sequence[str]) -> set[str]:
    return {name for word in command for name in _IN_BRACES.findall(word)}
