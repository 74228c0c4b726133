"""What is known of one task of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from tf4slurm.cluster import Address, Task
from tf4slurm.control.messages import ObservedState
from tf4slurm.roles import Role


@dataclass
class TaskRecord:
    """What is known of one task.

    Attributes:
        owns_child: Whether its agent starts and terminates its process; see `Registration`.
        is_placed: Whether its task is known already; before, it only stands for the number of them.
        is_connected: Whether its connection stands, or stood when its agent left or was lost.
        is_gone: Its agent has left or is lost.
        attempt: The last forming of the cluster for which it has an address.
        is_done: Its child has ended and nobody waits for it any more.
        last_heartbeat_at: When the service last accepted a message of its agent, or registered it for the first time.
        disconnected_at: When its connection was lost, while it is.
        wanted_starts: How often its child should have been started by now in this attempt.
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
        """Forget what was of the last attempt."""
        self.observed = ObservedState(attempt=attempt, stop_signal=self.observed.stop_signal)
        self.wanted_starts, self.is_done = 0, False
        self.started_at = self.ended_at = None

    @property
    def needs_others(self) -> bool:
        """Whether a ps must stay for it."""
        is_out = self.role.serves or not self.role.is_in_cluster
        return not (is_out or self.is_done or self.is_gone or self.observed.script.completion)

    @property
    def has_failed(self) -> bool:
        """Whether its work ended badly."""
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
