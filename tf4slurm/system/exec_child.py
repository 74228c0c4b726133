"""Becomes a child: `python -I -S exec_child.py AGENT SHIELDED COMMAND…` asks the kernel to kill it when its agent dies,
then executes.

A shielded child ignores the signals that Slurm sends to every process of a job that is to stop: while the chief saves,
the ps must stay. A script that installs a handler of its own gets them.

The agent cannot ask for it between fork and exec itself: it has threads, and a lock that one of them holds would stay
held in the fork. This file is run as a program (child.py imports it for its path) and imports nothing of tf4slurm, so
that it costs 20 ms.
"""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ask the whole job to save and stop, whichever of its processes receives them."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(agent: int, is_shielded: bool, command: list[str]) -> None:
    """Execute `command`; where that is not possible, say why and exit as a shell does (127, 126)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            sys.exit(137)  # the agent died before it could be asked for
    os.setpgid(0, 0)  # not a session: see launch/spawn_local.py
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # this Python ignores them, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    if is_shielded:
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
