"""The tasks and addresses of a cluster, its cluster spec and TF_CONFIG, and placeholders such as {ps_hosts}."""

from __future__ import annotations

import bisect
import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tf4slurm.roles import Role, role_of

logger = logging.getLogger(__name__)

_ROLES_WITH_HOSTS = ("ps", "worker", "chief")
PLACEHOLDERS = (*(f"{role}_hosts" for role in _ROLES_WITH_HOSTS), "job_name", "task_type", "task_index")
_IN_BRACES = re.compile(r"\{(\w+)\}")
_NO_ADDRESS = "0:0"  # for a joined worker that has left: short, because TF_CONFIG lists all that ever joined
_LEAST_SIMILARITY = 0.8  # finds {worker_host} and {task_id}, but not {name}


class Task(NamedTuple):
    """The type of a task and its 0-based index within the type. It is printed as "worker/0"."""

    task_type: str
    task_index: int

    def __str__(self) -> str:
        return f"{self.task_type}/{self.task_index}"


class Address(NamedTuple):
    """A host and a port. It is printed as "10.1.0.4:40123", with brackets around an IPv6 host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def from_text(cls, text: str) -> Address:
        """Parse "host:port" or "[ipv6]:port".

        Raises:
            ValueError: The host is missing, or the port is not a number from 1 to 65535.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f'{text!r} is not an address: expected "host:port" with a port from 1 to 65535.')
        return cls(host, int(port))


class Member(NamedTuple):
    """One task of a cluster: its rank in the step, its type and index, its node, and the address of its server."""

    rank: int
    task: Task
    node: str
    address: Address

    @property
    def is_lost(self) -> bool:
        """Whether the task is lost. A lost task keeps its entry, with port 0."""
        return self.address.port == 0


@dataclass(frozen=True)
class Cluster:
    """All tasks of one attempt, in rank order. Joined workers that have left are missing, so ranks may have gaps."""

    members: tuple[Member, ...]

    def find(self, rank: int) -> Member | None:
        """Return the member of this rank, or None if no member has this rank."""
        index = bisect.bisect_left(self.members, rank, key=lambda member: member.rank)
        found = self.members[index] if index < len(self.members) else None
        return found if found is not None and found.rank == rank else None

    def member(self, rank: int) -> Member:
        """Return the member of this rank, which must exist."""
        found = self.find(rank)
        assert found is not None, rank
        return found

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, without duplicates, in rank order."""
        return tuple(dict.fromkeys(member.node for member in self.members))

    @property
    def has_chief(self) -> bool:
        return any(member.task.task_type == "chief" for member in self.members)

    def to_dictionary(self) -> dict[str, list[str]]:
        """Return TensorFlow's cluster spec, such as {"ps": ["h1:4002"], "worker": ["h1:4001", "h2:4001"]}.

        A joined worker that has left has the address "0:0" while there is one with a higher index, because the position
        of an address is the index of its task.
        """
        return self._addresses(lambda role: role.is_in_cluster)

    def to_services(self) -> dict[str, list[str]]:
        """Return the addresses of the tf.data service's servers as {task_type: ["host:port", …]}."""
        return self._addresses(lambda role: role.is_server and not role.is_in_cluster)

    def to_tf_config(self, task: Task) -> str:
        """Return the value of TF_CONFIG for one task, which is JSON."""
        own = {"type": task.task_type, "index": task.task_index}
        return json.dumps({"cluster": self.to_dictionary(), "task": own})

    def _addresses(self, is_wanted: Callable[[Role], bool]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        has_chief = self.has_chief
        for _, task, _, address in sorted(self.members, key=lambda member: member.task.task_index):
            if is_wanted(role_of(task.task_type, has_chief=has_chief)):
                addresses = found.setdefault(task.task_type, [])
                addresses += [_NO_ADDRESS] * (task.task_index - len(addresses))
                addresses.append(str(address))
        return dict(sorted(found.items()))


def format_tasks(tasks: Iterable[object], most: int | None = None) -> str:
    """Return one or more tasks as text, such as "worker/1, worker/3 and ps/0".

    Beyond `most` names (default: no limit) the result ends with the number of further ones, such as "and 5 others".
    """
    names = [str(task) for task in tasks]
    if most is not None and (left_out := len(names) - most) > 0:
        names[most:] = [f"{left_out} other{'s' * (left_out > 1)}"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def fill_in(command: Sequence[str], cluster_spec: Mapping[str, Sequence[str]], task: Task) -> tuple[str, ...]:
    """Return the command with the values of `task` in place of placeholders such as {task_index}. Keep other braces."""
    values = {f"{role}_hosts": ",".join(cluster_spec.get(role, ())) for role in _ROLES_WITH_HOSTS}
    values.update(job_name=task.task_type, task_type=task.task_type, task_index=str(task.task_index))
    return tuple(_IN_BRACES.sub(lambda match: values.get(match[1], match[0]), word) for word in command)


def placeholders_in(command: Sequence[str]) -> set[str]:
    """Return the names of the placeholders in the command."""
    return set(_IN_BRACES.findall(" ".join(command))) & set(PLACEHOLDERS)


def warn_of_misspelled(command: Sequence[str]) -> None:
    """Log a warning for each name in braces that resembles a placeholder."""
    for name in sorted(set(_IN_BRACES.findall(" ".join(command))) - set(PLACEHOLDERS)):
        for meant in difflib.get_close_matches(name.lower(), PLACEHOLDERS, 1, _LEAST_SIMILARITY):
            logger.warning("{%s} in the command is not a placeholder; did you mean {%s}?", name, meant)
