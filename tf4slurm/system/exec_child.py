"""The first program of a child process: `python -I -S exec_child.py AGENT SHIELDED COMMAND…`, which executes COMMAND.

Before that it asks the kernel to kill the child when the agent is killed.

A shielded child ignores the signals that Slurm sends to every process of a job that is to stop, because the ps must run
while the chief saves. A script that installs its own handler gets them.

The agent cannot do this between fork and exec: it has threads, and a lock that one of them holds would stay locked in
the fork. This file runs as a program (child_process.py imports it for its path), and imports nothing of tf4slurm, so
that it takes 20 ms.
"""

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ask the whole job to save and stop, whichever of its processes receives them."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(agent: int, is_shielded: bool, command: list[str]) -> None:
    """Execute `command`; on failure print the reason and exit as a shell does (127, 126)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            sys.exit(137)  # the agent was killed before
    os.setpgid(0, 0)  # not a session: see launch/local_spawner.py
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
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
