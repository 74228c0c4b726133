"""Checks of an agent before it starts a child."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tf4slurm.agent.child import check_length
from tf4slurm.errors import PlacementError

LONGEST = 32 * os.sysconf("SC_PAGE_SIZE") - len("TF_CONFIG=") - 1
"""What Linux takes, with the name, and the zero at its end."""


def test_cluster_spec_too_long_for_an_environment_is_refused() -> None:
    command = [sys.executable, "-S", "-c", "import os; print(len(os.environ['TF_CONFIG']))"]
    longest = check_length("x" * LONGEST, 5_000)
    run = subprocess.run(command, env={"TF_CONFIG": longest}, capture_output=True, text=True, check=True)
    assert int(run.stdout) == LONGEST
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(command, env={"TF_CONFIG": longest + "x"}, check=False)
    with pytest.raises(PlacementError, match=f"of 6,000 tasks makes TF_CONFIG {LONGEST + 11:,} bytes long"):
        check_length("x" * (LONGEST + 1), 6_000)
