"""`scale` of a LocalCluster: a worker joins, trains and leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook import SCALE
from tests.processes import wait_until_gone

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")


@pytest.mark.timeout(300)
def test_worker_that_scale_adds_trains_and_leaves(tmp_path: Path, process_mark: str) -> None:
    code = SCALE.format(cluster="tf4slurm.LocalCluster(ps=1, workers=1)")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["grown 2 worker/1 True", "shrunk True"]
    assert lines[2].startswith("workers=0: notebook-")
    assert "has started with 1 worker, and these stay until its end. Give 1 or more." in lines[2]
    assert lines[3].startswith("workers=None: ")
    assert lines[4:] == ["end COMPLETED"]
    assert not wait_until_gone(process_mark, 10)
