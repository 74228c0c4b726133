"""What people do under srun without a launcher: write TF_CONFIG from Slurm's variables, be the script. COMMAND"""

from __future__ import annotations

import json
import os
import subprocess
import sys

_PORT = 8888
_ROLES = ("chief", "ps", "worker", "worker")


def main(command: list[str]) -> None:
    show = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    nodes = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    cluster: dict[str, list[str]] = {}
    tasks = []
    for role, node in zip(_ROLES, nodes, strict=True):
        addresses = cluster.setdefault(role, [])
        tasks.append({"type": role, "index": len(addresses)})
        addresses.append(f"{node}:{_PORT}")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": tasks[int(os.environ["SLURM_PROCID"])]})
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
