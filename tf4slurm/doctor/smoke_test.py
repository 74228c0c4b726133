"""Define the job that `tf4slurm test` runs, run its tasks without TensorFlow, and describe its result."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tf4slurm.cluster import Address, Task
from tf4slurm.network.reachability import answer_checks, find_fault
from tf4slurm.server_dictionary import ServerDictionary, current_server_dictionary
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.program import main_command

if TYPE_CHECKING:
    from tf4slurm.launch.result_files import Result
    from tf4slurm.slurm.environ import SlurmAllocation

_LOG_BYTES = 64 * 1024
_PAUSE_SECONDS = 0.05


def smoke_test_spec(
    options: Mapping[str, Any], allocation: SlurmAllocation | None, *, is_plain: bool, timeout_seconds: float
) -> JobSpec:
    """Return the spec of the test job: a chief, a ps and a worker, or as many workers as an allocation has tasks for.

    Args:
        options: Fields of `JobSpec` that the user has set.
        allocation: The allocation in which the job runs, or None to run on this host.
        is_plain: Whether the tasks run without TensorFlow.
        timeout_seconds: Timeout in seconds for each of rendezvous, import of TensorFlow, connection and training.
    """
    module = "doctor.smoke_test" if is_plain else "tensorflow.smoke"
    num_tasks = allocation.num_tasks if allocation else None
    return JobSpec(
        command=main_command(module, timeout_seconds),
        name="test",
        workers=1 if num_tasks is None else None,
        start_timeout_seconds=timeout_seconds,
        grace_period_seconds=5.0,
        max_worker_restarts=0,
        **options,
    ).for_tasks(num_tasks)


def describe_success(result: Result) -> str:
    """Return a text about a successful test, with the last line that its chief printed."""
    file = result.file
    directory = result.run_directory.path
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


def main(timeout_seconds: float) -> None:
    """Run the task that TF_CONFIG names, without TensorFlow.

    The chief checks that all other tasks answer within `timeout_seconds`, and exits with 1 otherwise. The other tasks
    answer until they are terminated.
    """
    current = current_server_dictionary()
    asyncio.run(_check_others(current, timeout_seconds) if current.task_type == "chief" else _answer(current))


async def _answer(current: ServerDictionary) -> None:
    address = Address.from_text(current.cluster[current.task_type][current.task_index])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    # The agent holds the port. With reuse_port this process can listen on it too, like TensorFlow's server.
    listener = socket.create_server(("", address.port), family=family, reuse_port=True, dualstack_ipv6=both)
    server = await answer_checks(listener, str(current.task), current.task_index)
    await server.serve_forever()


async def _check_others(current: ServerDictionary, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    others = [
        (f"{role}/{index}", index, Address.from_text(address))
        for role, addresses in current.cluster.items()
        for index, address in enumerate(addresses)
        if role != "chief"
    ]
    for name, index, address in others:  # the name is the secret of its reachability check
        while fault := await find_fault(name, index, address, name, max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise SystemExit(f"tf4slurm test: {fault}")
            await asyncio.sleep(_PAUSE_SECONDS)  # the task is starting
    print(f"{len(others)} of {len(others)} tasks answered the chief (plain processes, no TensorFlow)", flush=True)
