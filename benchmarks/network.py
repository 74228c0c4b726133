"""Effect of the choice of the network: InfiniBand against a slow Ethernet, on four hosts of the lab."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.measure import Figure
from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).with_name("large_variables.py")
_SLOW = "tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 50ms"


def measure_infiniband(directory: Path) -> list[Figure]:
    """Measure steps per second with 40 MB of variables over ib0 and slow eth0, and the bytes on each network."""
    rates: dict[str, float] = {}
    shares: dict[str, float] = {}
    with SlurmLab() as lab:
        for node in lab.nodes:
            lab.on(node, *_SLOW.split())
        for network, network_options in (("ib0", ["--interface", "infiniband"]), ("eth0", [])):
            report = directory / f"{network}.json"
            before = _sent(lab)
            options = ["--runs-directory", str(directory / "runs"), "--ps", "1", "--workers", "2", *network_options]
            command: list[str | Path] = [TF4SLURM, "run", *options, "--", sys.executable, SCRIPT, "20", report]
            lab.run("salloc", "-Q", "-N4", "-n4", *command, timeout_seconds=300)
            sent = {name: count - before[name] for name, count in _sent(lab).items()}
            rates[network] = json.loads(report.read_text())["steps_per_second"]
            shares[network] = 100 * sent["ib0"] / sum(sent.values())
    return [
        Figure("40 MB of variables over ib0: share of the bytes that crossed ib0", "%", (shares["ib0"],), "> 99"),
        Figure("40 MB of variables over ib0: steps per second", "1/s", (rates["ib0"],), ""),
        Figure("40 MB of variables over eth0 at 100 Mbit/s: steps per second", "1/s", (rates["eth0"],), ""),
        Figure("40 MB of variables, ib0 / eth0", "x", (rates["ib0"] / rates["eth0"],), ">= 5", "eth0"),
    ]


def _sent(lab: SlurmLab) -> dict[str, int]:
    """Return the bytes that all nodes have sent on each network."""
    total = {"eth0": 0, "ib0": 0}
    for node in lab.nodes:
        for name in total:
            total[name] += int(lab.on(node, "cat", f"/sys/class/net/{name}/statistics/tx_bytes").stdout)
    return total
