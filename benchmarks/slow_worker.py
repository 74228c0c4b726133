"""Time of an epoch with a worker at half speed: leased data shards against equal shares, in real local jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Figure

_SHARDS, _SECONDS = 300, 0.1
_SCRIPT = """
import os, sys, time
import tf4slurm

shards, seconds, is_leased = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "leased"
index = int(os.environ["TF4SLURM_TASK"].partition("/")[2])
leases = tf4slurm.data_shards(10 * shards, shard_size=10, epochs=1) if is_leased else range(index, shards, 3)
tf4slurm.barrier("start")
started = time.monotonic()
for shard in leases:
    time.sleep(seconds * (2 if index == 0 else 1))
tf4slurm.barrier("end")
print("seconds", time.monotonic() - started)
"""


def measure_slow_worker(directory: Path, runs: int) -> list[Figure]:
    """Return the duration of an epoch of three workers, one at half speed, and the ratio to the ideal 2.5 workers."""
    script = directory / "epoch.py"
    script.write_text(_SCRIPT)
    seconds = {kind: [_run(script, directory, kind) for _ in range(runs)] for kind in ("leased", "shares")}
    ideal = _SHARDS * _SECONDS / 2.5
    return [
        Figure("an epoch, one of three workers at half speed: leased shards", "s", tuple(seconds["leased"])),
        Figure("the same with equal shares", "s", tuple(seconds["shares"])),
        Figure("leased shards / 2.5 workers", "", tuple(each / ideal for each in seconds["leased"]), "< 1.1"),
    ]


def _run(script: Path, directory: Path, kind: str) -> float:
    program = (sys.executable, "-m", "tf4slurm", "run", "--runs-directory", str(directory / "runs"))
    options = ("--ps", "0", "--no-chief", "--workers", "3")
    command = (*program, *options, "--", sys.executable, str(script), str(_SHARDS), str(_SECONDS), kind)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return max(map(float, re.findall(r"seconds (\S+)", done.stdout)))
