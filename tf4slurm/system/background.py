"""Threads for functions that may wait for a file system, so that the event loop does not wait.

A parallel file system may stall for 30 to 300 s during a failover, and a waiting thread cannot be ended.
`asyncio.to_thread` is unsuitable, because asyncio.run waits for its threads at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures.thread import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def in_thread(function: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
    """Run a function in a new thread. If the future is cancelled, the thread continues and its result is dropped."""
    thread = ThreadPoolExecutor(1)
    result = asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
    thread.shutdown(wait=False)
    return result


class OrderedThread:
    """A thread that runs functions one after another, in the order of the calls."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def submit(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function whose result and errors are ignored."""
        self._thread.submit(function, *arguments)

    def run(self, function: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
