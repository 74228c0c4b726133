"""Handle Ctrl-Z in the terminal of a launcher.

Only the launcher's process group receives the signal. The launcher stops (SIGSTOP) the processes of its local tasks
before itself, and continues them when it is continued itself, so that the job only loses time. Without this, agents
would count the stopped launcher as lost. Tasks of Slurm cannot be stopped from here: the launcher only logs a warning.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from tf4slurm.system.proc import Others, continue_processes, stop_descendants

logger = logging.getLogger(__name__)


def handle_suspension(launcher_loss_seconds: float, *, is_local: bool, others: Others) -> None:
    """Add a handler of Ctrl-Z (SIGTSTP) to the running event loop, unless SIGTSTP is ignored or has a handler.

    At Ctrl-Z, the handler stops the job's processes if the tasks are local, and then this process. It continues the
    job's processes when this process is continued. If the tasks are not local, they run on, and the handler logs a
    warning.

    Args:
        launcher_loss_seconds: Seconds after which agents count a stopped launcher as lost, for the warning.
        is_local: Whether the tasks are processes of this host.
        others: Descendants of this process that do not belong to the job (see `Others`). They are not stopped.
    """
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, _suspend, loop, launcher_loss_seconds, is_local, others)


def _suspend(loop: asyncio.AbstractEventLoop, launcher_loss_seconds: float, is_local: bool, others: Others) -> None:
    if not is_local:
        logger.warning(
            "the launcher is suspended: Slurm's tasks run on, and end after %g s without it (--heartbeat-timeout)",
            launcher_loss_seconds,
        )
    stopped = stop_descendants(others) if is_local else []
    loop.remove_signal_handler(signal.SIGTSTP)
    # Returns when this process is continued. Unlike SIGSTOP, it does not stop a process that no shell can continue.
    signal.raise_signal(signal.SIGTSTP)
    continue_processes(stopped)
    loop.add_signal_handler(signal.SIGTSTP, _suspend, loop, launcher_loss_seconds, is_local, others)
