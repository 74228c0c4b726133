"""A real Jupyter kernel, on this host or on the login host of a Slurm lab."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from tests.processes import wait_until

SCALE = """
import time
import tensorflow as tf
import tf4slurm
from tf4slurm.tensorflow import parameter_server_strategy, run_steps

cluster = {cluster}.start()
strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    total = tf.Variable(0.0)

def step_fn():
    return total.assign_add(1.0)

def train_until(condition):
    deadline = time.monotonic() + 90
    while not condition(found := run_steps(coordinator, step_fn, 200, steps_per_call=5).steps_by_worker):
        assert time.monotonic() < deadline, (found, cluster.status())
    return found

cluster.scale(2)
cluster.scale(2)
found = train_until(lambda steps: len(steps) > 1 and steps[1] > 0)
print("grown", len(found), cluster.status().tasks[-1].task, cluster.status().tasks[-1].has_joined)
cluster.scale(1)
train_until(lambda steps: not any(steps[1:]))
print("shrunk", float(total) > 0)
for workers in (0, None):
    try:
        cluster.scale(workers)
    except tf4slurm.errors.OptionError as error:
        print(error)
cluster.scale(2)
cluster.close()
print("end", cluster.status().state)
"""
"""A program that scales a cluster of one ps and one worker. {cluster} is the expression that makes it."""


class Notebook:
    """A real Jupyter kernel, whose cells a test runs."""

    def __init__(self, client: BlockingKernelClient, manager: KernelManager) -> None:
        self._client = client
        self._manager = manager
        self.standard_error = ""  # of all cells

    def run(self, code: str, on_output: Callable[[str], None] = lambda text: None) -> str:
        """Run a cell. Return what it printed. Call `on_output` with each text that it prints."""
        printed, error = self._execute(code, on_output)
        assert not error, error
        return printed

    def fail(self, code: str) -> str:
        """Run a cell that raises an exception. Return the type and the message of the exception."""
        printed, error = self._execute(code)
        assert error, printed
        return error

    def interrupt(self, code: str, begun: Path) -> str:
        """Interrupt a cell when it has created the file `begun`. Return the type of its exception."""
        _, error = self.interrupt_when(code, begun.exists)
        assert error
        return error.partition(":")[0]

    def interrupt_when(self, code: str, condition: Callable[[], bool]) -> tuple[str, str]:
        """Interrupt a cell when a condition is true. Return what it printed, and its exception, "" without one."""

        def interrupt() -> None:
            assert wait_until(condition, 60)
            self._manager.interrupt_kernel()

        thread = threading.Thread(target=interrupt)
        thread.start()
        answer = self._execute(code)
        thread.join()
        return answer

    def restart(self, *, now: bool) -> None:
        """Restart the kernel, as the button of JupyterLab does. With `now`, kill it."""
        self._manager.restart_kernel(now=now)
        self._client.wait_for_ready(60)

    def _execute(self, code: str, on_output: Callable[[str], None] = lambda text: None) -> tuple[str, str]:
        lines: list[str] = []

        def note(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                lines.append(message["content"]["text"])
                on_output(lines[-1])
            elif message["msg_type"] == "stream":
                self.standard_error += message["content"]["text"]

        content = self._client.execute_interactive(code, timeout=120, output_hook=note)["content"]
        error = f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""
        return "".join(lines), error


@contextmanager
def kernel(directory: Path, prefix: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """Start a Jupyter kernel in a directory. At the end, shut it down if it still runs.

    Args:
        prefix: Words before the command of the kernel, which start it on another host of the lab.
        environ: Variables added to those of this process.
    """
    sockets = tempfile.mkdtemp(
        prefix="k"
    )  # Unix sockets, whose paths must be short, because the lab has its own network
    manager = KernelManager(transport="ipc", ip=f"{sockets}/s", connection_file=f"{sockets}/c.json")
    words = [*prefix, sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=words, display_name="test", language="python")
    manager.start_kernel(cwd=str(directory), env={**os.environ, **(environ or {})})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield Notebook(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        shutil.rmtree(sockets, ignore_errors=True)
