"""Write to a run directory whose file system may not answer for minutes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tf4slurm.errors import RunDirectoryError
from tf4slurm.jobs.run_directory import RunDirectory

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0  # before a warning
_FILE_SYSTEM_SECONDS = 300.0  # after the warning; a parallel file system's failover takes 30 to 300 s
_T = TypeVar("_T")


class PatientWriter:
    """Calls functions that write to a run directory, in one thread and in the order of the calls.

    Attributes:
        thread: The executor of this thread.
        is_impatient: Event that limits each wait for the file system to 5 s once the caller has set it.
    """

    def __init__(self, run_directory: RunDirectory) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.is_impatient = asyncio.Event()
        self._path = str(run_directory.path)

    async def call(self, write: Callable[..., _T], *arguments: object) -> _T:
        """Call `write(*arguments)` in the thread and return its result. Wait at most 305 s, with a warning after 5 s.

        Exceptions of `write` are passed on.

        Raises:
            RunDirectoryError: The call was not done within 305 s, or within 5 s if `is_impatient` is set.
        """
        writing = asyncio.wrap_future(self.thread.submit(write, *arguments))
        hurry: asyncio.Future[Any] = asyncio.create_task(self.is_impatient.wait())
        text = f"The file system of the run directory {self._path!r} does not answer"
        try:
            await asyncio.wait({writing}, timeout=_PATIENCE_SECONDS)
            if not writing.done():
                logger.warning("%s: waiting for it, at most %g s", text, _FILE_SYSTEM_SECONDS)
                both: set[asyncio.Future[Any]] = {writing, hurry}
                await asyncio.wait(both, timeout=_FILE_SYSTEM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
        if writing.done():
            return writing.result()
        raise RunDirectoryError(f"{text}: what was to be written there may be missing.", path=self._path)
