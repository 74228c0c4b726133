"""Other versions of Python on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def find_python(version: str) -> str | None:
    """Return the path of a Python of this version, as `make test-pythons` finds it."""
    candidates = [
        shutil.which(f"python{version}") or "",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    for python in filter(None, candidates):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


def require_python(version: str) -> str:
    """Return the path of a Python of this version. Skip the test if there is none."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    return python
