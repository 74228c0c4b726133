"""What a save takes from training: beside it, and in a pause of it, on a disk that writes 100 MB a second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Figure, ratio
from tests.jobs import TF4SLURM
from tests.processes import wait_until

_HERE = Path(__file__).parent
_BYTES = 1_600_000_000
_BYTES_PER_SECOND = 100_000_000
_WAYS = {"no save": "without a save", "beside": "during a save", "paused": "during a save in a pause"}


def measure_saving(directory: Path, rounds: int) -> list[Figure]:
    """Measure steps per second and the longest pause of 2 workers during a save of 1.6 GB on two ps."""
    source, disk, report = directory / "source", directory / "disk", directory / "saving.json"
    source.mkdir()
    disk.mkdir()
    throttled = [sys.executable, str(_HERE / "throttled_disk.py"), str(source), str(disk), str(_BYTES_PER_SECOND)]
    server = subprocess.Popen(throttled)
    try:
        assert wait_until(disk.is_mount, 30)
        script = [sys.executable, str(_HERE / "save_and_train.py"), str(disk), str(_BYTES), str(rounds), str(report)]
        run = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), "--ps", "2", "--workers", "2", "--"]
        subprocess.run([*run, *script], check=True, capture_output=True, timeout=1800)
    finally:
        server.terminate()
        server.wait(30)
    found = json.loads(report.read_text())
    rates, pauses, seconds = (
        {way: [each[key] for each in found[way]] for way in _WAYS} for key in ("steps_per_second", "pause", "seconds")
    )
    return [
        *(Figure(f"steps per second {_WAYS[way]}", "1/s", tuple(rates[way])) for way in _WAYS),
        ratio("steps per second during a save", rates["beside"], rates["no save"], ">= 0.9", beside="without a save"),
        Figure("longest pause without a save", "s", tuple(pauses["no save"])),
        Figure("longest pause during a save of 1.6 GB", "s", tuple(pauses["beside"]), "<= 0.3"),
        Figure("longest pause during such a save with consistent=True", "s", tuple(pauses["paused"])),
        Figure("duration of a save of 1.6 GB at 100 MB/s", "s", tuple(seconds["beside"])),
        Figure("duration of such a save with consistent=True", "s", tuple(seconds["paused"])),
    ]
