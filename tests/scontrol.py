"""Nodelists as Slurm expands and folds them: `scontrol show hostnames`, which needs no daemon, only a slurm.conf."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_CONF = "ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=test Nodes=ALL\n"


class Scontrol:
    def __init__(self, directory: Path) -> None:
        conf = directory / "slurm.conf"
        conf.write_text(_CONF)
        self._environ: Mapping[str, str] = {**os.environ, "SLURM_CONF": str(conf)}

    def expand(self, nodelist: str) -> tuple[str, ...] | None:
        """Return the names in the nodelist; None if Slurm refuses it or prints nothing, both with exit code 0."""
        done = self._show("hostnames", nodelist)
        return None if "rror" in done.stderr or "Invalid" in done.stderr else tuple(done.stdout.split()) or None

    def fold(self, nodes: str) -> str:
        """Return the nodelist that Slurm makes of names separated by commas."""
        return self._show("hostlist", nodes).stdout.strip()

    def _show(self, kind: str, argument: str) -> subprocess.CompletedProcess[str]:
        command = ["scontrol", "show", kind, argument]
        return subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=10, check=True)


@pytest.fixture(scope="session")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Scontrol:
    """Skip, or fail if TF4SLURM_REQUIRE_SLURM=1, without scontrol."""
    if shutil.which("scontrol") is None:
        reason = "No scontrol on PATH: apt-get install slurm-wlm."
        if os.environ.get("TF4SLURM_REQUIRE_SLURM") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return Scontrol(tmp_path_factory.mktemp("scontrol"))
