"""The processes that Linux has killed because memory ran out, as its counters show them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills(NamedTuple):
    """The number of processes that Linux has killed because memory ran out.

    Attributes:
        limit: What has this memory limit: the control group of this process, or else this host.
    """

    number: int
    limit: str


def read_oom_kills() -> OomKills | None:
    """Return the number of killed processes in the control group of this process, or else on this host.

    Return None if Linux does not show it. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events)
    and cgroup-v1/memory.html (memory.oom_control); the number for the host is in /proc/vmstat.
    """
    for path in (*_find_counters(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            match = _COUNT.search(path.read_text())
            if match is not None:
                return OomKills(int(match[1]), "this host" if path.name == "vmstat" else "its control group")
    return None


def _find_counters() -> list[Path]:
    """Return the paths of the counters of this process's control group, for version 1 and version 2 of the groups."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in _OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
            elif not controllers:
                found.append(_CGROUPS / path.lstrip("/") / "memory.events")
    return found


def describe_kill(before: OomKills | None) -> str:
    """Return why a process was killed by SIGKILL, as a clause. `before` is the counter at the start of the process."""
    now = read_oom_kills()
    if before is None or now is None or now.limit != before.limit:
        return "another process killed it, or memory ran out"
    if now.number <= before.number:
        return "another process killed it"
    return f"out of memory: Linux killed it, because {now.limit} has no more"
