"""Where the messages of docs/troubleshooting/ are produced, and what a producer is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM, Job
from tests.slurm.lab import SlurmLab

TRAIN = "train.py"


@dataclass(frozen=True)
class Workplace:
    """A new user's directory, in which a mistake is made; every method returns what the terminal shows."""

    directory: Path
    request: pytest.FixtureRequest

    def shell(self, *command: str, env: Mapping[str, str] | None = None, timeout_seconds: float = 120) -> str:
        """Run any command here."""
        home = {"XDG_CONFIG_HOME": str(self.directory / "config"), "XDG_STATE_HOME": str(self.directory / "state")}
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={**os.environ, **home, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_seconds,
        )
        return done.stdout

    def tf4slurm(self, *arguments: str, **environ: str) -> str:
        return self.shell(TF4SLURM, *arguments, env=environ)

    def write(self, name: str, text: str) -> str:
        (self.directory / name).write_text(text)
        return name

    def run_script(self, text: str, *options: str, timeout_seconds: float = 120) -> str:
        """Run a job of a chief, a ps and a worker with this script."""
        roles = ("--ps", "1", "--workers", "1")
        command = (TF4SLURM, "run", *roles, *options, "--", sys.executable, self.write(TRAIN, text))
        return self.shell(*command, timeout_seconds=timeout_seconds)

    @cached_property
    def job(self) -> Job:
        """A job of tests/child.py, for mistakes that need something to be done while it runs."""
        job: Job = self.request.getfixturevalue("job")
        return job

    @cached_property
    def lab(self) -> SlurmLab:
        lab: SlurmLab = self.request.getfixturevalue("lab")
        return lab

    def login(self, *command: str | Path, **environ: str) -> str:
        """Run a command on the login host of the lab."""
        home = {"XDG_CONFIG_HOME": str(self.directory / "config")}
        done = self.lab.run(*command, cwd=self.directory, env={**home, **environ}, check=False)
        return done.stdout + done.stderr

    def batch(self, *lines: str, options: Sequence[str] = ("-N1", "-n1"), wait: bool = True) -> str:
        """Submit a batch script of these lines; return its output, after its end if `wait`."""
        script = self.write("job.sh", "\n".join(["#!/bin/bash", *lines, ""]))
        self.login("sbatch", *options, "-o", "slurm.out", script)
        if wait:
            self.lab.wait_idle()
        output = self.directory / "slurm.out"
        return output.read_text() if output.exists() else ""

    def mistake(self, name: str) -> str:
        """Return the output of a function of mistakes.py, which all run in one process."""
        outputs: Mapping[str, str] = self.request.getfixturevalue("mistakes")
        return outputs[name]


@dataclass(frozen=True)
class Producer:
    """A function that makes a mistake and returns the output; `is_long` if `make test-long` alone runs it."""

    produce: Callable[[Workplace], str]
    is_long: bool = False


Table = Mapping[str, Producer]
"""First words of each message on the pages -> how it is produced."""
