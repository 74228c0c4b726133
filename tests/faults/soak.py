"""Job after job on this host, each disturbed at a random moment: `python -m tests.faults.soak [--jobs N] [--seed N]`.

Every job has a chief, a ps and two workers. Their children are tests/child.py, which stands for TensorFlow here: it
reads TF_CONFIG and listens on its port, and does nothing else. What the soak tries is tf4slurm, in many moments.

What a job is made to suffer follows from the seed and the job's number alone, so a failure can be run again by
itself: `--seed S --only NUMBER`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.jobs import NAMES, ROLES, Job
from tests.processes import MARK_VARIABLE, kill_leftovers, marked_processes, read_process, wait_until, wait_until_gone

HEARTBEAT_TIMEOUT_SECONDS = 1.5
_OPTIONS = (
    "--heartbeat-timeout",
    f"{HEARTBEAT_TIMEOUT_SECONDS}",
    "--heartbeat-interval",
    "0.3",
    "--start-timeout",
    "8",
    "--grace-period",
    "1",
)
_LIVES_SECONDS = (0.4, 4.0)  # from the start of the job until the chief is told to end
_AFTERLIFE_SECONDS = 0.4  # so long after that a fault may still come
_END_SECONDS = 30.0  # the slowest end: an agent is stopped before it joins, and the start times out
_GONE_SECONDS = HEARTBEAT_TIMEOUT_SECONDS + 2.0
_NOTICED_SECONDS = 1.0  # a death is noticed at once; this is for a busy machine
_SILENCE_SECONDS = HEARTBEAT_TIMEOUT_SECONDS + 2.0
_CHILD_CODE = 3
_MAYBE = float("inf")


@dataclass(frozen=True)
class Consequence:
    """The exit codes that a fault may lead to, and how long before the end of a job it is sure to lead to one of them.

    Nearer to the end, or if it met nobody, the exit code may be 0 as well.
    """

    codes: frozenset[int]
    sure_seconds: float = _MAYBE


_LOST, _NOT_FORMED, _STOPPED = 7, 6, 143
_CONSEQUENCES = {
    ("chief", "SIGKILL"): Consequence(frozenset({137}), _NOTICED_SECONDS),
    ("chief", "SIGTERM"): Consequence(frozenset({_STOPPED}), _NOTICED_SECONDS),
    ("chief", "SIGSTOP"): Consequence(frozenset({_LOST}), _SILENCE_SECONDS),
    ("chief", "exit"): Consequence(frozenset({_CHILD_CODE}), _NOTICED_SECONDS),
    ("ps", "SIGKILL"): Consequence(frozenset({137}), _NOTICED_SECONDS),
    ("ps", "SIGTERM"): Consequence(frozenset({_STOPPED})),  # only in the moment before it ignores it
    ("ps", "SIGSTOP"): Consequence(frozenset({_LOST}), _SILENCE_SECONDS),
    ("ps", "exit"): Consequence(frozenset({_CHILD_CODE}), _NOTICED_SECONDS),
    ("worker", "SIGKILL"): Consequence(frozenset()),  # it is restarted in place
    ("worker", "SIGTERM"): Consequence(frozenset()),
    ("worker", "SIGSTOP"): Consequence(frozenset()),
    ("worker", "exit"): Consequence(frozenset({_CHILD_CODE})),  # restarted, it exits again, until that is too often
    ("agent", "SIGKILL"): Consequence(frozenset({_LOST}), _NOTICED_SECONDS),
    ("agent", "SIGTERM"): Consequence(frozenset({_STOPPED, _LOST}), _NOTICED_SECONDS),  # lost: it could not take it yet
    ("agent", "SIGSTOP"): Consequence(frozenset({_LOST, _NOT_FORMED}), _SILENCE_SECONDS),
    ("launcher", "SIGKILL"): Consequence(frozenset({-signal.SIGKILL}), 0.0),
    ("launcher", "SIGTERM"): Consequence(frozenset({_STOPPED, -signal.SIGTERM}), 0.0),  # -15: it could not take it yet
    ("launcher", "SIGSTOP"): Consequence(frozenset({_LOST})),  # if that was longer than the dead time
}


@dataclass(frozen=True)
class Mishap:
    """What one job is made to suffer, and when, and when its chief ends; times in seconds after its start."""

    victim: str
    fault: str
    at_seconds: float
    stopped_seconds: float
    life_seconds: float

    def __str__(self) -> str:
        return f"{self.fault} to {self.victim} after {self.at_seconds:.3f} s of {self.life_seconds:.3f} s"

    def explained_codes(self, *, has_met: bool) -> frozenset[int]:
        """Return the exit codes that this mishap explains; `has_met` is whether the victim was there."""
        consequence = _CONSEQUENCES[self.kind, self.fault]
        is_sure = has_met and self.at_seconds + consequence.sure_seconds < self.life_seconds
        return consequence.codes if is_sure else consequence.codes | {0}

    @property
    def kind(self) -> str:
        """The victim's kind: a role, "agent" or "launcher"."""
        return self.victim.partition(" ")[0].partition("-")[0]


def mishap_of(seed: int, number: int) -> Mishap:
    """Return what this job of this seed has to suffer."""
    dice = random.Random(f"{seed} {number}")
    kind = dice.choice(("child", "child", "agent", "launcher"))
    name = dice.choice(NAMES)
    faults = ["SIGKILL", "SIGTERM", "SIGSTOP", *(["exit"] if kind == "child" else [])]
    victim = {"child": name, "agent": f"agent of {name}", "launcher": "launcher"}[kind]
    life_seconds = dice.uniform(*_LIVES_SECONDS)
    at_seconds = dice.uniform(0.0, life_seconds + _AFTERLIFE_SECONDS)
    return Mishap(
        victim, dice.choice(faults), at_seconds, dice.uniform(0.1, 2 * HEARTBEAT_TIMEOUT_SECONDS), life_seconds
    )


def run_job(seed: int, number: int, directory: Path) -> str:
    """Run one job and its mishap; return what came of it.

    Raises:
        AssertionError: It hung, left a process behind, or ended with an exit code that the mishap does not explain.
    """
    mishap = mishap_of(seed, number)
    mark = os.environ[MARK_VARIABLE]
    job = Job(directory)
    started = time.monotonic()
    job.start(*ROLES, *_OPTIONS)
    assert job.process is not None
    try:
        has_happened, has_met, resume_at = False, False, float("inf")
        while job.process.poll() is None and time.monotonic() - started < _END_SECONDS:
            elapsed = time.monotonic() - started
            if not has_happened and elapsed >= mishap.at_seconds:
                has_happened = True
                has_met = _inflict(mishap, job)
                if mishap.victim == "launcher" and mishap.fault == "SIGSTOP":
                    resume_at = elapsed + mishap.stopped_seconds
            if elapsed >= resume_at:
                resume_at = float("inf")
                job.process.send_signal(signal.SIGCONT)
            if elapsed >= mishap.life_seconds and not (job.children / "chief-0.exit").exists():
                job.end_child("chief-0")
            wait_until(lambda: job.process is None or job.process.poll() is not None, 0.01, poll_seconds=0.005)
        code = job.process.poll()
        assert code is not None, f"it hangs after {_END_SECONDS} s"
        explained = mishap.explained_codes(has_met=has_met)
        assert code in explained, f"exit code {code} is not one of {sorted(explained)}"
        left = wait_until_gone(mark, _GONE_SECONDS)
        assert not left, f"left behind: {left}"
        return f"{mishap}: exit code {code} after {time.monotonic() - started:.1f} s"
    except AssertionError as error:
        raise AssertionError(
            f"Job {number} of seed {seed} ({mishap}): {error}\n{job.stdout[-3000:]}\n{job.stderr[-3000:]}"
        ) from None
    finally:
        if job.process.poll() is None:
            job.process.kill()
        job.process.wait()


def _inflict(mishap: Mishap, job: Job) -> bool:
    """Let it happen; return whether whom it is meant for was there."""
    assert job.process is not None
    if mishap.victim == "launcher":
        job.process.send_signal(signal.Signals[mishap.fault])
        return True
    if mishap.fault == "exit":
        job.end_child(mishap.victim, _CHILD_CODE)
        return True
    has_met = False
    for process_id in _find(mishap.victim, job):
        with contextlib.suppress(ProcessLookupError):  # it was just ending
            os.kill(process_id, signal.Signals[mishap.fault])
            has_met = True
    return has_met


def _find(victim: str, job: Job) -> list[int]:
    """Return the process id of a child or an agent; none if it is not there."""
    name = victim.removeprefix("agent of ")
    entry = f"TF4SLURM_TASK={name.replace('-', '/')}".encode()
    children = [p.pid for p in marked_processes(os.environ[MARK_VARIABLE]) if entry in _environ(p.pid)]
    if not victim.startswith("agent"):
        return children
    try:
        if children:
            return [psutil.Process(children[0]).ppid()]
        assert job.process is not None
        return [p.pid for p in psutil.Process(job.process.pid).children()[NAMES.index(name) :][:1]]
    except psutil.NoSuchProcess:
        return []


def _environ(process_id: int) -> list[bytes]:
    return read_process(process_id, "environ").split(b"\0")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run jobs with random faults, one after the other.")
    parser.add_argument("--jobs", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random (default: a new one)")
    parser.add_argument("--only", type=int, default=None, metavar="NUMBER", help="run this job of the seed only")
    arguments = parser.parse_args()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    numbers = range(arguments.jobs) if arguments.only is None else [arguments.only]
    print(f"seed {seed}", flush=True)
    failed = 0
    for number in numbers:
        mark = os.environ[MARK_VARIABLE] = uuid.uuid4().hex
        with tempfile.TemporaryDirectory() as directory:
            try:
                print(f"{number:4} {run_job(seed, number, Path(directory))}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"FAILED. {error}\nAlone: python -m tests.faults.soak --seed {seed} --only {number}", flush=True)
            finally:
                kill_leftovers(mark, timeout_seconds=0)
    print(f"{len(numbers) - failed} of {len(numbers)} jobs ended as they had to (seed {seed}).")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
