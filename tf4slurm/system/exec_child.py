"""The first program of a child process: `python -I -S exec_child.py AGENT SHIELDED COMMAND…`.

This program asks the kernel to kill the child when the agent (process id AGENT) is killed, then executes COMMAND. With
SHIELDED=1 the child ignores STOP_SIGNALS, unless the script installs its own handlers. A ps is started in this way,
because it must run while the chief saves.

The agent cannot do this between fork and exec, because a lock that another of its threads holds would stay locked. This
program imports nothing of tf4slurm, so that it takes 20 ms.
"""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""If any process of a job receives one of these signals, the whole job saves and stops.

Slurm sends them to every process.
"""

LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGALRM, signal.SIGXCPU)
"""Signals at which a launcher stops its job. Users request one of the last two with, for example, --signal=B:ALRM."""

_OTHER_NAMES = ("SIGQUIT", "SIGALRM", "SIGXCPU", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGSTKFLT")
OTHER_SIGNALS = tuple(getattr(signal, name) for name in _OTHER_NAMES if hasattr(signal, name))
"""Signals that end a process by default and are no stop requests.

Agents and guards ignore them: Slurm may send one to every process, for a script that handles it.
"""

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(agent: int, ignores_stop_signals: bool, command: list[str]) -> None:
    """Execute `command`. On failure print the reason and exit with 127 or 126, as a shell does."""
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
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        what = "names an interpreter that does" if os.path.exists(command[0]) else "does"
        sys.stderr.write(f"tf4slurm: the program {command[0]!r} {what} not exist on {os.uname().nodename}.\n")
        sys.exit(127)
    except OSError as error:
        sys.stderr.write(f"tf4slurm: the program {command[0]!r} cannot be run on {os.uname().nodename}: {error}.\n")
        sys.exit(126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
