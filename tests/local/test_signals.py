"""Each catchable signal to each process of a local job, and what follows. For a guard see test_guard.py."""

from __future__ import annotations

import enum
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import psutil
import pytest

from tests.jobs import ROLES, Job
from tests.processes import child_of, wait_until_gone


def _signals(*names: str) -> list[signal.Signals]:
    return [getattr(signal, f"SIG{name}") for name in names if hasattr(signal, f"SIG{name}")]


STOPS = _signals("TERM", "INT", "HUP", "USR1", "USR2")
OTHERS = _signals("QUIT", "ALRM", "XCPU", "VTALRM", "PROF", "IO", "PWR", "STKFLT")
HARMLESS = _signals("CHLD", "URG", "WINCH", "CONT", "PIPE", "XFSZ")
"""The kernel ignores the first four by default, Python the last two."""


class Effect(enum.Enum):
    """What follows a signal."""

    STOPS = "the job saves and stops, with 128 + the number"
    STOPS_NOW = "the job stops without a save, with 128 + the number"
    NOTHING = "the job continues"
    FAILS = "the job fails, with 128 + the number"
    KILLS_LAUNCHER = "without a launcher, the agents end their tasks"


TABLE: Mapping[str, Mapping[Effect, Sequence[signal.Signals]]] = {
    "launcher": {
        Effect.STOPS: [*STOPS, signal.SIGALRM, signal.SIGXCPU],
        Effect.NOTHING: HARMLESS,
        Effect.STOPS_NOW: [signal.SIGQUIT],
        Effect.KILLS_LAUNCHER: [signal.SIGVTALRM],
    },
    "agent": {Effect.STOPS: STOPS, Effect.NOTHING: [*OTHERS, *HARMLESS]},
    "script that asks": {
        Effect.STOPS: [number for number in STOPS if number != signal.SIGINT],  # Python raises KeyboardInterrupt
        Effect.FAILS: OTHERS[:3],
        Effect.NOTHING: HARMLESS,
    },
    "plain script": {Effect.FAILS: [number for number in (*STOPS, *OTHERS[:3]) if number != signal.SIGINT]},
    "ps": {Effect.NOTHING: [*STOPS, *HARMLESS]},
}
"""Target -> effect -> signals. A signal that is missing here has its default effect on its process."""

SCRIPT = """
import json, os, pathlib, sys, time
import tf4slurm
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
directory = pathlib.Path(sys.argv[1])
asks = role == "chief" and sys.argv[2] == "script that asks"
if asks:
    tf4slurm.should_stop()
(directory / f"draft-{role}").write_text("{}")
(directory / f"draft-{role}").replace(directory / f"{role}-0.1")
while not (directory / "chief-0.exit").exists():
    if asks and tf4slurm.should_stop():
        sys.exit(0)
    time.sleep(0.02)
"""


def cases(*effects: Effect) -> list[tuple[str, Effect, signal.Signals]]:
    return [
        (target, effect, number)
        for target, row in TABLE.items()
        for effect in effects
        for number in row.get(effect, ())
    ]


def start(job: Job, target: str) -> int:
    """Start a job; return the process id of the target."""
    roles = ROLES[:2] if target == "ps" else ("--ps", "0")
    command = (sys.executable, "-c", SCRIPT, str(job.children), target)
    job.start(*roles, "--workers", "0", "--grace-period", "60", "--heartbeat-timeout", "10", command=command)
    for name in ("chief-0", *(["ps-0"] if target == "ps" else [])):
        job.wait_for_child(name)
    assert job.process is not None
    if target == "launcher":
        return job.process.pid
    child = child_of("ps/0" if target == "ps" else "chief/0")
    return psutil.Process(child).ppid() if target == "agent" else child


@pytest.mark.parametrize(
    ("target", "effect", "number"),
    cases(Effect.STOPS, Effect.STOPS_NOW, Effect.FAILS, Effect.KILLS_LAUNCHER),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_signal_that_ends_a_job(
    job: Job, process_mark: str, target: str, effect: Effect, number: signal.Signals
) -> None:
    os.kill(start(job, target), number)
    returncode = job.wait()
    if effect is Effect.KILLS_LAUNCHER:
        assert returncode == -number
        assert wait_until_gone(process_mark, timeout_seconds=10 + 30) == []
        return
    assert returncode == 128 + number, job.stderr
    assert job.result["state"] == ("FAILED" if effect is Effect.FAILS else "STOPPED")
    assert number.name in job.result["reason"]


@pytest.mark.parametrize("target", [target for target, row in TABLE.items() if Effect.NOTHING in row])
def test_signals_without_an_effect(job: Job, target: str) -> None:
    process_id = start(job, target)
    for number in TABLE[target][Effect.NOTHING]:
        os.kill(process_id, number)
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr
