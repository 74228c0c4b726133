"""`TaskRecord`: what the control service knows of one task."""

from __future__ import annotations

from dataclasses import dataclass, field

from tf4slurm.cluster import Address, Task
from tf4slurm.control.messages import ObservedState
from tf4slurm.roles import Role


@dataclass
class TaskRecord:
    """What the control service knows of one task.

    Attributes:
        is_placed: Whether `task` is final. If not, roles are assigned once all tasks have registered.
        owns_child: Whether its agent starts and terminates its process; see `Registration`.
        attempt: The last attempt for which the task has sent its address; 0 before it has registered.
        is_connected: Whether its connection is open, or was when its agent terminated or was lost.
        is_gone: Its agent has terminated or is lost.
        is_done: Its child has ended and is not started again in this attempt.
        last_heartbeat_at: When the service last accepted a message of its agent, or first registered it. A new
            connection alone does not count.
        disconnected_at: When its connection broke, if it is not connected.
        wanted_starts: How many times its child should have been started by now in this attempt.
        released_barrier: Token of its script's last barrier that is over; `barrier_error` says why if it broke.
    """

    rank: int
    task: Task
    role: Role
    is_placed: bool = True
    owns_child: bool = True
    node: str = ""
    address: Address | None = None
    attempt: int = 0
    incarnation: str = ""
    is_connected: bool = False
    is_gone: bool = False
    is_done: bool = False
    last_heartbeat_at: float = 0.0
    disconnected_at: float = 0.0
    wanted_starts: int = 0
    observed: ObservedState = field(default_factory=ObservedState)
    started_at: float | None = None
    ended_at: float | None = None
    released_barrier: str = ""
    barrier_error: str = ""

    def begin_attempt(self, attempt: int) -> None:
        """Reset everything that belongs to the previous attempt."""
        self.observed = ObservedState(attempt=attempt, stop_signal=self.observed.stop_signal)
        self.wanted_starts, self.is_done = 0, False
        self.started_at = self.ended_at = None

    @property
    def needs_others(self) -> bool:
        """Whether a ps must keep running for this task."""
        trains = self.role.is_in_cluster and not self.role.serves
        return trains and not (self.is_done or self.is_gone or self.observed.script.completion)

    @property
    def has_failed(self) -> bool:
        """Whether the task is lost, or its child or script has failed."""
        is_lost = self.is_gone and self.observed.state != "terminated"
        return is_lost or self.observed.script.completion == "failed" or bool(self.observed.returncode)

    @property
    def has_registered(self) -> bool:
        return bool(self.incarnation)

    @property
    def name(self) -> str:
        return str(self.task) if self.is_placed else f"rank {self.rank}"

    def __str__(self) -> str:
        place = f" on {self.node}" if self.node else f" (rank {self.rank})" if self.is_placed else ""
        return f"{self.name}{place}"
