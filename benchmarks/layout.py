"""Time to compute the layout of a large step and to expand a long nodelist, beside peers in the same run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Figure

_NODES, _TASKS_PER_NODE = 10_000, 8
_NODELIST = f"n[1-{_NODES}]"
_ENVIRON = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": str(_NODES * _TASKS_PER_NODE),
    "SLURM_STEP_NUM_TASKS": str(_NODES * _TASKS_PER_NODE),
    "SLURM_STEP_NODELIST": _NODELIST,
    "SLURM_STEP_TASKS_PER_NODE": f"{_TASKS_PER_NODE}(x{_NODES})",
    "SLURMD_NODENAME": "n1",
}
_TENSORFLOW = """
import json, os, time
os.environ.update({environ!r})
from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import SlurmClusterResolver
times = []
for _ in range({runs}):
    started = time.perf_counter()
    resolver = SlurmClusterResolver(gpus_per_node=8, gpus_per_task=1, auto_set_gpu=False)
    spec = resolver.cluster_spec()
    times.append(time.perf_counter() - started)
assert spec.num_tasks("worker") == {num_tasks}
print(json.dumps(times))
"""


def measure_map(directory: Path, runs: int) -> list[Figure]:
    """Compute the node of each of 80,000 ranks on 10,000 nodes, with its checks; and TensorFlow's cluster spec."""
    from tf4slurm.slurm.environ import SlurmStep

    num_tasks = _NODES * _TASKS_PER_NODE
    step_of = {
        "block": {"SLURM_DISTRIBUTION": "block", "SLURM_GTIDS": ",".join(map(str, range(_TASKS_PER_NODE)))},
        "cyclic": {"SLURM_DISTRIBUTION": "cyclic", "SLURM_GTIDS": ",".join(map(str, range(0, num_tasks, _NODES)))},
    }
    figures = []
    for distribution, variables in step_of.items():
        environ = {**_ENVIRON, **variables}
        values = _times(lambda environ=environ: SlurmStep.from_environ(environ).nodes_by_rank, runs)  # type: ignore[misc]
        figures.append(Figure(f"map of {num_tasks} tasks on {_NODES} nodes ({distribution})", "s", values, "< 0.15"))
    code = _TENSORFLOW.format(environ=_ENVIRON, runs=runs, num_tasks=num_tasks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    theirs = tuple(json.loads(done.stdout.splitlines()[-1]))
    return [*figures, Figure("the same by TensorFlow's SlurmClusterResolver (block only)", "s", theirs, "")]


def measure_nodelist(directory: Path, runs: int) -> list[Figure]:
    """Expand n[1-10000] to a sequence of names."""
    import hostlist  # type: ignore[import-untyped]  # it ships no types, and is in the bench extra only
    from ClusterShell.NodeSet import NodeSet  # type: ignore[import-untyped]

    from tf4slurm.slurm.nodelist import expand_nodelist

    peers: dict[str, tuple[Callable[[], object], str]] = {
        "tf4slurm": (lambda: expand_nodelist(_NODELIST), "< 2"),
        "ClusterShell NodeSet": (lambda: tuple(NodeSet(_NODELIST)), ""),
        "python-hostlist": (lambda: hostlist.expand_hostlist(_NODELIST), ""),
    }
    return [
        Figure(f"expand {_NODELIST} ({name})", "ms", tuple(1000 * value for value in _times(expand, runs)), bound)
        for name, (expand, bound) in peers.items()
    ]


def _times(function: Callable[[], object], runs: int) -> tuple[float, ...]:
    times = []
    for _ in itertools.repeat(None, runs):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return tuple(times)
