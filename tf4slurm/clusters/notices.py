"""Print in a notebook what happens to its cluster, because perhaps no cell runs, and nobody sees the launcher's output.

A thread prints the events of `EVENTS`, and once each: that the job is asked to stop, that a ps is lost, and the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tf4slurm.control.messages import DesiredState
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.jobs.progress import print_notice
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import Event
from tf4slurm.scripts.channel import ScriptChannel

EVENTS = ("restarting", "not_restarted", "disconnected", "reconnected", "replaced", "joined", "leaving", "lost")
"""The events of tasks that are printed: some interrupt the training, others change the number of workers."""

_POLL_SECONDS = 1.0
_END_SECONDS = 15.0  # from the last message of the agent to the result of the job


class NoticePrinter:
    """Prints what happens to a cluster, from its start, or from `attach`, to its end."""

    def __init__(
        self,
        directory: RunDirectory,
        channel: ScriptChannel,
        find_end: Callable[[float], str],
        has_left: Callable[[], bool],
    ) -> None:
        """Store the arguments.

        Args:
            directory: The run directory of the job.
            channel: The script channel of this process, the chief.
            find_end: Returns why the cluster has ended or a ps is lost. See `NotebookCluster.find_end`.
            has_left: Returns whether this process has closed or left the cluster, so that nothing is printed any more.
        """
        self._directory = directory
        self._channel = channel
        self._find_end = find_end
        self._has_left = has_left
        self._shown: set[str] = set()
        self._num_events = len(directory.read_lines(Event))
        self._size = 0

    def run(self) -> None:
        """Print until the end. Call this method in a thread."""
        has_ended = False
        while not has_ended:
            try:
                self._channel.wait_until(lambda: bool(self._news() - self._shown), _POLL_SECONDS)
            except RendezvousConnectionError:  # the agent has exited
                has_ended = True
            if self._has_left():
                return
            self._print_events()
            for news in self._news() - self._shown:
                self._shown.add(news)
                has_ended = has_ended or news == "terminate_reason"
                if news == "stop_reason":
                    self._print_stop(self._channel.desired)
                elif news == "failure_reason":
                    print_notice(self._find_end(0))
        if (end := self._find_end(_END_SECONDS)) and not self._has_left():
            print_notice(end)

    def _news(self) -> set[str]:
        desired = self._channel.desired
        return {name for name in ("stop_reason", "failure_reason", "terminate_reason") if getattr(desired, name)}

    def _print_stop(self, desired: DesiredState) -> None:
        seconds = desired.grace_period_seconds
        text = f"{desired.stop_reason} Its ps and workers end in at most {seconds:g} s: save now."
        print_notice(f"{self._directory.path.name} stops. {text}")

    def _print_events(self) -> None:
        with contextlib.suppress(OSError):
            size = self._directory.events.stat().st_size
            if size == self._size:
                return
            self._size = size
        events = self._directory.read_lines(Event)
        for event in events[self._num_events :]:
            if event.kind in EVENTS:
                print_notice(event.text)
        self._num_events = len(events)
