"""The job that `tf4slurm test` runs: its options, and the sentence about its result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tf4slurm.cluster import Task
from tf4slurm.launch.result import Result
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec import JobSpec

# Not "-m", with which a json.py in the user's directory would replace Python's json module.
_SCRIPT = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from tf4slurm.{module} import main; main({seconds})"
_LOG_BYTES = 64 * 1024


def smoke_test_spec(
    options: Mapping[str, Any], allocation: SlurmAllocation | None, *, is_plain: bool, timeout_seconds: float
) -> JobSpec:
    """Return the spec of a job with a chief, a ps and a worker on this host, or with all tasks of an allocation.

    Args:
        options: Fields of `JobSpec` that the user has set.
        is_plain: Whether the tasks run without TensorFlow.
        timeout_seconds: Timeout in seconds for the rendezvous, and again for training.
    """
    module = "doctor.plain_smoke" if is_plain else "tensorflow.smoke"
    num_tasks = allocation.num_tasks if allocation else None
    return JobSpec(
        command=(sys.executable, "-c", _SCRIPT.format(module=module, seconds=timeout_seconds)),
        name="test",
        workers=1 if num_tasks is None else None,
        start_timeout_seconds=timeout_seconds,
        grace_period_seconds=5.0,
        max_worker_restarts=0,
        **options,
    ).for_tasks(num_tasks)


def describe_success(result: Result) -> str:
    """Return a sentence about a successful test, with the last line that its chief printed."""
    file, directory = result.file, result.run_directory.path
    with result.run_directory.log(Task("chief", 0), file.attempts or 1).open("rb") as log:
        lines = log.read()[-_LOG_BYTES:].decode(errors="replace").strip().splitlines()
    hosts = list(dict.fromkeys(task.node for task in file.tasks if task.node))
    where = "on this host"
    if len(hosts) > 1:
        where = f"on {len(hosts)} hosts ({', '.join(hosts)}), each address checked from another host"
    return (
        f"It works: {len(file.tasks)} tasks {where}; {lines[-1] if lines else 'the chief printed nothing'}; all "
        f"processes ended. {file.seconds:.1f} s, logs in {directory}"
    )
