"""Write what this process may use of its host: show_grants.py DIRECTORY DEVICES"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path


def main(directory: Path, devices: Path) -> None:
    grants = {
        "node": os.environ["SLURMD_NODENAME"],
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory": memory_limits(),
        "devices": [path.name for path in sorted(devices.glob("nvidia*")) if is_allowed(path)],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    draft = directory / f"draft-{os.environ['SLURM_PROCID']}"
    draft.write_text(json.dumps(grants))
    draft.replace(directory / f"{os.environ['SLURM_PROCID']}.json")


def memory_limits() -> list[str]:
    """Return the limits of this task, its step and its job in bytes (cgroup v1); empty where Slurm sets none."""
    (name,) = (line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    _, of_slurm, group = name.partition("/slurm")
    here = Path(f"/sys/fs/cgroup/memory/slurm{group}")  # the lab's host shows its own part of the hierarchy
    jobs = [each for each in (here, *here.parents) if each.name.startswith(("task_", "step_", "job_"))]
    return [(each / "memory.limit_in_bytes").read_text().strip() for each in jobs] if of_slurm else []


def is_allowed(device: Path) -> bool:
    """Return whether the control group lets this process open the device, which has no driver."""
    try:
        os.close(os.open(device, os.O_RDONLY))
    except OSError as error:
        return error.errno != errno.EPERM
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
