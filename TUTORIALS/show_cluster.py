"""Print the role and address of this task, and the cluster spec: python show_cluster.py [INTERFACE]"""

from __future__ import annotations

import sys

import tf4slurm

interface = sys.argv[1] if len(sys.argv) > 1 else None
roles = ["ps", "worker", "worker", "worker"]  # of ranks 0, 1, 2, 3
cluster, task_type, task_index = tf4slurm.get_server_dictionary(roles, interface=interface)

print(f"I am {task_type}/{task_index} at {cluster[task_type][task_index]}")
if task_type == "ps":
    print(cluster)
