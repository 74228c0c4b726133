"""The first program of a child process: `python -I -S exec_child.py AGENT_ID IGNORES_STOP COMMAND…`.

This program asks the kernel to kill the child when the agent (process id AGENT_ID) is killed, then executes COMMAND.
With IGNORES_STOP=1 the child ignores STOP_SIGNALS, unless COMMAND installs its own handlers. For example, a ps ignores
them, because it must run while the chief saves.

The agent cannot do this itself between fork and exec: a lock that another of its threads holds at the fork would stay
locked in the child. This program imports nothing of tf4slurm, so that it takes only 20 ms.
"""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""The signals that request a stop: if the launcher or any agent receives one, the whole job saves and stops.

Slurm may send them to every process of the job.
"""

NOW_SIGNAL = signal.SIGQUIT
"""The signal of `tf4slurm cancel --now`: the launcher ends its job without a grace period."""

LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGALRM, signal.SIGXCPU, NOW_SIGNAL)
"""Signals at which a launcher stops its job. Users request SIGALRM or SIGXCPU with, for example, --signal=B:ALRM."""

_OTHER_NAMES = ("SIGQUIT", "SIGALRM", "SIGXCPU", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGSTKFLT")
OTHER_SIGNALS = tuple(getattr(signal, name) for name in _OTHER_NAMES if hasattr(signal, name))
"""Signals that end a process by default, and that agents and guards ignore.

Slurm may send one to every process of the job, because a script of the user handles it.
"""

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(agent: int, ignores_stop_signals: bool, command: list[str]) -> None:
    """Replace this process with `command`. On failure print the reason and exit with 127 or 126, as a shell does.

    `agent` is the process id of the agent. If the agent is no longer the parent, exit with 137.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            sys.exit(137)  # the agent has already been killed
    os.setpgid(0, 0)  # not a session; see launch/spawners.py
    # Python or the agent ignores these signals, and exec would keep that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *OTHER_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    if ignores_stop_signals:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux" and not _is_given("LC_CTYPE"):
        os.environ.pop("LC_CTYPE", None)  # this program's Python has set it, because the locale is C
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        what = "names an interpreter that does" if os.path.exists(command[0]) else "does"
        sys.stderr.write(f"tf4slurm: the program {command[0]!r} {what} not exist on {os.uname().nodename}.\n")
        sys.exit(127)
    except OSError as error:
        sys.stderr.write(f"tf4slurm: the program {command[0]!r} cannot be run on {os.uname().nodename}: {error}.\n")
        sys.exit(126)


def _is_given(name: str) -> bool:
    """Return whether this process has been given an environment variable."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return any(each.startswith(name.encode() + b"=") for each in file.read().split(b"\0"))
    except OSError:  # /proc is not mounted
        return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
