"""tf4slurm runs TensorFlow parameter-server jobs on Slurm, from the first process to the last exit.

Importing it does nothing: no tensorflow, no grpc, no environment, no handler.
"""

import importlib
import logging
from typing import Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

_LAZY = {
    "Job": "tf4slurm.job",
    "LocalCluster": "tf4slurm.tensorflow.local_cluster",
    "SlurmClusterResolver": "tf4slurm.tensorflow.resolver",
    "barrier": "tf4slurm.script_api",
    "data_service": "tf4slurm.script_api",
    "get_server_dictionary": "tf4slurm.server_dictionary",
    "on_stop": "tf4slurm.script_api",
    "report": "tf4slurm.script_api",
    "share_of": "tf4slurm.script_api",
    "should_stop": "tf4slurm.script_api",
}
_ROOMS = ("shutdown",)
__all__ = [
    "Job",
    "__version__",
    "barrier",
    "data_service",
    "get_server_dictionary",
    "on_stop",
    "report",
    "share_of",
    "should_stop",
    "shutdown",
]  # a star import must not load tensorflow: neither resolver nor LocalCluster


def __getattr__(name: str) -> Any:
    """Import what is public when it is first asked for."""
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'tf4slurm' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_ROOMS})
