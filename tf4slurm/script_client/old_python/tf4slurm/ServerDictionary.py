# ruff: noqa: N802, N803, N999
"""The old name of `get_server_dictionary`, for a Python that lacks tf4slurm."""

import os
from typing import Optional, Sequence

from tf4slurm_client import PlacementError, ServerDictionary, get_server_dictionary


def GetServerDictionary(
    ListOfTFTasks: Optional[Sequence[str]] = None,
    InfiniBand: bool = False,
    *,
    TensorFlowServerTasks: Optional[Sequence[str]] = None,
    InfinyBand: bool = False,
) -> ServerDictionary:
    """Return (cluster, task type, task index), as `tf4slurm.ServerDictionary.GetServerDictionary` does."""
    tasks = ListOfTFTasks if ListOfTFTasks is not None else TensorFlowServerTasks
    if tasks is None:
        raise PlacementError("No tasks were given: expected a list with one role for each rank.")
    addresses = os.environ.get("TFSERVER", "").split()
    if InfiniBand or InfinyBand or not addresses:
        return get_server_dictionary(tasks, InfiniBand or InfinyBand)
    return get_server_dictionary(tasks, interface=",".join(f"{address}/32" for address in addresses))
