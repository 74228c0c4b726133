"""How long and how often, in one value."""

from __future__ import annotations

from dataclasses import dataclass

_BEATS_PER_SECOND = 100
_LATEST_BEAT = 0.4  # of the dead time
_HANDSHAKE_SECONDS = 3.0
_HANDSHAKES_PER_SECOND = 500  # fewer than two cores do, so that all tasks may come at the same time


@dataclass(frozen=True)
class Limits:
    """How long and how often; all times in seconds.

    Attributes:
        start_timeout_seconds: From the start until every child may start.
        heartbeat_interval_seconds: How often the service requests a heartbeat of each task, at most; see
            `heartbeat_interval_of`.
        heartbeat_timeout_seconds: Heartbeat timeout: a task, or the launcher, that sends nothing for so long is lost.
        reconnect_seconds: A broken connection (not a silent one) that is not back by then counts as the task's death.
        leave_seconds: From SIGTERM to SIGKILL for a child that is told to leave.
        finish_seconds: How long a bounded wait lasts: for an evaluator after all others are done, and for all others
            after a ps has left by itself.
        grace_period_seconds: From the request to stop until every task is terminated; 0 to terminate at once.
        stall_seconds: No new step for so long, once steps are reported, counts as the job's failure; None for no limit.
        require_servers: Whether a job in which no task opens a TensorFlow server is a failure, not only warned of.
        max_worker_restarts: Of each worker.
        max_attempts: How often the cluster is formed, the first time included.
    """

    start_timeout_seconds: float = 300.0
    heartbeat_interval_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 10.0
    reconnect_seconds: float = 1.5
    leave_seconds: float = 4.0
    finish_seconds: float = 300.0
    grace_period_seconds: float = 25.0
    stall_seconds: float | None = None
    require_servers: bool = False
    max_worker_restarts: int = 3
    max_attempts: int = 1

    def heartbeat_interval_of(self, num_tasks: int) -> float:
        """Return how often each of so many tasks is asked whether it lives, in seconds.

        What beats cost is then the same for 100 tasks and more, as long as the dead time has room for two of them.
        """
        return max(
            self.heartbeat_interval_seconds,
            min(num_tasks / _BEATS_PER_SECOND, _LATEST_BEAT * self.heartbeat_timeout_seconds),
        )


def handshake_seconds(num_tasks: int) -> float:
    """Return how many seconds a new connection may take for its TLS handshake, and again until it has a call."""
    return _HANDSHAKE_SECONDS + num_tasks / _HANDSHAKES_PER_SECOND
