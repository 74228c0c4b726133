"""The command lines of Slurm's programs."""

from __future__ import annotations

from collections.abc import Sequence

from tf4slurm.slurm.allocation import SlurmAllocation


def srun_command(allocation: SlurmAllocation, num_tasks: int, command: Sequence[str]) -> tuple[str, ...]:
    """Return the srun that starts `command` on every task of one step in the allocation.

    What a task's end means is for the launcher to decide, so srun is told not to (a site may have set it to), and the
    step may share its CPUs with other steps of the job: without --overlap it waits for an interactive shell to end.
    """
    options = [f"--ntasks={num_tasks}", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL", "--input=none"]
    if allocation.cpus_per_task is not None:
        options.append(f"--cpus-per-task={allocation.cpus_per_task}")
    return ("srun", *options, *command)
