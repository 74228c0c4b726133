"""The fault matrix, as data: who suffers what, what has to come of it, and within how many seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

CRASH_SECONDS = 2.0
SILENCE_SECONDS = 12.0
QUICK_SILENCE_SECONDS = 5.0
GONE_SECONDS = 5.0
RESTART_SECONDS = 1.0
ATTEMPT_SECONDS = 3.0
_QUICK = ("--heartbeat-timeout", "3", "--heartbeat-interval", "0.5")
_QUICK_DEAD_SECONDS, _DEAD_SECONDS = 3.0, 10.0
_CUT_OFF_SECONDS = 2.0
_START_TIMEOUT_SECONDS = 6.0
_SERVE_TIMEOUT_SECONDS = 15.0  # the others must have imported TensorFlow by then: 10 s were seen on a busy machine
_GRACE_SECONDS = 25.0
_OFTEN = ("ps/0, SIGKILL", "worker/1, SIGKILL", "launcher, SIGKILL")


class Outcome(enum.Enum):
    """What comes of a fault."""

    ENDS = "the job ends"
    GOES_ON = "training goes on"
    IS_RESTARTED = "the worker is restarted in place"
    IS_FORMED_ANEW = "the cluster is formed anew"
    DIES_OUT = "without a launcher everything ends by itself"
    IS_REFUSED = "nothing is started"


class Form(enum.Enum):
    """How `tf4slurm run` is started."""

    BATCH = "exec in a batch script"
    SCRIPT = "a line of a batch script"
    SALLOC = "salloc, on the login host"


@dataclass(frozen=True)
class Case:
    """One field of the matrix.

    Attributes:
        victim: A task ("worker/1"), "agent of TASK", "host of TASK", "launcher", "batch script", "job",
            "run directory".
        within: Bounds in seconds, by what is measured.
        exit_code: Of the whole job.
        cause: Words that the root cause, or the reason of the next attempt, has in it.
        saves: Whether the chief saves after the fault.
        knows_tf4slurm: Whether the script asks `tf4slurm.should_stop()` and reports its steps.
    """

    victim: str
    fault: str
    outcome: Outcome
    within: Mapping[str, float] = field(default_factory=dict)
    exit_code: int = 0
    cause: str = ""
    options: tuple[str, ...] = ()
    form: Form = Form.BATCH
    saves: bool = False
    knows_tf4slurm: bool = True

    @property
    def name(self) -> str:
        words = [self.victim, self.fault]
        if self.form is not Form.BATCH:
            words.append(self.form.name.lower())
        if not self.knows_tf4slurm:
            words.append("plain script")
        if self.outcome is Outcome.IS_FORMED_ANEW or "--max-attempts" in self.options:
            words.append("attempts left")
        if self.outcome is Outcome.ENDS and _is_silence(self.fault) and "--heartbeat-timeout" not in self.options:
            words.append("defaults")
        return ", ".join(words)

    @property
    def is_quick(self) -> bool:
        """Whether `make test` has it; `make test-long` has all the others."""
        return self.name in _OFTEN

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the fault is about; none for launcher, batch script and job."""
        return tuple(word for word in self.victim.split() if "/" in word)


def _is_silence(fault: str) -> bool:
    return fault in ("SIGSTOP", "cable pulled", "power off")


def _ends(
    victim: str,
    fault: str,
    exit_code: int,
    cause: str,
    verdict_seconds: float,
    *options: str,
    form: Form = Form.BATCH,
) -> Case:
    within = {"outcome": verdict_seconds, "gone": GONE_SECONDS}
    return Case(victim, fault, Outcome.ENDS, within, exit_code, cause, options, form)


def _stops(victim: str, fault: str, form: Form = Form.BATCH) -> Case:
    """The chief is asked to save, and has its grace for it."""
    within = {"outcome": _GRACE_SECONDS, "gone": GONE_SECONDS}
    return Case(victim, fault, Outcome.ENDS, within, 143, "received SIGTERM", form=form, saves=True)


def _goes_on(victim: str, fault: str, *options: str) -> Case:
    return Case(victim, fault, Outcome.GOES_ON, {"gone": GONE_SECONDS}, options=options)


def _restarted(victim: str, fault: str, cause: str, silence_seconds: float = 0.0, *options: str) -> Case:
    within = {"first step again": silence_seconds + RESTART_SECONDS, "gone": GONE_SECONDS}
    return Case(victim, fault, Outcome.IS_RESTARTED, within, cause=cause, options=options)


def _formed_anew(victim: str, fault: str, cause: str, silence_seconds: float = 0.0, *options: str) -> Case:
    within = {"training again": silence_seconds + ATTEMPT_SECONDS, "gone": GONE_SECONDS}
    options = ("--max-attempts", "2", *options)
    return Case(victim, fault, Outcome.IS_FORMED_ANEW, within, cause=cause, options=options)


def _loses_host(task: str, fault: str, *options: str, form: Form = Form.BATCH) -> Case:
    silence_seconds, dead_seconds = (
        (QUICK_SILENCE_SECONDS, _QUICK_DEAD_SECONDS) if options else (SILENCE_SECONDS, _DEAD_SECONDS)
    )
    within = {"outcome": silence_seconds, "gone": GONE_SECONDS}
    if fault == "cable pulled":
        within["child of the cut-off host"] = dead_seconds + _CUT_OFF_SECONDS
    return Case(f"host of {task}", fault, Outcome.ENDS, within, 7, f"{task} on NODE is lost", options, form)


def _dies_out(victim: str, fault: str, exit_code: int, *options: str, form: Form = Form.BATCH) -> Case:
    dead_seconds = _QUICK_DEAD_SECONDS if options else _DEAD_SECONDS
    within = {"gone": dead_seconds + _CUT_OFF_SECONDS}
    return Case(victim, fault, Outcome.DIES_OUT, within, exit_code, options=options, form=form)


_KILLED = "was killed by signal 9 (SIGKILL)"
_STOPPED = "was stopped for 3 s"
_TASKS = ("chief/0", "ps/0", "worker/1")
_NO_MODULE = "No module named 'a_module_that_is_not_there'"  # it stands in the end of the log that is shown

_CHILDREN = (
    *(_ends(task, "SIGKILL", 137, f"{task} on NODE {_KILLED}", CRASH_SECONDS) for task in ("chief/0", "ps/0")),
    _restarted("worker/1", "SIGKILL", _KILLED),
    _restarted("worker/0 worker/1", "SIGKILL", _KILLED),
    *(
        _ends(task, "SIGSTOP", 7, f"{task} on NODE {_STOPPED}", QUICK_SILENCE_SECONDS, *_QUICK)
        for task in ("chief/0", "ps/0")
    ),
    _ends("ps/0", "SIGSTOP", 7, "ps/0 on NODE was stopped for 10 s", SILENCE_SECONDS),
    _restarted("worker/1", "SIGSTOP", _STOPPED, QUICK_SILENCE_SECONDS, *_QUICK),
    _stops("chief/0", "SIGTERM"),
    *(_goes_on(task, "SIGTERM") for task in ("ps/0", "worker/1")),
    Case(
        "chief/0",
        "SIGTERM",
        Outcome.ENDS,
        {"outcome": CRASH_SECONDS, "gone": GONE_SECONDS},
        143,
        "chief/0 on NODE was killed by signal 15 (SIGTERM)",
        knows_tf4slurm=False,
    ),
    *(_ends(task, "exit 1", 1, f"{task} on NODE exited with code 1", CRASH_SECONDS) for task in ("chief/0", "ps/0")),
    _restarted("worker/1", "exit 1", "exited with code 1"),
    _ends("chief/0", "exit 0 too early", 0, "", CRASH_SECONDS),
    _ends("ps/0", "exit 0 too early", 7, "ps/0 on NODE exited with code 0 before the job was done", CRASH_SECONDS),
    _goes_on("worker/1", "exit 0 too early"),
    *(_ends(task, "exception at import", 1, _NO_MODULE, CRASH_SECONDS) for task in _TASKS),
    _ends("chief/0", "hang in atexit", 7, "Training has stalled", QUICK_SILENCE_SECONDS, "--stall-timeout", "3"),
    *(_goes_on(task, "hang in atexit") for task in ("ps/0", "worker/1")),
    *(_goes_on(task, "starts late") for task in _TASKS),
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
        _ends(f"agent of {task}", "SIGSTOP", 7, f"{task} on NODE is lost", QUICK_SILENCE_SECONDS, *_QUICK)
        for task in _TASKS
    ),
    _ends("agent of ps/0", "SIGSTOP", 7, "ps/0 on NODE is lost", SILENCE_SECONDS),
    *(_stops(f"agent of {task}", "SIGTERM") for task in _TASKS),
)

_JOB = (
    _dies_out("launcher", "SIGKILL", 137),
    _dies_out("launcher", "SIGKILL", 0, form=Form.SALLOC),  # salloc says 0 when its command is killed
    _dies_out("launcher", "SIGSTOP", 7, *_QUICK),
    _dies_out("launcher", "SIGSTOP", 7, *_QUICK, form=Form.SALLOC),
    _stops("launcher", "SIGTERM"),
    _stops("launcher", "SIGTERM", form=Form.SALLOC),
    _dies_out("batch script", "SIGKILL", 137, form=Form.SCRIPT),
    _dies_out("batch script", "SIGTERM", 143, form=Form.SCRIPT),
    Case("batch script", "SIGSTOP", Outcome.GOES_ON, {"gone": GONE_SECONDS}, form=Form.SCRIPT),
    _dies_out("batch script", "exit 0 too early", 0, form=Form.SCRIPT),
    _stops("job", "scancel"),
)

_HOSTS = (
    *(_loses_host("ps/0", fault) for fault in ("cable pulled", "power off")),
    *(_loses_host("worker/1", fault, *_QUICK) for fault in ("cable pulled", "power off")),
    *(_loses_host("chief/0", fault, *_QUICK, form=Form.SALLOC) for fault in ("cable pulled", "power off")),
    _loses_host("ps/0", "cable pulled", *_QUICK, "--max-attempts", "2"),
    _ends("host of launcher", "cable pulled", 7, "is lost", QUICK_SILENCE_SECONDS, *_QUICK),
    _dies_out("host of launcher", "power off", 0, *_QUICK),
)

_ATTEMPTS = (
    _formed_anew("ps/0", "SIGKILL", f"ps/0 on NODE {_KILLED}"),
    _formed_anew("chief/0", "SIGKILL", f"chief/0 on NODE {_KILLED}"),
    _formed_anew("ps/0", "exit 1", "ps/0 on NODE exited with code 1"),
    _formed_anew("ps/0", "SIGSTOP", f"ps/0 on NODE {_STOPPED}", QUICK_SILENCE_SECONDS, *_QUICK),
)

_DISK = (
    _goes_on("run directory", "disk full"),
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
"""A child that runs, and hangs before it has a server: TensorFlow's chief waits for it in C++, for ever."""

CASES = (*_CHILDREN, *_NEVER_SERVE, *_AGENTS, *_JOB, *_HOSTS, *_ATTEMPTS, *_DISK)
