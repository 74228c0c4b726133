"""Functions for jobs whose tasks the user starts with srun: by `srun tf4slurm task`, or as scripts with sidecars.

The program of `srun tf4slurm task` is `task_program.py`, that of a sidecar is `sidecar_program.py`. Rank 0's process
also runs the launcher or the control service. The other tasks find the service through control.json (mode 0600) in a
run directory whose path contains the step's id. MUNGE, where it works, seals the job's credentials in this file.

srun exits with the highest exit code of its tasks. Therefore rank 0 exits with the job's exit code and the other ranks
with 0. If Slurm misses the end of rank 0, the other ranks exit with the job's exit code. A killed task counts as 128 +
the number of its signal, so the step is cancelled only if a task does not end by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.errors import InterfaceError, LaunchError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.network.interfaces import interface_address
from tf4slurm.slurm.commands import cancel_step
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.spec.job_spec import JobSpec

logger = logging.getLogger(__name__)

FILE_SYSTEM_SECONDS = 5.0
"""Maximum seconds that a task waits for the file system of the run directory after the loss of rank 0."""
_OUTPUT_SECONDS = 1.0  # between a task's last message and the end of the step
_FAILURE_SECONDS = 10.0  # for a task to report that its host lacks the interface


def make_rendezvous(step: SlurmStep, spec: JobSpec, directory: RunDirectory, *, owns_child: bool) -> Rendezvous:
    """Return a task's rendezvous. If the host lacks the job's interface, the task registers only to report this.

    `owns_child`: see `Rendezvous`.
    """
    failure = None
    try:
        if spec.interface:
            interface_address(spec.interface, step.node_name)
    except InterfaceError as error:  # rank 0 may have ended with the same error
        failure = error
        seconds = min(spec.start_timeout_seconds, _FAILURE_SECONDS)
        spec = dataclasses.replace(spec, start_timeout_seconds=seconds)
    rendezvous = Rendezvous(step, spec, lambda: ControlEndpoint.from_file(directory.control), owns_child=owns_child)
    rendezvous.failure = failure
    return rendezvous


def end_step(step: SlurmStep) -> None:
    """Cancel the step, after a second for what its tasks have written. If that fails, log an error.

    Slurm ends the tasks with SIGKILL. Without that second, srun may not print the last log message, which has the
    reason.
    """
    time.sleep(_OUTPUT_SECONDS)
    try:
        cancel_step(step)
    except LaunchError as error:
        logger.error("what is left of the step could not be ended: %s", error)


def claim(directory: RunDirectory) -> bool:
    """Remove control.json. Return False if another task has removed it.

    Several tasks call this function after the loss of rank 0. Only one of them gets True: the task that then writes the
    job's result or cancels the step. If the file cannot be removed, each of them gets True, so that the step ends.
    """
    try:
        directory.control.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s cannot be removed: %s", directory.control, error.strerror)
    return True
