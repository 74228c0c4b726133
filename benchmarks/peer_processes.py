"""A peer's service and its N tasks, in the peers' environment: one process for the service, four for the tasks."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from pathlib import Path

from benchmarks.simulated_tasks import PATIENCE_SECONDS
from benchmarks.simulation import PROCESSES, raise_files

_HERE = Path(__file__).parent
PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"
_REQUIREMENTS = ("jaxlib", "torch")
_SETTLE_SECONDS = 2.0
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_minloglevel": "3", "GRPC_VERBOSITY": "NONE"}


class PeerProcesses:
    """Context manager in which the peer ("jax" or "torch") runs."""

    def __init__(self, peer: str, num_tasks: int) -> None:
        self._script = _HERE / "peers" / f"{peer}_tasks.py"
        self._num_tasks = num_tasks
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> PeerProcesses:
        if not PYTHON.exists():
            raise SystemExit(f"The peers are not installed: {PYTHON} is not there. Run `make peers` once.")
        raise_files(20 * self._num_tasks // PROCESSES + 1_000)
        try:
            (port,) = [_hear(self._start("serve"))]
            tasks = [self._start("tasks", port, str(index), str(PROCESSES)) for index in range(PROCESSES)]
            for process in tasks:
                _hear(process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, what: str) -> float:
        """Start an operation in all tasks at once; return the seconds until the last is done."""
        started = time.monotonic()
        for process in self._processes[1:]:
            assert process.stdin is not None
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        return max(float(_hear(process)) for process in self._processes[1:]) - started

    def ask_to_leave(self) -> float:
        """Let all tasks but one leave, then that one; return the seconds from then until all have left."""
        self.ask("part")
        time.sleep(_SETTLE_SECONDS)
        return self.ask("leave")

    def _start(self, part: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(PYTHON), str(self._script), part, str(self._num_tasks), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_QUIET},
        )
        self._processes.append(process)
        return process

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def peer_versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    if not PYTHON.exists():
        return {}
    code = f"import importlib.metadata as m; print(*map(m.version, {_REQUIREMENTS!r}))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return dict(zip(_REQUIREMENTS, done.stdout.split(), strict=True))


def _hear(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process; raise TimeoutError if it does not come in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
    line = process.stdout.readline().strip() if ready else ""
    if not line:
        raise TimeoutError(f"{process.args!r} does not answer (exit code {process.poll()})")
    return line
