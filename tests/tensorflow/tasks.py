"""The tasks of a small cluster as processes on this host, each configured by TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.processes import wait_until
from tf4slurm.network.ports import hold_port


class Tasks:
    """A cluster of ps and workers that run scripts; `end` kills the remaining tasks and releases their ports."""

    def __init__(self, directory: Path, ps: int, workers: int) -> None:
        self._ports = [hold_port() for _ in range(ps + workers)]
        addresses = [f"127.0.0.1:{held.port}" for held in self._ports]
        self.cluster = {"ps": addresses[:ps], "worker": addresses[ps:]}
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, script: Path, *arguments: str) -> None:
        """Start the task "ps/0" of the cluster, as an agent would."""
        role, _, index = name.partition("/")
        config = {"cluster": self.cluster, "task": {"type": role, "index": int(index)}}
        environ = {"TF_CONFIG": json.dumps(config), "TF4SLURM_TASK": name, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ["TF_GRPC_REUSE_PORT"] = "true"  # TensorFlow's server shares the held port
        with self._path(name).open("wb") as output:
            command = [sys.executable, "-u", str(script), *arguments]
            self._processes[name] = subprocess.Popen(
                command, env=os.environ | environ, stdout=output, stderr=subprocess.STDOUT
            )

    def output(self, name: str) -> str:
        return self._path(name).read_text(errors="replace")

    def wait_for_line(self, name: str, text: str, timeout_seconds: float = 100) -> None:
        assert wait_until(lambda: text in self.output(name), timeout_seconds), self.output(name)

    def wait(self, name: str, timeout_seconds: float = 100) -> int:
        """Wait for the end of a task; return its exit code."""
        assert wait_until(lambda: self._processes[name].poll() is not None, timeout_seconds), self.output(name)
        return self._processes[name].wait()

    def wait_all(self, names: Sequence[str], timeout_seconds: float = 150) -> list[int]:
        deadline = time.monotonic() + timeout_seconds
        return [self.wait(name, deadline - time.monotonic()) for name in names]

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for held in self._ports:
            held.close()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name.replace('/', '-')}.output"
