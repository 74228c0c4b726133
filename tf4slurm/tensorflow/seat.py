"""What runs in each place of a `LocalCluster`: `python -m tf4slurm.tensorflow.seat DIRECTORY`.

A ps or worker serves until its agent ends it. The chief's place is kept for the notebook, which is told the address:
DIRECTORY/tf_config is TF_CONFIG, and DIRECTORY/end means that the notebook has left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

_LOOK_SECONDS = 0.05


def main(directory: Path) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    if task["type"] == "chief":
        draft = directory / "draft"
        draft.write_text(json.dumps(config))
        draft.rename(directory / "tf_config")
        while not (directory / "end").exists():
            time.sleep(_LOOK_SECONDS)
        return
    import tensorflow as tf  # type: ignore[import-untyped]  # it ships no types

    tf.distribute.Server(config["cluster"], job_name=task["type"], task_index=task["index"], protocol="grpc").join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
