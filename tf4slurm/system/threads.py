"""Run functions in threads, so that they do not block an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures.thread import ThreadPoolExecutor  # not lazily from concurrent.futures, on the event loop
from typing import TypeVar

_T = TypeVar("_T")


def in_thread(function: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
    """Run `function(*arguments)` in a new thread, and return a future of its result.

    Use this for functions that may wait for a file system. A parallel file system may stall for 30 to 300 s during a
    failover. If the future is cancelled, the thread continues and its result is dropped. `asyncio.to_thread` is not
    used, because asyncio.run waits for its threads at the end.
    """
    thread = ThreadPoolExecutor(1)
    result = asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
    thread.shutdown(wait=False)
    return result
