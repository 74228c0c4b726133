"""The environment variables that tf4slurm sets for its agents and for the processes that agents start."""

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

CONTROL_VARIABLE = "TF4SLURM_CONTROL"  # addresses of the control service, "host:port", separated by commas
TOKEN_VARIABLE = "TF4SLURM_TOKEN"  # noqa: S105 - the job's token, for each call
CERTIFICATE_VARIABLE = "TF4SLURM_CERTIFICATE"  # of the control service
SETTINGS_VARIABLE = "TF4SLURM_SETTINGS"  # the job's settings for an agent, as JSON
ANSWER_VARIABLE = "TF4SLURM_ANSWER"  # file to which a launcher that `api` started writes its run directory
RUN_NAME_VARIABLE = "TF4SLURM_RUN_NAME"  # name of the run directory of an element of a local sweep
RANK_VARIABLE = "TF4SLURM_RANK"  # of a local agent
PRELOADER_VARIABLE = "TF4SLURM_PRELOADER"  # name and token of a preloader's socket; for srun, a secret of the step
TASK_VARIABLE = "TF4SLURM_TASK"  # the script's task, such as "worker/0"
ATTEMPT_VARIABLE = "TF4SLURM_ATTEMPT"  # number of the attempt, from 1
RUN_DIRECTORY_VARIABLE = "TF4SLURM_RUN_DIRECTORY"  # path
SCRIPT_CHANNEL_VARIABLE = "TF4SLURM_SCRIPT_CHANNEL"  # a socket: a path, or "@" and a name in the abstract namespace
SERVICES_VARIABLE = "TF4SLURM_SERVICES"  # of the tf.data service: {"data-dispatcher": ["10.1.0.4:40123"], …}

AGENT_VARIABLES = (
    *(CONTROL_VARIABLE, TOKEN_VARIABLE, CERTIFICATE_VARIABLE, SETTINGS_VARIABLE, RANK_VARIABLE),
    PRELOADER_VARIABLE,
)
"""Variables that a launcher sets for its agents. Agents do not pass them on to their child processes."""

SCRIPT_VARIABLES = (
    "TF_CONFIG",
    *(TASK_VARIABLE, ATTEMPT_VARIABLE, RUN_DIRECTORY_VARIABLE, SCRIPT_CHANNEL_VARIABLE, SERVICES_VARIABLE),
)
"""Variables that an agent sets for its child process, the user's script."""

PYTHON_VARIABLE = "TF4SLURM_PYTHON"  # tf4slurm's interpreter, for the sidecar of a script whose Python lacks tf4slurm
PYTHONPATH_VARIABLE = "TF4SLURM_PYTHONPATH"  # and its PYTHONPATH

SCRIPT_CLIENT = Path(__file__).parents[1] / "script_client"
"""The directory of `tf4slurm_client`, for a script whose Python lacks tf4slurm."""

_MIN_INTEROP_THREADS = 4
"""Minimum of TF_NUM_INTEROP_THREADS. By default TensorFlow starts one thread per CPU that it may use. With a single
thread, closures on parameter servers never end."""

# By default gRPC waits 1 s to 2 min before it reconnects: too long after the restart of a worker. To a host that was
# powered off, TCP sends again for about 15 min. A keepalive time, even one that is never reached, lets gRPC set
# TCP_USER_TIMEOUT to the keepalive timeout.
_QUICK_RECONNECTION = (
    "grpc.initial_reconnect_backoff_ms=100,grpc.max_reconnect_backoff_ms=500,"
    "grpc.keepalive_time_ms=86400000,grpc.keepalive_timeout_ms=20000"
)


def set_tf_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the variables with which TensorFlow trains on ps without hangs, unless the user has set them."""
    environ.setdefault("TF_GRPC_DEFAULT_OPTIONS", _QUICK_RECONNECTION)
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if cpus < _MIN_INTEROP_THREADS:
        environ.setdefault("TF_NUM_INTEROP_THREADS", str(_MIN_INTEROP_THREADS))


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that all children of an agent have in common, from those of the agent."""
    result = {name: value for name, value in environ.items() if name not in AGENT_VARIABLES}
    result["TF_GRPC_REUSE_PORT"] = "true"  # TensorFlow's server listens on the port that the agent holds
    result.setdefault("PYTHONUNBUFFERED", "1")
    result.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in a compiled library names the line of the script
    result["PYTHONPATH"] = append_path(result.get("PYTHONPATH", ""), SCRIPT_CLIENT)
    set_tf_defaults(result)
    return result


def append_path(paths: str, directory: Path) -> str:
    """Return the search path `paths` with `directory` at its end, unless it has the directory already.

    At the end, the directory hides none of the user's modules.
    """
    if str(directory) in paths.split(os.pathsep):
        return paths
    return f"{paths}{os.pathsep}{directory}" if paths else str(directory)


def client_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a script under plain srun, whose Python lacks tf4slurm, finds its modules.

    PYTHONPATH has the old names, too, which an agent does not set for its child: their package is called tf4slurm.
    """
    own = environ.get("PYTHONPATH", "")
    # A checkout of tf4slurm on PYTHONPATH would hide the old names.
    paths = os.pathsep.join(path for path in own.split(os.pathsep) if path != str(SCRIPT_CLIENT.parents[1]))
    return {
        PYTHON_VARIABLE: sys.executable,
        PYTHONPATH_VARIABLE: own,
        "PYTHONPATH": append_path(append_path(paths, SCRIPT_CLIENT), SCRIPT_CLIENT / "old_python"),
    }
