"""Which `ShutdownMethod` a name stands for: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable

from tf4slurm.server_dictionary import ServerDictionary
from tf4slurm.shutdown.barrier import BarrierMethod
from tf4slurm.shutdown.method import ShutdownMethod
from tf4slurm.shutdown.queues import QueueMethod

_METHODS: dict[str, Callable[[ServerDictionary], ShutdownMethod]] = {"barrier": BarrierMethod, "queue": QueueMethod}


def choose_method(name: str, own: ServerDictionary) -> ShutdownMethod:
    """Return the method of that name for this process's task.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in _METHODS:
        raise ValueError(f"{name!r} is no method to shut down: expected one of {', '.join(map(repr, _METHODS))}.")
    return _METHODS[name](own)
