"""The fault matrix as data: each fault, its target, the expected outcome and its time limits in seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

CRASH_SECONDS = 2.0
DETECTION_SECONDS = 12.0
QUICK_DETECTION_SECONDS = 5.0
GONE_SECONDS = 5.0
RESTART_SECONDS = 1.0
ATTEMPT_SECONDS = 3.0
_QUICK = ("--heartbeat-timeout", "3", "--heartbeat-interval", "0.5")
_QUICK_HEARTBEAT_TIMEOUT_SECONDS, _HEARTBEAT_TIMEOUT_SECONDS = 3.0, 10.0
_DISCONNECTED_SECONDS = 2.0
_START_TIMEOUT_SECONDS = 6.0
_SERVE_TIMEOUT_SECONDS = 30.0  # until then the other tasks serve: they imported TensorFlow for over 15 s at a load of 7
_GRACE_PERIOD_SECONDS = 25.0
_NORMAL_SUITE = ("ps/0, SIGKILL", "worker/1, SIGKILL", "launcher, SIGKILL")


class Outcome(enum.Enum):
    """The outcome of a fault."""

    ENDS = "the job ends"
    CONTINUES = "training goes on"
    IS_RESTARTED = "the worker is restarted in place"
    STARTS_ATTEMPT = "the cluster is formed anew"
    ENDS_WITHOUT_LAUNCHER = "without a launcher everything ends by itself"
    IS_REFUSED = "nothing is started"


class Form(enum.Enum):
    """How `tf4slurm run` is started."""

    BATCH = "exec in a batch script"
    SCRIPT = "a line of a batch script"
    SALLOC = "salloc, on the login host"


@dataclass(frozen=True)
class Case:
    """One case of the matrix.

    Attributes:
        target: A task ("worker/1"), "agent of TASK", "host of TASK", "launcher", "batch script", "job",
            "run directory".
        within: Time limits in seconds, by measured time.
        exit_code: Exit code of the job.
        cause: Text that the root cause, or the reason of the next attempt, contains.
        saves: Whether the chief saves after the fault.
        uses_tf4slurm: Whether the script calls `tf4slurm.should_stop()` and reports its steps.
    """

    target: str
    fault: str
    outcome: Outcome
    within: Mapping[str, float] = field(default_factory=dict)
    exit_code: int = 0
    cause: str = ""
    options: tuple[str, ...] = ()
    form: Form = Form.BATCH
    saves: bool = False
    uses_tf4slurm: bool = True

    @property
    def name(self) -> str:
        parts = [self.target, self.fault]
        if self.form is not Form.BATCH:
            parts.append(self.form.name.lower())
        if not self.uses_tf4slurm:
            parts.append("plain script")
        if self.outcome is Outcome.STARTS_ATTEMPT or "--max-attempts" in self.options:
            parts.append("attempts left")
        if (
            self.outcome is Outcome.ENDS
            and _needs_heartbeat_timeout(self.fault)
            and "--heartbeat-timeout" not in self.options
        ):
            parts.append("defaults")
        return ", ".join(parts)

    @property
    def is_quick(self) -> bool:
        """Whether `make test` runs it; `make test-long` runs all others."""
        return self.name in _NORMAL_SUITE

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that are targets; none for launcher, batch script and job."""
        return tuple(word for word in self.target.split() if "/" in word)


def _needs_heartbeat_timeout(fault: str) -> bool:
    return fault in ("SIGSTOP", "cable pulled", "power off")


def _ends(
    target: str,
    fault: str,
    exit_code: int,
    cause: str,
    outcome_seconds: float,
    *options: str,
    form: Form = Form.BATCH,
) -> Case:
    within = {"outcome": outcome_seconds, "gone": GONE_SECONDS}
    return Case(target, fault, Outcome.ENDS, within, exit_code, cause, options, form)


def _stops(target: str, fault: str, form: Form = Form.BATCH) -> Case:
    """The chief is asked to save and has the grace period for it."""
    within = {"outcome": _GRACE_PERIOD_SECONDS, "gone": GONE_SECONDS}
    return Case(target, fault, Outcome.ENDS, within, 143, "received SIGTERM", form=form, saves=True)


def _continues(target: str, fault: str, *options: str) -> Case:
    return Case(target, fault, Outcome.CONTINUES, {"gone": GONE_SECONDS}, options=options)


def _restarted(target: str, fault: str, cause: str, detection_seconds: float = 0.0, *options: str) -> Case:
    within = {"first step again": detection_seconds + RESTART_SECONDS, "gone": GONE_SECONDS}
    return Case(target, fault, Outcome.IS_RESTARTED, within, cause=cause, options=options)


def _starts_attempt(target: str, fault: str, cause: str, detection_seconds: float = 0.0, *options: str) -> Case:
    within = {"training again": detection_seconds + ATTEMPT_SECONDS, "gone": GONE_SECONDS}
    options = ("--max-attempts", "2", *options)
    return Case(target, fault, Outcome.STARTS_ATTEMPT, within, cause=cause, options=options)


def _loses_host(task: str, fault: str, *options: str, form: Form = Form.BATCH) -> Case:
    detection_seconds, heartbeat_timeout_seconds = (
        (QUICK_DETECTION_SECONDS, _QUICK_HEARTBEAT_TIMEOUT_SECONDS)
        if options
        else (DETECTION_SECONDS, _HEARTBEAT_TIMEOUT_SECONDS)
    )
    within = {"outcome": detection_seconds, "gone": GONE_SECONDS}
    if fault == "cable pulled":
        within["child of the cut-off host"] = heartbeat_timeout_seconds + _DISCONNECTED_SECONDS
    return Case(f"host of {task}", fault, Outcome.ENDS, within, 7, f"{task} on NODE is lost", options, form)


def _ends_without_launcher(target: str, fault: str, exit_code: int, *options: str, form: Form = Form.BATCH) -> Case:
    heartbeat_timeout_seconds = _QUICK_HEARTBEAT_TIMEOUT_SECONDS if options else _HEARTBEAT_TIMEOUT_SECONDS
    within = {"gone": heartbeat_timeout_seconds + _DISCONNECTED_SECONDS}
    return Case(target, fault, Outcome.ENDS_WITHOUT_LAUNCHER, within, exit_code, options=options, form=form)


_KILLED = "was killed by signal 9 (SIGKILL)"
_STOPPED = "was stopped for 3 s"
_TASKS = ("chief/0", "ps/0", "worker/1")
_NO_MODULE = "No module named 'a_module_that_is_not_there'"  # part of the last log lines that are shown

_CHILDREN = (
    *(_ends(task, "SIGKILL", 137, f"{task} on NODE {_KILLED}", CRASH_SECONDS) for task in ("chief/0", "ps/0")),
    _restarted("worker/1", "SIGKILL", _KILLED),
    _restarted("worker/0 worker/1", "SIGKILL", _KILLED),
    *(
        _ends(task, "SIGSTOP", 7, f"{task} on NODE {_STOPPED}", QUICK_DETECTION_SECONDS, *_QUICK)
        for task in ("chief/0", "ps/0")
    ),
    _ends("ps/0", "SIGSTOP", 7, "ps/0 on NODE was stopped for 10 s", DETECTION_SECONDS),
    _restarted("worker/1", "SIGSTOP", _STOPPED, QUICK_DETECTION_SECONDS, *_QUICK),
    _stops("chief/0", "SIGTERM"),
    *(_continues(task, "SIGTERM") for task in ("ps/0", "worker/1")),
    Case(
        "chief/0",
        "SIGTERM",
        Outcome.ENDS,
        {"outcome": CRASH_SECONDS, "gone": GONE_SECONDS},
        143,
        "chief/0 on NODE was killed by signal 15 (SIGTERM)",
        uses_tf4slurm=False,
    ),
    *(_ends(task, "exit 1", 1, f"{task} on NODE exited with code 1", CRASH_SECONDS) for task in ("chief/0", "ps/0")),
    _restarted("worker/1", "exit 1", "exited with code 1"),
    _ends("chief/0", "exit 0 too early", 0, "", CRASH_SECONDS),
    _ends("ps/0", "exit 0 too early", 7, "ps/0 on NODE exited with code 0 before the job was done", CRASH_SECONDS),
    _continues("worker/1", "exit 0 too early"),
    *(_ends(task, "exception at import", 1, _NO_MODULE, CRASH_SECONDS) for task in _TASKS),
    _ends("chief/0", "hang in atexit", 7, "Training has stalled", QUICK_DETECTION_SECONDS, "--stall-timeout", "3"),
    *(_continues(task, "hang in atexit") for task in ("ps/0", "worker/1")),
    *(_continues(task, "starts late") for task in _TASKS),
    *(
        _ends(
            task,
            "never starts",
            6,
            f"{task} (rank ",
            _START_TIMEOUT_SECONDS + CRASH_SECONDS,
            "--start-timeout",
            f"{_START_TIMEOUT_SECONDS:g}",
        )
        for task in _TASKS
    ),
)

_AGENTS = (
    *(_ends(f"agent of {task}", "SIGKILL", 7, f"{task} on NODE is lost", CRASH_SECONDS) for task in _TASKS),
    *(
        _ends(f"agent of {task}", "SIGSTOP", 7, f"{task} on NODE is lost", QUICK_DETECTION_SECONDS, *_QUICK)
        for task in _TASKS
    ),
    _ends("agent of ps/0", "SIGSTOP", 7, "ps/0 on NODE is lost", DETECTION_SECONDS),
    *(_stops(f"agent of {task}", "SIGTERM") for task in _TASKS),
)

_JOB = (
    _ends_without_launcher("launcher", "SIGKILL", 137),
    # salloc exits with 0 when its command is killed.
    _ends_without_launcher("launcher", "SIGKILL", 0, form=Form.SALLOC),
    _ends_without_launcher("launcher", "SIGSTOP", 7, *_QUICK),
    _ends_without_launcher("launcher", "SIGSTOP", 7, *_QUICK, form=Form.SALLOC),
    _stops("launcher", "SIGTERM"),
    _stops("launcher", "SIGTERM", form=Form.SALLOC),
    _ends_without_launcher("batch script", "SIGKILL", 137, form=Form.SCRIPT),
    _ends_without_launcher("batch script", "SIGTERM", 143, form=Form.SCRIPT),
    Case("batch script", "SIGSTOP", Outcome.CONTINUES, {"gone": GONE_SECONDS}, form=Form.SCRIPT),
    _ends_without_launcher("batch script", "exit 0 too early", 0, form=Form.SCRIPT),
    _stops("job", "scancel"),
)

_HOSTS = (
    *(_loses_host("ps/0", fault) for fault in ("cable pulled", "power off")),
    *(_loses_host("worker/1", fault, *_QUICK) for fault in ("cable pulled", "power off")),
    *(_loses_host("chief/0", fault, *_QUICK, form=Form.SALLOC) for fault in ("cable pulled", "power off")),
    _loses_host("ps/0", "cable pulled", *_QUICK, "--max-attempts", "2"),
    _ends("host of launcher", "cable pulled", 7, "is lost", QUICK_DETECTION_SECONDS, *_QUICK),
    _ends_without_launcher("host of launcher", "power off", 0, *_QUICK),
)

_ATTEMPTS = (
    _starts_attempt("ps/0", "SIGKILL", f"ps/0 on NODE {_KILLED}"),
    _starts_attempt("chief/0", "SIGKILL", f"chief/0 on NODE {_KILLED}"),
    _starts_attempt("ps/0", "exit 1", "ps/0 on NODE exited with code 1"),
    _starts_attempt("ps/0", "SIGSTOP", f"ps/0 on NODE {_STOPPED}", QUICK_DETECTION_SECONDS, *_QUICK),
)

_DISK = (
    _continues("run directory", "disk full"),
    Case(
        "run directory",
        "disk full from the start",
        Outcome.IS_REFUSED,
        {"gone": GONE_SECONDS},
        3,
        "cannot be created: No space left on device",
    ),
)

_NEVER_SERVE = tuple(
    _ends(
        task,
        "never serves",
        7,
        f"{task} on NODE",
        _SERVE_TIMEOUT_SECONDS + CRASH_SECONDS,
        *("--stall-timeout", "3", "--start-timeout", f"{_SERVE_TIMEOUT_SECONDS:g}", "--max-worker-restarts", "0"),
    )
    for task in _TASKS
)
"""A child that hangs before it opens a server: TensorFlow's chief waits for it in C++ without a timeout."""

CASES = (*_CHILDREN, *_NEVER_SERVE, *_AGENTS, *_JOB, *_HOSTS, *_ATTEMPTS, *_DISK)
