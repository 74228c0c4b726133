"""Run a dispatcher or data worker of TensorFlow's tf.data service.

An agent starts this file as `python data_service.py DIRECTORY`.

Import nothing from tf4slurm here: the Python of the user's script runs this file, and may not have tf4slurm. See
https://www.tensorflow.org/api_docs/python/tf/data/experimental/service.
"""

from __future__ import annotations

import json
import os
import sys

_HEARTBEAT_MILLISECONDS = 1000


def main(directory: str) -> None:
    """Run the dispatcher or data worker that TF4SLURM_TASK names, until the process is killed.

    A dispatcher keeps its journal in `directory`. If it is restarted, it resumes from the journal.

    Raises:
        SystemExit: TensorFlow cannot be imported.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        sys.exit(
            f"The data service needs TensorFlow, which {sys.executable} cannot import ({error}). Name a Python that "
            "has it with --data-python."
        )
    role, _, index = os.environ["TF4SLURM_TASK"].partition("/")
    services = json.loads(os.environ["TF4SLURM_SERVICES"])
    address = services[role][int(index)]
    port = int(address.rpartition(":")[2])  # the agent holds this port, and gRPC shares it (SO_REUSEPORT)
    service = tf.data.experimental.service
    if role == "data-dispatcher":
        journal = {"work_dir": directory, "fault_tolerant_mode": True}
        config = service.DispatcherConfig(port, "grpc", **journal, worker_addresses=services["data-worker"])
        server = service.DispatchServer(config)
    else:
        (dispatcher,) = services["data-dispatcher"]
        config = service.WorkerConfig(dispatcher, address, port, "grpc", heartbeat_interval_ms=_HEARTBEAT_MILLISECONDS)
        server = service.WorkerServer(config)
    print(f"serving the job's data at {address}", flush=True)
    server.join()


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # files in this directory, such as training.py, must not hide other modules
    sys.path[:] = [path for path in sys.path if path != here]
    main(sys.argv[1])
