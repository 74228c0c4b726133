"""Keep closures that run at the same time as a save from being cancelled with it."""

from __future__ import annotations

import threading
from typing import Any

from tensorflow.python.eager import cancellation

_managers = threading.local()


def separate_threads() -> None:
    """Let TensorFlow use the cancellation manager of a closure only in the thread that runs the closure. Idempotent.

    TensorFlow (2.16 to 2.21) keeps it in a global variable, where functions of other threads find it, too. If such a
    function fails, for example a save on a full disk, TensorFlow cancels all closures with it.
    """
    cancellation.context = _find_manager
    cancellation.CancellationManagerContext.__enter__ = _enter
    cancellation.CancellationManagerContext.__exit__ = _exit


def _find_manager() -> Any:
    return getattr(_managers, "current", None)


def _enter(context: Any) -> None:
    _managers.current = context._cancellation_manager


def _exit(_context: Any, *_error: Any) -> None:
    _managers.current = None
