"""Real jobs, compared with the same started by hand: the start on Slurm, eight imports at once."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.measure import Figure, ratio
from tests.jobs import TF4SLURM
from tests.slurm.lab import SlurmLab

_HERE = Path(__file__).parent
_IMPORT = _HERE / "import_and_tell.py"
_TASKS = 8
_ROLES = ("--no-chief", "--ps", "1", "--workers", str(_TASKS - 1))
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_CHILD = """
echo $(date +%s.%N) $(cut -d" " -f14,15 /proc/$PPID/stat) > "$0/child-$SLURM_PROCID"
for turn in $(seq 100); do
  set -- "$0"/child-*
  [ $# = {tasks} ] && exit 0
  sleep 0.2
done
exit 1
"""  # writes the time and the processor time of the agent so far; no task exits before all have started
_SRUN = '#!/bin/sh\ndate +%s.%N > "$MARKS/srun"\nexec {srun} "$@"\n'
_ROUNDS = """
export PATH={shims}:"$PATH"
for number in $(seq {rounds}); do
  export MARKS={directory}/ours-$number
  date +%s.%N > "$MARKS/run"
  {ours} sh -c {child} "$MARKS"
  export MARKS={directory}/bare-$number
  srun -Q -n{tasks} sh -c {child} "$MARKS"
done
"""


def measure_start_on_slurm(directory: Path, rounds: int) -> list[Figure]:
    """Measure from srun's start to the last of 8 children's on 4 hosts, beside bare srun; and the agents' cpu time."""
    shims = directory / "shims"
    shims.mkdir()
    srun = subprocess.run(["sh", "-c", "command -v srun"], capture_output=True, text=True, check=True).stdout.strip()
    (shims / "srun").write_text(_SRUN.format(srun=srun))
    (shims / "srun").chmod(0o755)
    for number in range(1, rounds + 1):
        for kind in ("ours", "bare"):
            (directory / f"{kind}-{number}").mkdir()
    ours = shlex.join([TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *_ROLES, "--"])
    child = shlex.quote(_CHILD.format(tasks=_TASKS))
    script = _ROUNDS.format(shims=shims, rounds=rounds, directory=directory, ours=ours, child=child, tasks=_TASKS)
    with SlurmLab() as lab:
        lab.run("salloc", "-Q", "-N4", f"-n{_TASKS}", "bash", "-e", "-c", script, timeout_seconds=60 + 20 * rounds)
    values: dict[str, list[float]] = defaultdict(list)
    for number in range(1, rounds + 1):
        for kind in ("ours", "bare"):
            marks = directory / f"{kind}-{number}"
            children = [path.read_text().split() for path in marks.glob("child-*")]
            assert len(children) == _TASKS
            last = max(float(started) for started, *_ in children)
            values[kind].append(last - float((marks / "srun").read_text()))
            if kind == "ours":
                values["run"].append(last - float((marks / "run").read_text()))
                values["agents"].append(sum(int(ticks) for _, *both in children for ticks in both) / _CLOCK_TICKS)
    what = f"{_TASKS} tasks on 4 hosts of a real Slurm"
    more = tuple(a - b for a, b in zip(values["ours"], values["bare"], strict=True))
    return [
        Figure(f"start, {what}: srun's start to all children started", "s", tuple(values["ours"])),
        Figure("the same by bare srun", "s", tuple(values["bare"])),
        Figure("so much more", "s", more, "< 1.5", "bare srun"),
        Figure("the same since the start of tf4slurm run", "s", tuple(values["run"])),
        Figure(f"processor time of the {_TASKS} agents until then, together", "s", tuple(values["agents"])),
    ]


def measure_import_storm(directory: Path, rounds: int) -> list[Figure]:
    """Measure until all 8 tasks of a local job have imported TensorFlow, beside 8 bare processes."""
    values: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for kind in ("ours", "bare") if number % 2 == 0 else ("bare", "ours"):
            place = directory / f"{kind}-{number}"
            place.mkdir()
            command = [sys.executable, str(_IMPORT), str(place), str(_TASKS)]
            started = time.monotonic()
            if kind == "ours":
                run = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *_ROLES, "--", *command]
                subprocess.run(run, check=True, capture_output=True, timeout=300)
            else:
                _run_bare(command)
            marks = [float(path.read_text()) for path in place.glob("*.imported")]
            assert len(marks) == _TASKS
            values[kind].append(max(marks) - started)
    ours, bare = values["ours"], values["bare"]
    return [
        Figure(f"import storm, {_TASKS} tasks on one host: until all have imported TensorFlow", "s", tuple(ours)),
        Figure("the same by bare processes", "s", tuple(bare)),
        ratio("import storm, ours over bare processes", ours, bare, "<= 1", beside="bare processes"),
    ]


def _run_bare(command: list[str]) -> None:
    processes = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for number in range(_TASKS)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=300) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
