"""The use of GPUs: nvidia-smi's output, whose format is that of NVIDIA's manual, not recorded from a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tf4slurm.agent.gpu_usage import GpuUsage, read_gpu_usage, summarize

ONE, TWO, THREE = (f"GPU-{digit * 8}-1111-2222-3333-444444444444" for digit in "abc")
GPUS = f"{ONE}, 90\n{TWO}, 40\n{THREE}, 7\n"


@pytest.mark.parametrize(
    ("apps", "gpus", "expected"),
    [
        (f"10, {ONE}, 2048\n", GPUS, GpuUsage(90.0, 2048 * 2**20)),
        (f"10, {ONE}, 100\n11, {TWO}, 50\n99, {THREE}, 1000\n", GPUS, GpuUsage(65.0, 150 * 2**20)),
        (f"10, {ONE}, 100\n11, {ONE}, 50\n", GPUS, GpuUsage(90.0, 150 * 2**20)),
        (f"99, {ONE}, 100\n", GPUS, GpuUsage()),
        ("", GPUS, GpuUsage()),
        (f"10, {ONE}, [N/A]\n11, {ONE}, 5\n", GPUS, GpuUsage(90.0, None)),
        (f"10, {ONE}, 100\n", f"{ONE}, [N/A]\n", GpuUsage(None, 100 * 2**20)),
        (f"10, {ONE}, 100\n11, {TWO}, 1\n", f"{ONE}, [Unknown Error]\n{TWO}, 30\n", GpuUsage(30.0, 101 * 2**20)),
        ("10, MIG-1234, 100\n", GPUS, GpuUsage(None, 100 * 2**20)),
        ("No running processes found\n", "No devices were found\n", GpuUsage()),
    ],
)
def test_usage_is_that_of_the_gpus_of_the_processes(apps: str, gpus: str, expected: GpuUsage) -> None:
    assert summarize(apps, gpus, [10, 11]) == expected


def install(directory: Path, code: str, patch: pytest.MonkeyPatch) -> None:
    """Put a program of this name first in PATH."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    patch.setenv("PATH", str(directory), prepend=os.pathsep)


def test_program_that_is_missing_or_fails_gives_no_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpu_usage(os.getpid()) is None
    install(tmp_path, "echo NVIDIA-SMI has failed; exit 9", monkeypatch)
    assert read_gpu_usage(os.getpid()) is None
    install(tmp_path, f'case "$1" in *apps*) echo "{os.getpid()}, {ONE}, 64";; *) echo "{ONE}, 50";; esac', monkeypatch)
    assert read_gpu_usage(os.getpid()) == GpuUsage(50.0, 64 * 2**20)
