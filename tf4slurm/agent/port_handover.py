"""Hand the port that an agent holds over to the server of its child, and find out why a server could not have it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable

from tf4slurm.control.messages import PortFailure
from tf4slurm.network.ports import HeldPort, has_listener
from tf4slurm.spec.job_spec import HoldPorts
from tf4slurm.system.proc import walk_descendants
from tf4slurm.system.threads import in_thread

_POLL_SECONDS = 0.2
_REUSE_PORT_SINCE = (2, 3)
"""The first TensorFlow that reads TF_GRPC_REUSE_PORT."""
_LIBRARY = re.compile(r" (/.*)/tensorflow(?:_core)?/libtensorflow_framework\.so\.\d+$", re.MULTILINE)
_VARIANTS = "cpu|gpu|aws|intel|macos|rocm|avx512"
_DISTRIBUTION = re.compile(rf"(?:intel_)?(?:tensorflow|tf_nightly)(?:_(?:{_VARIANTS}))*-(\d+)\.(\d+)")
_IN_USE = re.compile(r"[Aa]ddress already in use|Could not start gRPC server|\bEADDRINUSE\b")


class PortHandover:
    """Hands the port of a task over to each child of its agent.

    With --hold-ports auto, every kind of server can listen on the port from the start of the child on. When the child
    has loaded a TensorFlow that needs no more than SO_REUSEPORT, other servers are refused again (`restrict`).

    Attributes:
        may_fail: The server of the last child may be unable to have the port. False if other programs were refused
            until a server came that can share it.
    """

    def __init__(self, hold_ports: HoldPorts) -> None:
        self.may_fail = False
        self._hold_ports = hold_ports
        self._held: HeldPort | None = None
        self._is_released = False

    def begin(self, held: HeldPort | None, *, releases_ports: bool) -> None:
        """Share or release the port of this attempt. Call this before the child starts."""
        self._held = held
        self._is_released = releases_ports or self._hold_ports == "never"
        self.may_fail = held is not None
        if held is None:
            return
        if self._is_released:
            held.release()
        else:
            held.share(with_every_server=self._hold_ports == "auto")

    async def restrict(self, process_id: int, *, is_forked: bool) -> None:
        """Wait until the child has loaded a TensorFlow that sets SO_REUSEPORT. Then refuse all other servers.

        Return without that if the child has another TensorFlow. Cancel this call at the end of the child.

        Args:
            process_id: Process id of the child.
            is_forked: The preloader has forked the child. It loads no TensorFlow that is older than 2.3.
        """
        if self._held is None or self._is_released:
            return
        sets_reuse_port = True if is_forked else None
        while sets_reuse_port is None:
            directory = _find_library(walk_descendants(process_id))
            if directory is not None:
                sets_reuse_port = await in_thread(_sets_reuse_port, directory)
            else:
                await asyncio.sleep(_POLL_SECONDS)
        if sets_reuse_port:
            self._held.share(with_every_server=False)
            self.may_fail = has_listener(self._held.port)  # a program that was faster, unless it is the child's server

    def end(self) -> None:
        """Refuse other servers after the end of the child. Idempotent."""
        if self._held is not None:
            self._held.share(with_every_server=False)

    def find_failure(self, lines: Iterable[str]) -> PortFailure | None:
        """Return why the server of a child could not listen, from the last lines that the child has printed."""
        if self._held is None or not self.may_fail or not any(map(_IN_USE.search, lines)):
            return None
        if has_listener(self._held.port):
            return "taken"
        return None if self._is_released else "held"


def _find_library(process_ids: Iterable[int]) -> str | None:
    """Return the directory of the packages from which one of the processes has loaded TensorFlow, as /proc shows it."""
    for process_id in process_ids:
        try:
            with open(f"/proc/{process_id}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                found = _LIBRARY.search(maps.read())
        except OSError:
            continue  # it has ended
        if found is not None:
            return f"/proc/{process_id}/root{found[1]}"  # a container has files of its own
    return None


def _sets_reuse_port(directory: str) -> bool:
    """Return whether the TensorFlow in a directory of packages sets SO_REUSEPORT. False if its version is unknown."""
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    versions = [(int(found[1]), int(found[2])) for found in map(_DISTRIBUTION.match, names) if found]
    return bool(versions) and min(versions) >= _REUSE_PORT_SINCE
