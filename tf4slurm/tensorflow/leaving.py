"""How a chief leaves while a worker of its is lost: TensorFlow's coordinator would never let it."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

_noted: weakref.WeakSet[Any] = weakref.WeakSet()


def let_leave(coordinator: Any) -> None:
    """Have this process end when its script has ended, also while a worker is lost; what else calls it, does no harm.

    The coordinator's destructor takes a lock. A thread that waits for a lost worker holds it, and Python lets no such
    thread go on once it exits: so the chief would hang for ever, its traceback printed (seen in TensorFlow 2.21). What
    the destructor would stop ends with the process. Nothing public says so, hence the private name, if it is there.
    """
    cluster = getattr(coordinator, "_cluster", None)
    if cluster is not None and cluster not in _noted:
        _noted.add(cluster)
        atexit.register(_skip_stop, weakref.ref(cluster))


def _skip_stop(reference: weakref.ref[Any]) -> None:
    cluster = reference()
    if cluster is not None:
        cluster.stop = lambda: None
