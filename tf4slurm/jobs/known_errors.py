"""Explain known error messages of TensorFlow, Keras and Python."""

from __future__ import annotations

import re
from collections.abc import Sequence


def explain(lines: Sequence[str]) -> list[str]:
    """Return explanations and remedies for the known errors in these lines, the most likely first."""
    text = "\n".join(lines)
    return [meaning for pattern, meaning in _KNOWN if re.search(pattern, text)]


_KERAS_2 = "Use Keras 2 (pip install 'tf4slurm[tf-keras]', and export TF_USE_LEGACY_KERAS=1 before the job)"
_KNOWN = (
    (
        r"keras/src/[\s\S]*create_per_worker_dataset",
        f"Keras 3's fit does not work under ParameterServerStrategy. {_KERAS_2}, or write the loop with "
        "tf4slurm.tensorflow.run_steps.",
    ),
    (
        r"keras/src/[\s\S]*unsupported type .*PerReplica",
        "Keras 3's fit does not work under MultiWorkerMirroredStrategy with several workers. "
        f"{_KERAS_2}, or write the loop with strategy.run in a tf.function.",
    ),
    (
        r"module 'keras[\w.]*' has no attribute '(experimental|SidecarEvaluator)'"
        r"|Argument\(s\) not recognized: \{'(lr|decay)'"
        r"|must end in `\.weights\.h5`|Invalid filepath extension for saving",
        f"The script is written for Keras 2, and this is Keras 3. {_KERAS_2}, or change that call.",
    ),
    (
        r"ImportError: Keras cannot be imported",
        "TF_USE_LEGACY_KERAS=1 needs the package tf-keras, of TensorFlow's own version: pip install "
        "'tf4slurm[tf-keras]', or unset that variable.",
    ),
    (
        r"module 'tensorflow[\w.]*' has no attribute '(estimator|contrib)'",
        "The script needs a part that TensorFlow does not have any more: estimator went with 2.16, contrib with 2.0. "
        "Run it with an older TensorFlow, or change that part.",
    ),
    (
        r"module 'tensorflow[\w.]*' has no attribute "
        r"'(Session|placeholder|app|flags|get_variable|global_variables_initializer|\w+Optimizer|MonitoredTrainingSession"
        r"|logging|ConfigProto|Supervisor|replica_device_setter|SessionRunHook|disable_v2_behavior)'",
        'The script is written for TensorFlow 1. Import it as "import tensorflow.compat.v1 as tf", and call '
        "tf.disable_v2_behavior() first.",
    ),
    (
        r"Could not start gRPC server",
        "TensorFlow's server could not listen at its address: another server has the port, or it is another host's. "
        "Start one server in each task, with cluster, type and index as TF_CONFIG says.",
    ),
    (
        r"UnavailableError|failed to connect to all addresses",
        "The server of another task was not reached, or is gone: look at how the other tasks ended, and at their logs.",
    ),
    (r"No module named '", "The job's Python lacks a package: start the job from the environment that has it."),
    (
        r"(?i:out of memory)|MemoryError|ResourceExhausted|\bOOM\b",
        "Memory ran out: ask for more, or take smaller batches.",
    ),
    (r"No space left on device", "A disk is full: make room, or let the script write elsewhere."),
    (r"(?i)Permission denied", "A file may not be read or written by this user: look at the path in the last lines."),
    (r"No such file or directory", "A file is missing on that host: paths must be on a file system that all share."),
)
