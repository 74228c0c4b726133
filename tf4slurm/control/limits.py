"""How long and how often, in one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long and how often; all times in seconds.

    Attributes:
        start_timeout_seconds: From the start until every child may start.
        beat_seconds: Each end of a connection says something at least this often.
        dead_after_seconds: Silence of a task, or of the launcher, that counts as its death.
        reconnect_seconds: A broken connection (not a silent one) that is not back by then counts as the task's death.
        leave_seconds: From SIGTERM to SIGKILL for a child that is told to leave.
        evaluator_seconds: How long a bounded wait lasts after all other waited tasks are done.
        max_worker_restarts: Of each worker.
    """

    start_timeout_seconds: float = 300.0
    beat_seconds: float = 1.0
    dead_after_seconds: float = 10.0
    reconnect_seconds: float = 1.5
    leave_seconds: float = 5.0
    evaluator_seconds: float = 300.0
    max_worker_restarts: int = 3
