"""`Task`, `Address`, `Member` and `Cluster`, and the cluster's form for TensorFlow (the cluster spec, TF_CONFIG)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tf4slurm.roles import Role, role_of


class Task(NamedTuple):
    """One task of a job, by its type and its 0-based index inside that type; written "worker/0"."""

    task_type: str
    task_index: int

    def __str__(self) -> str:
        return f"{self.task_type}/{self.task_index}"


class Address(NamedTuple):
    """The address at which a task listens, written "10.1.0.4:40123", with an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def from_text(cls, text: str) -> Address:
        """Read "host:port" or "[ipv6]:port".

        Raises:
            ValueError: The text has no host, or no port between 1 and 65535.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f'{text!r} is not an address: expected "host:port" with a port from 1 to 65535.')
        return cls(host, int(port))


class Member(NamedTuple):
    """One registered task: its rank in the step, its role and index, its node and the address at which it listens."""

    rank: int
    task: Task
    node: str
    address: Address


@dataclass(frozen=True)
class Cluster:
    """All members of the cluster of one attempt, in rank order."""

    members: tuple[Member, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, each once, in rank order."""
        return tuple(dict.fromkeys(member.node for member in self.members))

    @property
    def has_chief(self) -> bool:
        return any(member.task.task_type == "chief" for member in self.members)

    def to_dictionary(self) -> dict[str, list[str]]:
        """Return TensorFlow's cluster spec, such as {"chief": ["h1:4001"], "ps": ["h1:4002"], "worker": ["h2:4001"]}.

        Roles that are not part of the cluster spec (evaluators, the data service) are left out.
        """
        return self._addresses(lambda role: role.is_in_cluster)

    def to_services(self) -> dict[str, list[str]]:
        """Return {role: ["host:port", …]} of the servers outside the cluster spec, which are the tf.data service's."""
        return self._addresses(lambda role: role.serves and not role.is_in_cluster)

    def to_tf_config(self, task: Task) -> str:
        """Return the TF_CONFIG of one task: the cluster spec and its own place in it, as JSON."""
        own = {"type": task.task_type, "index": task.task_index}
        return json.dumps({"cluster": self.to_dictionary(), "task": own})

    def _addresses(self, is_wanted: Callable[[Role], bool]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for member in sorted(self.members, key=lambda member: member.task.task_index):
            if is_wanted(role_of(member.task.task_type, has_chief=self.has_chief)):
                found.setdefault(member.task.task_type, []).append(str(member.address))
        return dict(sorted(found.items()))


def format_tasks(tasks: Iterable[object]) -> str:
    """Return "worker/1, worker/3 and ps/0", for sentences."""
    names = [str(task) for task in tasks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
