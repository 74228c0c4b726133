"""`BarrierMethod`: the control service tells each ps when the last worker is done, has failed or is dead."""

from __future__ import annotations

from tf4slurm.cluster import format_tasks
from tf4slurm.completion_signal import CompletionSignal, completion_signal
from tf4slurm.errors import RendezvousConnectionError, ShutdownError, ShutdownTimeoutError
from tf4slurm.script_api import ScriptChannel, find_script_channel
from tf4slurm.server_dictionary import ServerDictionary
from tf4slurm.shutdown.method import Ending


class BarrierMethod:
    """A `ShutdownMethod`. It needs an agent, or the sidecar that `get_server_dictionary` starts."""

    def __init__(self, own: ServerDictionary) -> None:
        self._own = own
        line = find_script_channel()
        if line is None:
            raise ShutdownError(
                'method="barrier" needs the control service, and this process has no line to it. Call '
                'get_server_dictionary() first, start the script with "tf4slurm run", or take method="queue".'
            )
        self._line: ScriptChannel = line

    def wait_for_workers(self, timeout_seconds: float | None) -> Ending:
        tasks, line = self._own.training_tasks, self._line
        try:
            is_over = line.wait_until(lambda: line.desired.is_training_over, timeout_seconds)
        except RendezvousConnectionError:  # who hosted the service is gone, and nobody can tell us any more
            return Ending(done=(), failed=tasks)
        if not is_over:
            raise ShutdownTimeoutError(
                f"Training was not over within {timeout_seconds} s: some of {format_tasks(tasks)} still run. Look at "
                "their logs, or raise timeout_seconds.",
                missing=[str(task) for task in tasks],
                seconds=timeout_seconds or 0.0,
            )
        failed = set(line.desired.failed_tasks)
        return Ending(
            done=tuple(task for task in tasks if str(task) not in failed),
            failed=tuple(task for task in tasks if str(task) in failed),
        )

    def completion_signal(self) -> CompletionSignal:
        return completion_signal(
            f"line of {self._own.task}", lambda failed: self._line.say(completion="failed" if failed else "done")
        )
