"""Simulated time and processes: all event loops of a job in one thread, in the order of a virtual clock.

Each simulated process has an event loop of its own. The world runs one callback after the other: that which is due
first, in whichever process. A process that is paused runs none, and one that was killed never runs again. Nothing here
depends on the real time, on hashes or on addresses of objects, so a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

_set_running_loop: Callable[[Any], None] = asyncio._set_running_loop


_CLOCK_SECONDS = 1e-6
MAX_CALLBACKS = 300_000
"""The largest number of callbacks in one run; a usual one has 1,000 to 5,000."""


class Handle:
    """A callback of one process, now or at a time."""

    __slots__ = ("args", "at", "callback", "is_message", "process")

    def __init__(
        self, process: Process, at: float, callback: Callable[..., object], args: tuple[Any, ...], is_message: bool
    ) -> None:
        self.process = process
        self.at = at
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.is_message = is_message

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.at


class World:
    """The virtual clock and the queue of all callbacks.

    Attributes:
        now: The virtual time in seconds; the same in all processes.
        errors: What the event loops have reported, such as tasks that have failed and that nobody awaits.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.errors: list[str] = []
        self._ready: deque[Handle] = deque()
        self._later: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._is_stopped = False

    def add(self, handle: Handle) -> None:
        if handle.at <= self.now:
            self._ready.append(handle)
        else:
            self._count += 1
            heapq.heappush(self._later, (handle.at, self._count, handle))

    def stop(self) -> None:
        """Let `run` return."""
        self._is_stopped = True

    def run(self, limit: float) -> bool:
        """Run callbacks until `stop`; return False if the time exceeds the limit or nothing is left."""
        ready, later, running = self._ready, self._later, None
        self._is_stopped = False
        left = MAX_CALLBACKS
        try:
            while not self._is_stopped:
                left -= 1
                if not left:
                    self.errors.append(f"{MAX_CALLBACKS} callbacks have run, the last in {running}")
                    return False
                if ready:
                    handle = ready.popleft()
                elif later:
                    at, _, handle = heapq.heappop(later)
                    if handle.callback is None:
                        continue
                    if at > limit:
                        heapq.heappush(later, (at, 0, handle))
                        return False
                    self.now = at
                else:
                    return False
                callback, process = handle.callback, handle.process
                if callback is None or process.is_dead:
                    continue
                if process.is_paused:
                    process.backlog.append(handle)
                    continue
                if process is not running:
                    running = process
                    _set_running_loop(process)
                callback(*handle.args)
            return True
        finally:
            _set_running_loop(None)

    def clear(self) -> None:
        """Forget all callbacks: the run is over."""
        self._ready.clear()
        self._later.clear()


class Process:
    """A simulated process: an event loop that the world runs.

    Attributes:
        is_paused: The process is stopped (SIGSTOP), or its host is suspended.
        is_dead: The process has exited or was killed.
        backlog: The callbacks that have become due during a pause.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.backlog: list[Handle] = []
        self._pauses = 0
        self._tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def is_paused(self) -> bool:
        return self._pauses > 0

    def pause(self) -> None:
        self._pauses += 1

    def resume(self, *, timers_first: bool) -> None:
        """Continue with the callbacks of the pause, in their order, or first those that are no messages."""
        self._pauses -= 1
        if not self._pauses:
            backlog, self.backlog = self.backlog, []
            if timers_first:
                backlog.sort(key=lambda handle: handle.is_message)
            self.world._ready.extend(backlog)

    def kill(self) -> None:
        self.is_dead = True

    def end_tasks(self) -> None:
        """Cancel what still runs, so that no coroutine is destroyed unfinished."""
        self.is_dead, self._pauses, self.backlog = False, 0, []
        for task in self._tasks:
            coroutine = task.get_coro()
            if (
                not task.done()
                and inspect.iscoroutine(coroutine)
                and inspect.getcoroutinestate(coroutine) == "CORO_CREATED"
            ):
                coroutine.close()
            task.cancel()

    @property
    def failures(self) -> list[str]:
        """What went wrong in tasks whose results nobody has read."""
        failed = (task for task in self._tasks if task.done() and getattr(task, "_log_traceback", False))
        return [f"{self.name}: {task.exception()!r}" for task in failed if not task.cancelled()]

    @property
    def has_tasks(self) -> bool:
        return any(not task.done() for task in self._tasks)

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Call back at a time: the arrival of a message or of a signal."""
        handle = Handle(self, when, callback, args, True)
        self.world.add(handle)
        return handle

    # The interface of an event loop, as far as asyncio uses it

    def time(self) -> float:
        return self.world.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        handle = Handle(self, self.world.now, callback, args, False)
        self.world._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        handle = Handle(self, when, callback, args, False)
        self.world.add(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        least = _CLOCK_SECONDS if delay > 0 else 0.0  # so that the time advances
        return self.call_at(self.world.now + max(delay, least), callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coro: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=cast(Any, self))
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call the function a moment later: a simulated process has no threads."""
        future = self.create_future()
        self.call_later(0.001, self._call, future, func, args)
        return future

    @staticmethod
    def _call(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            self.world.errors.append(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")


def _close_if_new(coroutine: Any) -> None:
    """Close a coroutine that has not begun, which a cancellation does not reach."""
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        coroutine.close()
