"""The script of the layout tests: each task prints its step and its host, and writes its computed layout to a file.

srun splits long lines, so the script prints short ones only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from tests.processes import wait_until
from tf4slurm.errors import LayoutError
from tf4slurm.slurm.commands import layout_of, query_layout
from tf4slurm.slurm.environ import SlurmStep


def main(directory: Path) -> None:
    step = SlurmStep.from_environ(os.environ)
    try:
        from_environ = step.nodes_by_rank
    except LayoutError:
        from_environ = None
    layouts = {"environ": from_environ, "sattach": query_layout(step), "layout": layout_of(step)}
    name = f"{step.job_id}.{step.step_id}"
    (directory / f"{name}-{step.rank}").write_text(json.dumps(layouts))
    # Slurm forgets a component of a heterogeneous step once its tasks have ended.
    assert wait_until(lambda: len([*directory.glob(f"{name}-*")]) == step.num_tasks, timeout_seconds=60)
    print(name, socket.gethostname())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
