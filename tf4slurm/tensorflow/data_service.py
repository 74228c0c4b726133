"""One server of TensorFlow's tf.data service: `python data_service.py DIRECTORY`, as the child of its agent.

It is started by its path with the Python of the user's script, and imports nothing of tf4slurm: that Python has the
TensorFlow that the script uses, and need not have tf4slurm.
Read beside https://www.tensorflow.org/api_docs/python/tf/data/experimental/service.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_HEARTBEAT_MILLISECONDS = 1000


def main(directory: str) -> None:
    """Serve until this process is killed; a dispatcher that is started again goes on with what `directory` holds."""
    role, _, index = os.environ["TF4SLURM_TASK"].partition("/")
    services = json.loads(os.environ["TF4SLURM_SERVICES"])
    (dispatcher,) = services["data-dispatcher"]
    address = services[role][int(index)]
    port = int(address.rpartition(":")[2])  # held by the agent: gRPC listens beside it by default (SO_REUSEPORT)
    service = _import_service()
    if role == "data-dispatcher":
        server = service.DispatchServer(
            service.DispatcherConfig(
                port=port,
                protocol="grpc",
                work_dir=directory,
                fault_tolerant_mode=True,
                worker_addresses=services["data-worker"],
            )
        )
    else:
        server = service.WorkerServer(
            service.WorkerConfig(
                port=port,
                protocol="grpc",
                dispatcher_address=dispatcher,
                worker_address=address,
                heartbeat_interval_ms=_HEARTBEAT_MILLISECONDS,
            )
        )
    print(f"serves the job's data at {address}", flush=True)
    server.join()


def _import_service() -> Any:
    try:
        import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types
    except ImportError as error:
        sys.exit(
            f"The data service needs TensorFlow, and {sys.executable} has none ({error}). Name the Python that has it "
            "with --data-python."
        )
    return tf.data.experimental.service


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # its files have names that others may have, too
    main(sys.argv[1])
