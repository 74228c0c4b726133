"""A running `tf4slurm run` for tests: its children, its events, its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until

CHILD = Path(__file__).with_name("child.py")
TF4SLURM = str(Path(sys.executable).with_name("tf4slurm"))
ROLES = ("--ps", "1", "--workers", "2")
NAMES = ("chief-0", "ps-0", "worker-0", "worker-1")
"""The children of a job with these options."""

HEARTBEAT_TIMEOUT = "60"
"""Seconds; longer than the tests wait until no process is left, so that agents do not end by themselves before that."""

STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURMD_NODENAME": "n1",
}
"""Variables of a task of a step, as srun sets them."""

_KNOWN_TOKEN = ("5ec2e7" * 11)[:64]
_SITECUSTOMIZE = f"""
import secrets
make = secrets.token_hex
secrets.token_hex = lambda size=None: {_KNOWN_TOKEN!r} if size == 32 else make(size)
"""


def know_secret(patch: pytest.MonkeyPatch, directory: Path) -> str:
    """Give the jobs of a test a known token and return it; no file of the jobs contains it."""
    place = directory / "known-secret"
    place.mkdir()
    (place / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
    code = "from tf4slurm.control.credentials import create_credentials; print(create_credentials().shared.token)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert made == _KNOWN_TOKEN
    return made


def end_processes(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Kill the processes that still run, and wait for all."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Job:
    """One job of test children (child.py) in its own directory; as a context manager it kills a job that still runs."""

    def __init__(self, directory: Path, start: Callable[..., subprocess.Popen[str]] = subprocess.Popen) -> None:
        """`start` is subprocess.Popen, or starts the command on a host of the lab with the same arguments."""
        self.directory = directory
        self.children = directory / "children"
        self.children.mkdir()
        self._start = start
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process is not None and self.process.poll() is None:  # the test has failed
            self.process.kill()
            self.process.wait()

    def start(self, *options: str, command: Sequence[str] | None = None, prefix: Sequence[str] = ()) -> None:
        """Start `tf4slurm run` with these options; `prefix` is put before it, such as salloc and its options.

        The heartbeat timeout is longer than a busy machine may hold a process, unless the test gives its own.
        """
        if "--heartbeat-timeout" not in options:
            options = ("--heartbeat-timeout", HEARTBEAT_TIMEOUT, *options)
        command = command or (sys.executable, str(CHILD), str(self.children))
        with (self.directory / "stdout").open("w") as stdout, (self.directory / "stderr").open("w") as stderr:
            self.process = self._start(
                [*prefix, TF4SLURM, "run", "--runs-directory", str(self.directory / "runs"), *options, "--", *command],
                stdout=stdout,
                stderr=stderr,
                text=True,
            )

    def wait_for_child(self, name: str, number: int = 1, timeout_seconds: float = 60) -> dict[str, Any]:
        """Wait until the child "worker-0" has started for the given time; return the facts that it wrote."""
        path = self.children / f"{name}.{number}"
        assert wait_until(path.exists, timeout_seconds), f"{name} did not start; {self.stderr}"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end_child(self, name: str, code: int = 0) -> None:
        draft = self.children / f"draft-{name}.exit"
        draft.write_text(str(code))
        draft.replace(self.children / f"{name}.exit")

    def send_signal(self, number: int) -> None:
        """Send a signal to `tf4slurm run`."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_seconds: float = 60) -> int:
        """Wait for the end of `tf4slurm run`; return its exit code."""
        assert self.process is not None
        return self.process.wait(timeout_seconds)

    @property
    def run_directory(self) -> Path:
        (found,) = (self.directory / "runs").iterdir()
        return found

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_directory / "result.json").read_text())
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        whole, _, _ = (
            (self.run_directory / "events.jsonl").read_text().rpartition("\n")
        )  # the last line may be incomplete
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for_event(self, kind: str, task: str | None = None, timeout_seconds: float = 60) -> None:
        """Wait until events.jsonl has this event."""

        def has_event() -> bool:
            return any(event["kind"] == kind and event["task"] == task for event in self.events)

        assert wait_until(has_event, timeout_seconds), f"no {kind} of {task}: {self.events}"

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()
