"""Set TF_CONFIG from Slurm's variables and execute the command, as users do under srun without a launcher.

python by_hand.py ROLES COMMAND
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

_PORT = 8888


def tf_configs(roles: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Return the TF_CONFIG of each task."""
    cluster: dict[str, list[str]] = {}
    tasks = []
    for role, address in zip(roles, addresses, strict=True):
        others = cluster.setdefault(role, [])
        tasks.append({"type": role, "index": len(others)})
        others.append(address)
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


def main(roles: list[str], command: list[str]) -> None:
    show = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    nodes = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    configs = tf_configs(roles, [f"{node}:{_PORT}" for node in nodes])
    os.environ["TF_CONFIG"] = configs[int(os.environ["SLURM_PROCID"])]
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
