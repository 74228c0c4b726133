"""The program of each task of a `LocalCluster`: `python -m tf4slurm.tensorflow.local_server DIRECTORY`.

A ps or worker runs a TensorFlow server until its agent terminates it. The chief's task represents the notebook: it
writes DIRECTORY/cluster.json, and exits when the notebook creates DIRECTORY/end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tf4slurm.system.variables import RUN_DIRECTORY_VARIABLE

_POLL_SECONDS = 0.05


def main(directory: Path) -> None:
    """Run this task until the cluster ends."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    if task["type"] == "chief":
        _stand_for_notebook(directory, cluster)
        return
    import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

    tf.distribute.Server(cluster, job_name=task["type"], task_index=task["index"], protocol="grpc").join()


def _stand_for_notebook(directory: Path, cluster: dict[str, list[str]]) -> None:
    draft = directory / "draft"
    draft.write_text(json.dumps({"cluster": cluster, "run_directory": os.environ[RUN_DIRECTORY_VARIABLE]}))
    draft.rename(directory / "cluster.json")
    while not (directory / "end").exists():
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
