"""A job on four hosts of a real Slurm whose shared file system stalls for a minute, as a parallel file system may."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measure import Figure
from tests.faults.disk import freezable_disk, freeze, thaw
from tests.processes import wait_until
from tests.slurm.lab import SlurmLab

_TASKS = 4
_STALL_SECONDS = 60
_LINES = 900  # 10 lines a second
_SCRIPT = f"""
import time
for number in range({_LINES}):
    print("line", number, time.monotonic(), flush=True)
    time.sleep(0.1)
"""
_LINE = re.compile(rb"^line (\d+) ([\d.]+)$", re.MULTILINE)


def measure_stall(directory: Path, rounds: int) -> list[Figure]:
    """Measure what a stall of the run directory's file system costs a job whose scripts print 10 lines a second."""
    found = [_measure(directory / str(number)) for number in range(rounds)]
    lost, lines, pauses, logs = zip(*found, strict=True)
    what = f"the shared file system stalls for {_STALL_SECONDS} s under a job of {_TASKS} tasks on {_TASKS} hosts"
    return [
        Figure(f"{what}: tasks lost or restarted", "", lost, "<= 0"),
        Figure("lines of output lost or out of order", "", lines, "<= 0"),
        Figure("longest pause of a script that prints 10 times a second", "s", pauses, "<= 1"),
        Figure("end of the stall until all logs continue", "s", logs),
    ]


def _measure(directory: Path) -> tuple[float, float, float, float]:
    directory.mkdir()
    runs, script = directory / "runs", directory / "print_lines.py"
    script.write_text(_SCRIPT)
    with freezable_disk(runs), SlurmLab() as lab:
        run = ("-m", "tf4slurm", "run", "--runs-directory", runs, "--ps", "0", "--no-chief")
        command = ("salloc", "-Q", f"-N{_TASKS}", f"-n{_TASKS}", sys.executable, *run, "--", sys.executable, script)
        job = lab.popen(*command, cwd=directory, stdout=subprocess.DEVNULL)
        try:
            assert wait_until(lambda: len(_log_sizes(runs)) == _TASKS and all(_log_sizes(runs).values()), 60)
            time.sleep(5)
            freeze(runs)
            before = _log_sizes(runs)
            time.sleep(_STALL_SECONDS)
            thaw(runs)
            started = time.monotonic()
            assert wait_until(lambda: all(size > before[log] for log, size in _log_sizes(runs).items()), 60)
            seconds = time.monotonic() - started
        finally:
            exit_code = job.wait(300)
        assert exit_code == 0
        (run_directory,) = {log.parents[1] for log in before}
        events = [json.loads(line) for line in (run_directory / "events.jsonl").read_text().splitlines()]
        lost = sum(event["kind"] in ("lost", "restarted") for event in events)
        missing, pause = 0, 0.0
        for log in before:
            lines = [(int(number), float(at)) for number, at in _LINE.findall(log.read_bytes())]
            missing += _LINES - sum(number == expected for expected, (number, _) in enumerate(lines))
            pause = max(pause, *(b - a for (_, a), (_, b) in itertools.pairwise(lines)))
        return lost, missing, pause, seconds


def _log_sizes(runs: Path) -> Mapping[Path, int]:
    return {path: path.stat().st_size for path in runs.glob("*/logs/*.log")}
