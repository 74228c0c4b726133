"""tf4slurm runs TensorFlow parameter-server jobs on Slurm and on laptops, from the first process to the last exit.

In notebooks and programs that start jobs:
    Job                      one job: its options, run() or submit(), status(), wait(), logs(), report()
    Sweep                    one job for each point of a grid; random_points, Uniform, LogUniform make random points
    run, submit, script      start a job described by a JobSpec or BatchSpec, or return its batch script
    status, logs, wait, cancel, resume, list_jobs, make_report
                             watch and control jobs; they return JobStatus, LogLine and KnownJob
    grow, grow_script, shrink
                             add and remove workers of a running job
    SlurmCluster, LocalCluster
                             ps and workers for a notebook, in a Slurm job or on this host

In training scripts:
    get_server_dictionary    the cluster spec of this job, also without tf4slurm run
    SlurmClusterResolver     the cluster resolver for tf.distribute
    report, should_stop, on_stop, barrier
                             report a step, save before a stop, wait for the other tasks
    data_service, share_of   the job's tf.data service; this worker's share of the input files
    data_shards              shards of the data, leased to the workers as they finish them
    tensorflow               strategies, checkpoints and hooks
    shutdown                 completion signals, in scripts that start their own servers

    errors                   every error that tf4slurm raises

Each name is imported at its first use; importing the package imports neither TensorFlow nor gRPC.
"""

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036 - a script may import this with an older Python
    raise ImportError(
        f"tf4slurm needs Python 3.10 or newer, and this is {sys.version.split()[0]}. A script with an older Python "
        "imports tf4slurm_client in place of tf4slurm."
    )

if TYPE_CHECKING:
    from tf4slurm import errors as errors
    from tf4slurm import shutdown as shutdown
    from tf4slurm import tensorflow as tensorflow
    from tf4slurm.api import cancel as cancel
    from tf4slurm.api import grow as grow
    from tf4slurm.api import grow_script as grow_script
    from tf4slurm.api import list_jobs as list_jobs
    from tf4slurm.api import logs as logs
    from tf4slurm.api import make_report as make_report
    from tf4slurm.api import resume as resume
    from tf4slurm.api import run as run
    from tf4slurm.api import script as script
    from tf4slurm.api import shrink as shrink
    from tf4slurm.api import status as status
    from tf4slurm.api import submit as submit
    from tf4slurm.api import wait as wait
    from tf4slurm.clusters.local import LocalCluster as LocalCluster
    from tf4slurm.clusters.slurm import SlurmCluster as SlurmCluster
    from tf4slurm.control.script_failure import ScriptFailure as ScriptFailure
    from tf4slurm.job import Job as Job
    from tf4slurm.jobs.logs import LogLine as LogLine
    from tf4slurm.jobs.registry import KnownJob as KnownJob
    from tf4slurm.jobs.schema import TaskStatus as TaskStatus
    from tf4slurm.jobs.status import JobStatus as JobStatus
    from tf4slurm.scripts.data_shards import data_shards as data_shards
    from tf4slurm.scripts.functions import barrier as barrier
    from tf4slurm.scripts.functions import data_service as data_service
    from tf4slurm.scripts.functions import on_stop as on_stop
    from tf4slurm.scripts.functions import report as report
    from tf4slurm.scripts.functions import share_of as share_of
    from tf4slurm.scripts.functions import should_stop as should_stop
    from tf4slurm.server_dictionary import get_server_dictionary as get_server_dictionary
    from tf4slurm.spec.batch_spec import BatchSpec as BatchSpec
    from tf4slurm.spec.job_spec import JobSpec as JobSpec
    from tf4slurm.spec.points import LogUniform as LogUniform
    from tf4slurm.spec.points import Uniform as Uniform
    from tf4slurm.spec.points import random_points as random_points
    from tf4slurm.sweep import Sweep as Sweep
    from tf4slurm.tensorflow.resolver import SlurmClusterResolver as SlurmClusterResolver

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

_NAMES = {
    "tf4slurm.api": "cancel grow grow_script list_jobs logs make_report resume run script shrink status submit wait",
    "tf4slurm.spec.batch_spec": "BatchSpec",
    "tf4slurm.job": "Job",
    "tf4slurm.jobs.logs": "LogLine",
    "tf4slurm.jobs.registry": "KnownJob",
    "tf4slurm.control.script_failure": "ScriptFailure",
    "tf4slurm.jobs.schema": "TaskStatus",
    "tf4slurm.jobs.status": "JobStatus",
    "tf4slurm.scripts.functions": "barrier data_service on_stop report share_of should_stop",
    "tf4slurm.scripts.data_shards": "data_shards",
    "tf4slurm.server_dictionary": "get_server_dictionary",
    "tf4slurm.spec.job_spec": "JobSpec",
    "tf4slurm.spec.points": "LogUniform Uniform random_points",
    "tf4slurm.sweep": "Sweep",
    "tf4slurm.clusters.local": "LocalCluster",
    "tf4slurm.clusters.slurm": "SlurmCluster",
    "tf4slurm.tensorflow.resolver": "SlurmClusterResolver",
}
"""The public names of each module.

No module in this package may have one of these names, because its import would replace the public name.
"""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("errors", "shutdown", "tensorflow")
__all__ = [name for name in ("__version__", *_MODULES, *_MODULE_OF) if name != "SlurmClusterResolver"]
"""All public names but `SlurmClusterResolver`, for which a star import or help() would load TensorFlow."""

if not TYPE_CHECKING:  # for a type checker an unknown attribute is an error

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULE_OF[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
