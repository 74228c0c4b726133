"""What is known of one task of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from tf4slurm.cluster import Address, Task
from tf4slurm.control.messages import Status
from tf4slurm.roles import Role


@dataclass
class TaskRecord:
    """What is known of one task.

    Attributes:
        is_placed: Whether its task is known already; before, it only stands for the number of them.
        is_gone: Its agent has left or is lost.
        is_done: Its child has ended and nobody waits for it any more.
        heard_at: When its agent last said something.
        wanted_starts: How often its child should have been started by now.
    """

    rank: int
    task: Task
    role: Role
    is_placed: bool = True
    node: str = ""
    address: Address | None = None
    incarnation: str = ""
    is_connected: bool = False
    is_gone: bool = False
    is_done: bool = False
    heard_at: float = 0.0
    wanted_starts: int = 0
    status: Status = field(default_factory=Status)
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def has_joined(self) -> bool:
        return bool(self.incarnation)

    @property
    def name(self) -> str:
        return str(self.task) if self.is_placed else f"rank {self.rank}"

    def __str__(self) -> str:
        place = f" on {self.node}" if self.node else f" (rank {self.rank})" if self.is_placed else ""
        return f"{self.name}{place}"
