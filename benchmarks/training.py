"""Training steps per second of the tutorials' scripts, under tf4slurm and started by hand."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.by_hand import tf_configs
from benchmarks.measure import Figure, ratio
from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab

_TUTORIALS = Path(__file__).parents[1] / "TUTORIALS"
DIGITS = _TUTORIALS / "train_digits.py"
_BY_HAND = Path(__file__).with_name("by_hand.py")
_PATIENCE_SECONDS = 300


class _Script(NamedTuple):
    """A training script, its roles and its options; {report} in them is the path of its report."""

    name: str
    path: Path
    roles: tuple[str, ...]
    options: tuple[str, ...]

    def command(self, report: Path) -> list[str]:
        options = [option.format(report=report) for option in self.options]
        return [sys.executable, str(self.path), *options, "--report-json", str(report)]

    def under_tf4slurm(self, directory: Path, report: Path) -> list[str]:
        roles = ["--ps", str(self.roles.count("ps")), "--workers", str(self.roles.count("worker"))]
        return [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *roles, "--", *self.command(report)]


_SCRIPTS = (
    _Script("digits", DIGITS, ("chief", "ps", "worker", "worker"), ("--epochs", "80")),
    _Script(
        "recommender",
        _TUTORIALS / "train_recommender.py",
        ("chief", "ps", "ps", "worker"),
        ("--users", "600000", "--items", "400000", "--steps", "800", "--checkpoints", "{report}.checkpoints"),
    ),
)


def measure_training(directory: Path, rounds: int) -> list[Figure]:
    """Train by four processes on this host."""

    def train(script: _Script, report: Path, is_ours: bool) -> None:
        if is_ours:
            ours = script.under_tf4slurm(directory, report)
            subprocess.run(ours, check=True, capture_output=True, timeout=_PATIENCE_SECONDS)
        else:
            _start_by_hand(script.roles, script.command(report))

    return [figure for script in _SCRIPTS for figure in _compare(script, "", directory, rounds, train)]


def measure_training_on_slurm(directory: Path, rounds: int) -> list[Figure]:
    """Train on four hosts of a real Slurm; by hand, each task makes TF_CONFIG from Slurm's variables."""
    with SlurmLab() as lab:

        def train(script: _Script, report: Path, is_ours: bool) -> None:
            if is_ours:
                job = script.under_tf4slurm(directory, report)
            else:
                one = [sys.executable, str(_BY_HAND), ",".join(script.roles), *script.command(report)]
                by_hand = shlex.join(["srun", "-Q", f"-n{len(script.roles)}", *one])
                # ps and workers never exit: the end of the allocation kills them.
                wait = f"for i in $(seq 2000); do sleep 0.1; [ -s {report} ] && exit 0; done; exit 1"
                job = ["bash", "-c", f"{by_hand} & {wait}"]
            lab.run("salloc", "-Q", "-N4", "-n4", *job, timeout_seconds=_PATIENCE_SECONDS)
            lab.wait_idle()

        return [figure for script in _SCRIPTS for figure in _compare(script, " on 4 hosts", directory, rounds, train)]


def _compare(
    script: _Script, where: str, directory: Path, rounds: int, train: Callable[[_Script, Path, bool], None]
) -> list[Figure]:
    """Train with one script, in turns under tf4slurm and by hand."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for is_ours in (True, False) if number % 2 == 0 else (False, True):
            report = directory / f"{script.name}-{number}-{'ours' if is_ours else 'theirs'}"
            train(script, report, is_ours)
            found = json.loads(report.read_text())
            rates[is_ours].append(found["steps"] / found["seconds"])
    name, beside = script.name, "the same by srun" if where else "the same by hand"
    return [
        Figure(f"{name}{where}, training steps per second under tf4slurm", "1/s", tuple(rates[True])),
        Figure(f"{name}{where}, training steps per second by hand", "1/s", tuple(rates[False])),
        ratio(f"{name}{where}, under tf4slurm / by hand", rates[True], rates[False], ">= 0.98", beside=beside),
    ]


def _start_by_hand(roles: Sequence[str], command: list[str]) -> None:
    """Write TF_CONFIG, start all processes, and kill those that never exit, as users do without a launcher."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in roles]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, "TF_CONFIG": config}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for config in tf_configs(roles, [f"127.0.0.1:{port}" for port in ports])
    ]
    try:
        assert processes[roles.index("chief")].wait(timeout=_PATIENCE_SECONDS) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
