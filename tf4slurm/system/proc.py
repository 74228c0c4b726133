"""Find, describe, adopt, stop and kill processes of this host.

Only Linux has /proc. Event loops may call these functions, because /proc is in memory: no disk can stall the read.
Import little here, because every guard process loads this module.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_SECONDS = 0.02
_READS_OF_CHILDREN = 10

Others = frozenset[tuple[int, int]]
"""Descendants of this process that do not belong to the job, as (process id, start time in clock ticks since boot).

A shell that replaces itself with tf4slurm (exec) leaves such processes: its own children.
"""

NO_OTHERS: Others = frozenset()


class ProcessStat(NamedTuple):
    """Some fields of /proc/PID/stat (`man 5 proc`).

    Attributes:
        state: One letter, such as "R" for running, "T" for stopped and "Z" for a zombie.
        cpu_ticks: Processor time of the process and of its reaped children, in clock ticks.
        start_ticks: Start of the process in clock ticks since boot. Together with the id it identifies the process.
    """

    process_id: int
    name: str
    state: str
    parent_id: int
    group_id: int
    cpu_ticks: int
    start_ticks: int
    resident_pages: int


def read_stat(process_id: int) -> ProcessStat:
    """Read /proc/PID/stat of a process, which may be a zombie.

    Raises:
        OSError: There is no such process, or no /proc.
    """
    with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as file:
        head, _, tail = file.read().rpartition(")")
    fields = tail.split()
    cpu_ticks = sum(map(int, fields[11:15]))
    name = head.partition("(")[2]
    parent_id, group_id, start_ticks, resident_pages = (int(fields[index]) for index in (1, 2, 19, 21))
    return ProcessStat(process_id, name, fields[0], parent_id, group_id, cpu_ticks, start_ticks, resident_pages)


def find_children(process_id: int) -> list[int]:
    """Return the ids of a process's children, including zombies.

    The kernel has a list for each thread. When a thread ends, its children move to the list of another one, which may
    have been read already. So the lists are read again then, unless threads end all the time.

    Raises:
        OSError: There is no such process, no /proc, or the kernel has no lists of children.
    """
    found: dict[int, None] = {}
    for _ in range(_READS_OF_CHILDREN):
        ended = False
        for thread in [f"/proc/{process_id}/task/{each}" for each in os.listdir(f"/proc/{process_id}/task")]:
            try:
                with open(f"{thread}/children", encoding="utf-8") as file:
                    found.update(dict.fromkeys(map(int, file.read().split())))
            except (FileNotFoundError, ProcessLookupError):
                if os.path.exists(thread):
                    raise  # the kernel has no lists
                ended = True
        if not ended:
            break
    return list(found)


def walk_descendants(process_id: int) -> Iterator[int]:
    """Yield the ids of a process and of all its descendants, as far as /proc shows them."""
    yield process_id
    try:
        children = find_children(process_id)
    except OSError:
        return  # the process has ended
    for child in children:
        yield from walk_descendants(child)


def walk_family(own_child: int, parent_id: int) -> Iterator[int]:
    """Yield the ids of an agent's child, of its descendants, and of orphans that its parent has adopted, and theirs.

    The parent is this process, or the keeper of a forked child. As in `reap_orphans`, a child of the parent in another
    process group is an orphan.
    """
    yield from walk_descendants(own_child)
    try:
        children = find_children(parent_id)
        group = os.getpgid(parent_id)
    except OSError:
        return  # the kernel has no lists of children, or the parent has ended
    for each in children:
        with contextlib.suppress(ProcessLookupError):
            if each != own_child and os.getpgid(each) != group:
                yield from walk_descendants(each)


def ignores_signal(process_id: int, number: int) -> bool:
    """Return whether /proc shows that a process and all its descendants ignore the signal `number`."""
    try:
        with open(f"/proc/{process_id}/status", encoding="utf-8", errors="replace") as file:
            (mask,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", file.read(), re.MULTILINE)
        children = find_children(process_id)
    except (OSError, ValueError):
        return False
    return bool(int(mask, 16) >> (number - 1) & 1) and all(ignores_signal(child, number) for child in children)


def is_running(process_id: int, start_ticks: int) -> bool:
    """Return whether the process with this id and start time still runs. A zombie does not run."""
    try:
        stat = read_stat(process_id)
    except OSError:
        return False
    return stat.state != "Z" and stat.start_ticks == start_ticks


def is_stopped(process_id: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process. After the process has ended, return False."""
    try:
        return read_stat(process_id).state == "T"
    except OSError:
        return False


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends (Linux), so that `kill_descendants` finds them."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own_child: int) -> float:
    """Reap the adopted orphans that have ended, but not the child with the process id `own_child`.

    Return the processor time in seconds of the reaped orphans and of the children that they have reaped.

    Other code waits for this child, and for the processes in this process's group. Orphans are in other groups, since
    an agent's child and its descendants leave the agent's group.
    """
    seconds = 0.0
    with contextlib.suppress(OSError):
        for each in find_children(os.getpid()):
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if each != own_child and os.getpgid(each) != os.getpgrp():
                    usage = os.wait4(each, os.WNOHANG)[2]
                    seconds += usage.ru_utime + usage.ru_stime
    return seconds


def find_others() -> Others:
    """Return the descendants that this process has before the job, so that the job's end does not kill them.

    Call this function before the job starts. The result is empty on a system other than Linux.
    """
    return find_own_children() | {(each.process_id, each.start_ticks) for each in find_descendants()}


def find_own_children() -> Others:
    """Return the children of this process, including zombies, but no other descendants.

    The result has pairs of process id and start time. It has the type `Others`, so that it can be compared with the
    result of `find_others`, but its processes may belong to the job. It is empty on a system other than Linux.
    """
    return frozenset((each.process_id, each.start_ticks) for each in _children_by_parent().get(os.getpid(), ()))


def find_descendants(*, with_own_group: bool = True, others: Others = NO_OTHERS) -> list[ProcessStat]:
    """Return the descendants of this process that are no zombies, parents first.

    The result is empty on a system other than Linux.

    Args:
        with_own_group: Whether to include child processes in this process's group, and their descendants. These are
            programs that the agent or launcher itself has started: an agent leaves the launcher's group, and a script
            leaves that of its agent.
        others: The result of `find_others` before the job. These processes and their descendants are left out.
    """
    children = _children_by_parent()
    children[os.getpid()] = [
        each for each in children.get(os.getpid(), []) if with_own_group or each.group_id != os.getpgrp()
    ]
    found: list[ProcessStat] = []
    parents = [os.getpid()]
    for parent in parents:
        own = [each for each in children.get(parent, []) if (each.process_id, each.start_ticks) not in others]
        found += own
        parents += [each.process_id for each in own]
    return [each for each in found if each.state != "Z"]


def _children_by_parent() -> dict[int, list[ProcessStat]]:
    children: dict[int, list[ProcessStat]] = {}
    if sys.platform == "linux":
        for process_id in map(int, filter(str.isdigit, os.listdir("/proc"))):  # a kernel may lack the lists of children
            with contextlib.suppress(OSError):  # the process has ended
                stat = read_stat(process_id)
                children.setdefault(stat.parent_id, []).append(stat)
    return children


def signal_process(process_id: int, start_ticks: int, number: int) -> None:
    """Send a signal to the process with this id and start time, if it still runs.

    A later process with the same id gets no signal, except in a race on macOS or a kernel before 5.3.
    """
    descriptor = None
    with contextlib.suppress(AttributeError, OSError):  # macOS, a kernel before 5.3, or the process has ended
        descriptor = os.pidfd_open(process_id)
    try:
        if not is_running(process_id, start_ticks):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, or a setuid program
            if descriptor is None:
                os.kill(process_id, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def signal_processes(processes: Iterable[ProcessStat], number: int) -> None:
    """Send a signal to those of the processes that still run."""
    for each in processes:
        signal_process(each.process_id, each.start_ticks, number)


def kill_descendants(others: Others = NO_OTHERS) -> None:
    """Send SIGKILL to all present descendants of this process.

    `others` are processes that do not belong to the job (see `Others`). They and their descendants get no signal.
    """
    signal_processes(find_descendants(others=others), signal.SIGKILL)


def kill_left_processes(deadline: float) -> None:
    """Kill what an agent's child has left behind: all descendants of this process that are not in its process group.

    This is repeated, because the descendants may start new processes. Return when none is left, or at `deadline`
    (seconds of time.monotonic), because a process that waits for a file server cannot be killed. Programs that the
    agent itself has started are in its group, and are not killed.
    """
    while (found := find_descendants(with_own_group=False)) and time.monotonic() < deadline:
        signal_processes(found, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def stop_descendants(others: Others) -> list[ProcessStat]:
    """Stop (SIGSTOP) all descendants of this process, except children in this process's group and `others`.

    Args:
        others: Processes that do not belong to the job (see `Others`).

    Returns:
        The processes that were stopped, parents first, for `continue_processes`. Processes that another signal had
            stopped before are not among them.
    """
    stopped: dict[int, ProcessStat] = {}

    def find_running() -> list[ProcessStat]:
        found = find_descendants(with_own_group=False, others=others)
        return [each for each in found if each.state not in "tT" and each.process_id not in stopped]

    while running := find_running():  # a process may have started others before it was stopped
        signal_processes(running, signal.SIGSTOP)
        stopped.update({each.process_id: each for each in running})
    return list(stopped.values())


def continue_processes(processes: Sequence[ProcessStat]) -> None:
    """Continue the processes that `stop_descendants` returned, children before their parents.

    So no parent runs while its child is still stopped.
    """
    signal_processes(reversed(processes), signal.SIGCONT)
