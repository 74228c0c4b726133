"""Tell who this task is, and where the others are: python show_map.py [NETWORK]"""

from __future__ import annotations

import sys

import tf4slurm

network = sys.argv[1] if len(sys.argv) > 1 else None
roles = ["ps", "worker", "worker", "worker"]  # of rank 0, 1, 2, 3
cluster, task_type, task_index = tf4slurm.get_server_dictionary(roles, interface=network)

print(f"I am {task_type}/{task_index} at {cluster[task_type][task_index]}")
if task_type == "ps":
    print(cluster)
