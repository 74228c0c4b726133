# ruff: noqa: N802, N803, N999
"""The old name of `tf4slurm.server_dictionary`, kept for scripts written for tf4slurm before 0.1."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from tf4slurm.errors import PlacementError
from tf4slurm.server_dictionary import ServerDictionary, get_server_dictionary


def GetServerDictionary(
    ListOfTFTasks: Sequence[str] | None = None,
    InfiniBand: bool = False,
    *,
    TensorFlowServerTasks: Sequence[str] | None = None,
    InfinyBand: bool = False,
) -> ServerDictionary:
    """Return (cluster, task type, task index). Deprecated: use `get_server_dictionary` instead.

    The environment variable TFSERVER may list the IP addresses of all hosts, in any order. Then, unless InfiniBand is
    given, each host uses its own address in this list.
    """
    warnings.warn(
        "tf4slurm.ServerDictionary.GetServerDictionary is now tf4slurm.get_server_dictionary",
        DeprecationWarning,
        stacklevel=2,
    )
    tasks = ListOfTFTasks if ListOfTFTasks is not None else TensorFlowServerTasks
    if tasks is None:
        raise PlacementError("No tasks were given: expected a list with one role for each rank.")
    addresses = os.environ.get("TFSERVER", "").split()
    if InfiniBand or InfinyBand or not addresses:
        return get_server_dictionary(tasks, InfiniBand or InfinyBand)
    return get_server_dictionary(tasks, interface=",".join(f"{address}/32" for address in addresses))
