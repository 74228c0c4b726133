"""Start, memory and recovery of the tasks of one host, forked from a preloader, executed, and started by hand."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from benchmarks.by_hand import tf_configs
from benchmarks.measure import Figure, ratio
from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.servers import free_ports

_SCRIPT = Path(__file__).with_name("train_and_tell.py")
_BOUNDS = {4: "<= 0.6", 10: "<= 0.3", 32: "<= 0.12"}  # of the start, relative to that by hand
_SERVING, _STEPPING = "worker killed until its server answers", "ps killed until the next step"
_KILLS = {_SERVING: "<= 0.3", _STEPPING: "<= 1.0"}  # in units of the import
_TIMEOUT_SECONDS = 300.0
_PSS = re.compile(r"^Pss:\s*(\d+) kB", re.MULTILINE)


def measure_preload(directory: Path, rounds: int) -> list[Figure]:
    """Measure jobs of 4, 10 and 32 tasks: a chief, a ps, and workers."""
    figures = []
    for count, bound in _BOUNDS.items():
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds):
            for way in ("by hand", "never", "auto"):
                place = directory / f"{count}-{number}-{way.replace(' ', '-')}"
                place.mkdir()
                for what, value in _measure(place, count, way).items():
                    found[f"{what} {way}"].append(value)
        hand, auto = found["start by hand"], found["start auto"]
        figures += [
            Figure("start of processes by hand to the first step", "s", tuple(hand), at=count),
            Figure("the same with --preload never", "s", tuple(found["start never"]), at=count),
            Figure("the same with --preload auto", "s", tuple(auto), at=count),
            ratio("auto over by hand", auto, hand, bound, beside="by hand", at=count),
            *_memory_figures(found, count),
        ]
        if count == 4:
            imports = tuple(_import_seconds() for _ in range(rounds))
            figures.append(Figure("import tensorflow", "s", imports))
            for what, longest in _KILLS.items():
                never, auto = found[f"{what} never"], found[f"{what} auto"]
                figures += [
                    Figure(f"{what}, --preload never", "s", tuple(never)),
                    Figure(f"{what}, --preload auto", "s", tuple(auto)),
                    ratio(f"{what}, over the import", auto, imports, longest, beside="import"),
                ]
    return figures


def _memory_figures(found: Mapping[str, list[float]], count: int) -> list[Figure]:
    hand, forked, whole = (found[f"memory {way}"] for way in ("by hand", "auto", "with preloader auto"))
    return [
        Figure("memory (PSS) of a task by hand", "MB", tuple(hand), at=count),
        Figure("the same with --preload auto", "MB", tuple(forked), at=count),
        ratio("auto over by hand, memory of a task", forked, hand, "<= 0.35", beside="by hand", at=count),
        ratio("the same with its part of the preloader", whole, hand, "", beside="by hand", at=count),
    ]


def _measure(directory: Path, count: int, way: str) -> dict[str, float]:
    """Run a job of `count` tasks once. Return what was measured, by name. The directory is new."""
    started = time.monotonic()
    with _by_hand(directory, count) if way == "by hand" else _job(directory, count, way) as own:
        found = {"start": _wait_for_step(directory, started) - started, **_memory(directory, own, count)}
        if way != "by hand" and count == 4:
            killed = _kill(directory, "worker-0")
            serving = directory / "worker-0.serving"
            assert wait_until(lambda: float(serving.read_text() or 0) > killed, _TIMEOUT_SECONDS)
            found[_SERVING] = float(serving.read_text()) - killed
            _wait_for_step(directory, float(serving.read_text()) + 1)
            killed = _kill(directory, "ps-0")
            found[_STEPPING] = _wait_for_step(directory, killed + 0.1) - killed
        (directory / "over").touch()
    return found


@contextlib.contextmanager
def _by_hand(directory: Path, count: int) -> Iterator[psutil.Process]:
    roles = ("chief", "ps", *("worker",) * (count - 2))
    first = free_ports(count)
    processes = [
        subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(directory)],
            env={**os.environ, "TF_CONFIG": config},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for config in tf_configs(roles, [f"127.0.0.1:{first + index}" for index in range(count)])
    ]
    try:
        yield psutil.Process()
        assert processes[0].wait(_TIMEOUT_SECONDS) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _job(directory: Path, count: int, way: str) -> Iterator[psutil.Process]:
    options = ("--ps", "1", "--workers", str(count - 2), "--preload", way, "--max-attempts", "2")
    command = [TF4SLURM, "run", "--runs-directory", str(directory / "runs"), *options]
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, "--", sys.executable, str(_SCRIPT), str(directory)], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield psutil.Process(process.pid)
            assert process.wait(_TIMEOUT_SECONDS) == 0, (directory / "output").read_text()
        finally:
            process.terminate()
            process.wait()


def _wait_for_step(directory: Path, after: float) -> float:
    """Return the time of the first step after the time `after`."""
    steps = directory / "steps"
    found: list[float] = []

    def look() -> bool:
        lines = steps.read_text().split("\n")[:-1] if steps.exists() else []
        found[:] = [float(line) for line in lines if float(line) > after]
        return bool(found)

    assert wait_until(look, _TIMEOUT_SECONDS)
    return found[0]


def _kill(directory: Path, task: str) -> float:
    """Kill a task. Return the time."""
    killed = time.monotonic()
    os.kill(int((directory / f"{task}.pid").read_text()), signal.SIGKILL)
    return killed


def _memory(directory: Path, own: psutil.Process, count: int) -> dict[str, float]:
    """Return the memory (PSS) in MB per task: of the tasks, and of these with the preloader and its keepers."""
    tasks = {int(path.read_text()) for path in directory.glob("*.pid")}
    assert len(tasks) == count
    preloaders = set()
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("preload/program.py") for word in process.cmdline()):
                preloaders.add(process.pid)

    def pss(ids: set[int]) -> float:
        return sum(int(_PSS.findall(Path(f"/proc/{each}/smaps_rollup").read_text())[0]) for each in ids) / 1e3 / count

    return {"memory": pss(tasks), "memory with preloader": pss(tasks | preloaders)}


def _import_seconds() -> float:
    code = "import time; begin = time.monotonic(); import tensorflow; print(time.monotonic() - begin)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
