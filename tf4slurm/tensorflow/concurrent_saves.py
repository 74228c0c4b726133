"""What TensorFlow needs so that a save and closures do not disturb each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import cancellation
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

_managers = threading.local()
_saves = threading.local()
_read_without_copy = BaseResourceVariable.read_value_no_copy


def separate_threads() -> None:
    """Let TensorFlow use the cancellation manager of a closure only in the thread that runs the closure. Idempotent.

    TensorFlow keeps it in a global variable, where functions of other threads find it, too. If such a function fails,
    for example a save on a full disk, TensorFlow cancels all closures with it.
    """
    if not hasattr(cancellation, "CancellationManagerContext"):  # TensorFlow 2.11 has no global variable
        return
    cancellation.context = _find_manager
    cancellation.CancellationManagerContext.__enter__ = _enter
    cancellation.CancellationManagerContext.__exit__ = _exit


@contextlib.contextmanager
def copied_tables() -> Iterator[None]:
    """Let a save in the `with` block copy each table, a variable with sparse updates, while these updates go on.

    TensorFlow's saves read without a copy. The next update of the table then copies it, and all others wait until the
    copy is complete, 1.6 s for 800 MB. With either way there is one copy.
    """
    BaseResourceVariable.read_value_no_copy = _read
    _saves.copies = True
    try:
        yield
    finally:
        _saves.copies = False


def _read(variable: Any) -> Any:
    """Read a variable. Takes the place of `read_value_no_copy`, which differs for tables only."""
    return variable.read_value() if getattr(_saves, "copies", False) else _read_without_copy(variable)


def _find_manager() -> Any:
    return getattr(_managers, "current", None)


def _enter(context: Any) -> None:
    _managers.current = context._cancellation_manager


def _exit(_context: Any, *_error: Any) -> None:
    _managers.current = None
