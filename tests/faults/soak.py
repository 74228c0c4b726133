"""Run jobs on this host, each with a random fault: `python -m tests.faults.soak [--jobs N] [--seed N]`.

Every job has a chief, a ps and two workers. Their children are tests/child.py in place of TensorFlow: it reads
TF_CONFIG and listens on its port. The soak tests tf4slurm, with faults at many different moments.

The fault depends only on the seed and the job's number, so a failed job can run again alone: `--seed S --only NUMBER`.
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
_SECONDS_OF_OPTIONS = {
    "--heartbeat-timeout": HEARTBEAT_TIMEOUT_SECONDS,
    "--heartbeat-interval": 0.3,
    "--start-timeout": 8.0,
    "--grace-period": 1.0,
}
_RUN_SECONDS = (0.4, 4.0)  # from the start of the job until the chief is asked to exit
_LATE_FAULT_SECONDS = 0.4  # a fault may be injected until so long after that
_END_SECONDS = 30.0  # the slowest end: an agent is stopped before it registers, and the start times out
_GONE_SECONDS = HEARTBEAT_TIMEOUT_SECONDS + 2.0
_NOTICED_SECONDS = 1.0  # an exit is noticed at once; allowance for a busy machine
_LOST_SECONDS = HEARTBEAT_TIMEOUT_SECONDS + 2.0
_CHILD_CODE = 3
_MAYBE = float("inf")


@dataclass(frozen=True)
class Consequence:
    """The exit codes that a fault may cause, and how long before the end of a job it is certain to cause one of them.

    Nearer to the end, or if the target did not exist, the exit code may also be 0.
    """

    codes: frozenset[int]
    sure_seconds: float = _MAYBE


_LOST, _NOT_FORMED, _STOPPED = 7, 6, 143
_CONSEQUENCES = {
    ("chief", "SIGKILL"): Consequence(frozenset({137}), _NOTICED_SECONDS),
    ("chief", "SIGTERM"): Consequence(frozenset({_STOPPED}), _NOTICED_SECONDS),
    ("chief", "SIGSTOP"): Consequence(frozenset({_LOST}), _LOST_SECONDS),
    ("chief", "exit"): Consequence(frozenset({_CHILD_CODE}), _NOTICED_SECONDS),
    ("ps", "SIGKILL"): Consequence(frozenset({137}), _NOTICED_SECONDS),
    ("ps", "SIGTERM"): Consequence(frozenset({_STOPPED})),  # only before it ignores the signal
    ("ps", "SIGSTOP"): Consequence(frozenset({_LOST}), _LOST_SECONDS),
    ("ps", "exit"): Consequence(frozenset({_CHILD_CODE}), _NOTICED_SECONDS),
    ("worker", "SIGKILL"): Consequence(frozenset()),  # restarted in place
    ("worker", "SIGTERM"): Consequence(frozenset()),
    ("worker", "SIGSTOP"): Consequence(frozenset()),
    ("worker", "exit"): Consequence(frozenset({_CHILD_CODE})),  # exits again after each restart, up to the limit
    ("agent", "SIGKILL"): Consequence(frozenset({_LOST}), _NOTICED_SECONDS),
    ("agent", "SIGTERM"): Consequence(frozenset({_STOPPED, _LOST}), _NOTICED_SECONDS),  # lost: no signal handler yet
    ("agent", "SIGSTOP"): Consequence(frozenset({_LOST, _NOT_FORMED}), _LOST_SECONDS),
    ("launcher", "SIGKILL"): Consequence(frozenset({-signal.SIGKILL}), 0.0),
    ("launcher", "SIGTERM"): Consequence(frozenset({_STOPPED, -signal.SIGTERM}), 0.0),  # -15: no signal handler yet
    ("launcher", "SIGSTOP"): Consequence(frozenset({_LOST})),  # if stopped for longer than the heartbeat timeout
}


@dataclass(frozen=True)
class RandomFault:
    """The fault of one job and the run time of its chief; times in seconds after the start of the job."""

    target: str
    action: str
    at_seconds: float
    stopped_seconds: float
    run_seconds: float
    slowness: float = 1.0

    def __str__(self) -> str:
        return f"{self.action} to {self.target} after {self.at_seconds:.3f} s of {self.run_seconds:.3f} s"

    def explained_codes(self, *, has_hit: bool) -> frozenset[int]:
        """Return the exit codes that this fault explains; `has_hit` is whether the target existed."""
        consequence = _CONSEQUENCES[self.kind, self.action]
        is_sure = has_hit and self.at_seconds + self.slowness * consequence.sure_seconds < self.run_seconds
        return consequence.codes if is_sure else consequence.codes | {0}

    @property
    def kind(self) -> str:
        """The kind of the target: a role, "agent" or "launcher"."""
        return self.target.partition(" ")[0].partition("-")[0]


def choose_fault(seed: int, number: int, slowness: float = 1.0) -> RandomFault:
    """Return the fault of this job of this seed; `slowness` is the factor of all its times."""
    generator = random.Random(f"{seed} {number}")
    kind = generator.choice(("child", "child", "agent", "launcher"))
    name = generator.choice(NAMES)
    faults = ["SIGKILL", "SIGTERM", "SIGSTOP", *(["exit"] if kind == "child" else [])]
    target = {"child": name, "agent": f"agent of {name}", "launcher": "launcher"}[kind]
    run_seconds = generator.uniform(*_RUN_SECONDS)
    at_seconds = generator.uniform(0.0, run_seconds + _LATE_FAULT_SECONDS)
    action, stopped_seconds = generator.choice(faults), generator.uniform(0.1, 2 * HEARTBEAT_TIMEOUT_SECONDS)
    at, stopped, run = (slowness * seconds for seconds in (at_seconds, stopped_seconds, run_seconds))
    return RandomFault(target, action, at, stopped, run, slowness)


def run_job(seed: int, number: int, directory: Path, slowness: float = 1.0) -> str:
    """Run one job with its fault; return a description of its end.

    Args:
        slowness: Factor of all times and timeouts, for a machine that is busy with other work.

    Raises:
        AssertionError: The job hung, left a process behind, or ended with an exit code that the fault does not explain.
    """
    fault = choose_fault(seed, number, slowness)
    options = [word for name, seconds in _SECONDS_OF_OPTIONS.items() for word in (name, f"{slowness * seconds:g}")]
    mark = os.environ[MARK_VARIABLE]
    job = Job(directory)
    started = time.monotonic()
    job.start(*ROLES, *options)
    assert job.process is not None
    try:
        is_injected, has_hit, resume_at = False, False, float("inf")
        while job.process.poll() is None and time.monotonic() - started < slowness * _END_SECONDS:
            elapsed = time.monotonic() - started
            if not is_injected and elapsed >= fault.at_seconds:
                is_injected = True
                has_hit = _inject(fault, job)
                if fault.target == "launcher" and fault.action == "SIGSTOP":
                    resume_at = elapsed + fault.stopped_seconds
            if elapsed >= resume_at:
                resume_at = float("inf")
                job.process.send_signal(signal.SIGCONT)
            if elapsed >= fault.run_seconds and not (job.children / "chief-0.exit").exists():
                job.end_child("chief-0")
            wait_until(lambda: job.process is None or job.process.poll() is not None, 0.01, poll_seconds=0.005)
        code = job.process.poll()
        assert code is not None, f"it hangs after {slowness * _END_SECONDS} s"
        explained = fault.explained_codes(has_hit=has_hit)
        assert code in explained, f"exit code {code} is not one of {sorted(explained)}"
        left = wait_until_gone(mark, slowness * _GONE_SECONDS)
        assert not left, f"left behind: {left}"
        return f"{fault}: exit code {code} after {time.monotonic() - started:.1f} s"
    except AssertionError as error:
        raise AssertionError(
            f"Job {number} of seed {seed} ({fault}): {error}\n{job.stdout[-3000:]}\n{job.stderr[-3000:]}"
        ) from None
    finally:
        if job.process.poll() is None:
            job.process.kill()
        job.process.wait()


def _inject(fault: RandomFault, job: Job) -> bool:
    """Inject the fault; return whether its target existed."""
    assert job.process is not None
    if fault.target == "launcher":
        job.process.send_signal(signal.Signals[fault.action])
        return True
    if fault.action == "exit":
        job.end_child(fault.target, _CHILD_CODE)
        return True
    has_hit = False
    for process_id in _find(fault.target, job):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process_id, signal.Signals[fault.action])
            has_hit = True
    return has_hit


def _find(target: str, job: Job) -> list[int]:
    """Return the process id of a child or an agent; none if it does not exist."""
    name = target.removeprefix("agent of ")
    entry = f"TF4SLURM_TASK={name.replace('-', '/')}".encode()
    children = [p.pid for p in marked_processes(os.environ[MARK_VARIABLE]) if entry in _environ(p.pid)]
    if not target.startswith("agent"):
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
    parser.add_argument("--seed", type=int, default=None, help="seed of the random faults (default: a new one)")
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
    print(f"{len(numbers) - failed} of {len(numbers)} jobs ended as expected (seed {seed}).")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
