"""Run a script both ways, executed and forked by a preloader, to compare what it prints and how it ends.

The package tensorflow is a stand-in here that takes milliseconds, and remembers what it saw at its import. The tests of
tests/tensorflow/test_preloaded_training.py use the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf4slurm.preload.client import Preloader
from tf4slurm.system.child_process import Child, ForkRequest

STAND_IN = """
import os, sys
AT_IMPORT = dict(os.environ)
PATH_AT_IMPORT = list(sys.path)
os.environ["SET_BY_TENSORFLOW"] = "1"
print("printed by the import of tensorflow", file=sys.stderr)
import tensorflow.lazy
"""
PREAMBLE = "import json, os, sys\n"
TIMEOUT_SECONDS = 60.0
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@dataclass(frozen=True)
class Outcome:
    """How a script has ended.

    Attributes:
        not_forked: Why it was executed although it should be forked, or "".
    """

    returncode: int
    output: str
    not_forked: str

    @property
    def facts(self) -> Any:
        """The value that the script has printed last, as JSON."""
        return json.loads(self.output.splitlines()[-1])


class Scripts:
    """Runs scripts in a directory that has the stand-in for TensorFlow in its site-packages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.site = directory / "lib" / "site-packages"
        package = self.site / "tensorflow"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STAND_IN)
        (package / "lazy.py").write_text("")
        self.work = directory / "work"
        self.work.mkdir()

    def write(self, name: str, text: str) -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def environ(self, **changes: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TF4SLURM_TEST_MARK") if name in os.environ}
        return {**kept, "PYTHONPATH": str(self.site), **changes}

    def run(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        task_environ: Mapping[str, str] | None = None,
        directory: Path | None = None,
        ignores_stop_signals: bool = False,
        signal_number: int | None = None,
        until: str = "",
    ) -> tuple[Outcome, Outcome]:
        """Execute and fork the command. Return both outcomes.

        Args:
            environ: The environment variables of the preloader, and of the script.
            task_environ: Further variables of the script only.
            signal_number: A signal to send once the script has printed `until`.
        """
        options = (environ, task_environ, directory, ignores_stop_signals, signal_number, until)
        return asyncio.run(self._run(command, *options))

    async def _run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] | None,
        task_environ: Mapping[str, str] | None,
        directory: Path | None,
        ignores_stop_signals: bool,
        signal_number: int | None,
        until: str,
    ) -> tuple[Outcome, Outcome]:
        before, loop = os.getcwd(), asyncio.get_running_loop()
        os.chdir(directory or self.work)
        environ = environ if environ is not None else self.environ()
        task_environ = {**environ, **(task_environ or {})}
        preloader = Preloader(command, environ, has_own_group=False)
        try:
            found = []
            for fork in (None, ForkRequest(preloader.address, TIMEOUT_SECONDS)):
                printed, first = bytearray(), asyncio.Event()

                def on_output(data: bytes, printed: bytearray = printed, first: asyncio.Event = first) -> None:
                    printed.extend(data)
                    if until.encode() in printed:
                        loop.call_soon_threadsafe(first.set)

                child = await Child.start(
                    command, task_environ, on_output, ignores_stop_signals=ignores_stop_signals, fork=fork
                )
                try:
                    if signal_number is not None:
                        await asyncio.wait_for(first.wait(), TIMEOUT_SECONDS)
                        child.signal(signal_number)
                    returncode = await asyncio.wait_for(child.wait(), TIMEOUT_SECONDS)
                except asyncio.TimeoutError:
                    child.signal(signal.SIGKILL)
                    await child.wait()
                    raise AssertionError(f"{command} has not ended. Its output: {printed.decode()!r}") from None
                if fork is not None and child.parent_id != os.getpid():  # else this would kill what other tests use
                    await asyncio.to_thread(child.kill_left_processes)
                output = _ADDRESS.sub("0x", printed.decode())
                found.append(Outcome(returncode, output, child.not_forked))
            return found[0], found[1]
        finally:
            os.chdir(before)
            preloader.close()

    def run_script(self, text: str, *arguments: str, name: str = "train.py", **options: Any) -> tuple[Outcome, Outcome]:
        self.write(name, text)
        return self.run((os.environ.get("PRELOAD_PYTHON", sys.executable), name, *arguments), **options)
