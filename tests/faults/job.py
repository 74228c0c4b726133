"""One training job (train.py) on the hosts of a lab, for the fault trials."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults.cases import Form
from tests.jobs import ROLES, TF4SLURM
from tests.processes import MarkedProcess, marked_processes, read_process, wait_until
from tests.slurm.lab import SlurmLab

TRAIN = Path(__file__).with_name("train.py")
TASKS = ("chief/0", "ps/0", "worker/0", "worker/1")
_START_SECONDS = 120.0  # four imports of TensorFlow at once, on a busy machine

_SCRIPTS = {
    Form.BATCH: 'exec "$@"',
    # Bash would replace itself by a single last command.
    Form.SCRIPT: '"$@" & until [ -e "$EXIT_FILE" ] || ! kill -0 $! 2>/dev/null; do sleep 0.1; done\n'
    '[ ! -e "$EXIT_FILE" ] || exit 0\nwait $!',
}
_SRUN = """#!/bin/bash
# the real srun, but the agent of rank $ABSENT_RANK never starts
options=(); while [[ "$1" == --* ]]; do options+=("$1"); shift; done
exec /usr/bin/srun "${options[@]}" bash -c \\
  'if [ "$SLURM_PROCID" = "$ABSENT_RANK" ]; then exec sleep 1000; fi; exec "$@"' bash "$@"
"""


class TrainingJob:
    """A job of one chief, one ps and two workers, each on its own host."""

    def __init__(self, directory: Path, lab: SlurmLab, mark: str) -> None:
        self.directory = directory
        self.lab = lab
        self.runs = directory / "runs"
        self.exit_file = directory / "exit"
        self._mark = mark
        self._form = Form.BATCH
        self._job_id = ""
        self._salloc: subprocess.Popen[str] | None = None

    def start(self, form: Form, options: Sequence[str], misbehaviours: Mapping[str, str], absent: str | None) -> None:
        """Start the job; `misbehaviours` by task; `absent` is the task whose agent never starts."""
        self._form = form
        environ = {"EXIT_FILE": str(self.exit_file), **(self._replace_srun(absent) if absent else {})}
        arguments = [f"{task}={misbehaviour}" for task, misbehaviour in misbehaviours.items()]
        command = [TF4SLURM, "run", "--runs-directory", str(self.runs), *ROLES, *options]
        command += ["--", sys.executable, str(TRAIN), str(self.directory), *arguments]
        if form is Form.SALLOC:
            survive = ("--no-kill",) if "--spares" in options else ()
            salloc = ("salloc", "-Q", "-N4", "-n4", *survive, *command)
            with (self.directory / "output").open("w") as output:
                self._salloc = self.lab.popen(*salloc, env=environ, stdout=output, stderr=subprocess.STDOUT)
            return
        script = self.directory / "job.sh"
        script.write_text(f"#!/bin/bash\n{_SCRIPTS[form]}\n")
        options = ("--parsable", "--no-requeue", "-N4", "-n4", "-o", str(self.directory / "output"))
        self._job_id = self.lab.run("sbatch", *options, script, *command, env=environ).stdout.strip()

    def finish(self) -> None:
        """Let training end normally."""
        (self.directory / "finish").touch()

    def cancel(self) -> None:
        self.lab.run("scancel", self._job_id)

    def close(self) -> None:
        """End the leftovers of a failed trial; the lab cancels the Slurm job."""
        if self._salloc is not None and self._salloc.poll() is None:
            self._salloc.kill()
            self._salloc.wait()

    # Processes

    def process_of(self, target: str) -> int:
        """Return the process id on this host of a task's child, "agent of TASK", "launcher" or "batch script"."""
        if target.startswith("agent of "):
            return self._agent_of(self.process_of(target.removeprefix("agent of ")))
        marked = marked_processes(self._mark)
        if target == "launcher":
            (found,) = [process.pid for process in marked if _arguments(process)[1:3] == [TF4SLURM, "run"]]
        elif target == "batch script":
            scripts = {process.pid for process in marked if "slurm_script" in process.command.partition(TF4SLURM)[0]}
            (found,) = [
                script for script in scripts if scripts.isdisjoint(self.waiting_for(script))
            ]  # not a fork of the script
        else:
            (found,) = [process.pid for process in marked if _is_child_of(process, target)]
        return found

    def _agent_of(self, child: int) -> int:
        """Return the agent on the host of a child. The parent of a forked child is a process of the preloader."""
        marked = marked_processes(self._mark)
        (host,) = [process.host for process in marked if process.pid == child]
        agents = [process.pid for process in marked if process.host == host and _is_agent(process.pid)]
        (found,) = [each for each in agents if psutil.Process(each).ppid() in agents]  # the other one is its guard
        return found

    def waiting_for(self, process_id: int) -> list[int]:
        """Return the ancestors of a process, which only wait for it; one may be salloc."""
        return [process.pid for process in psutil.Process(process_id).parents()]

    def children_on(self, node: str) -> list[MarkedProcess]:
        return [p for p in marked_processes(self._mark) if p.host == node and any(_is_child_of(p, t) for t in TASKS)]

    def node_of(self, task: str) -> str:
        """Return the node of a task, or of "launcher"."""
        if task == "launcher":
            return next(p.host for p in marked_processes(self._mark) if p.pid == self.process_of("launcher"))
        registered = next(
            event["text"] for event in self.events if event["kind"] == "registered" and event["task"] == task
        )
        (node,) = re.findall(r"registered from (\S+) at", str(registered))
        return str(node)

    # Files of the job

    @property
    def run_directory(self) -> Path:
        (found,) = self.runs.iterdir()
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events written so far; empty before the log exists."""
        found = list(self.runs.glob("*/events.jsonl"))
        return [json.loads(line) for line in _lines(found[0])] if found else []

    def event(self, kind: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["kind"] == kind), None)

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_directory / "result.json").read_text())
        return found

    @property
    def output(self) -> str:
        path = self.directory / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def import_seconds(self, task: str) -> list[tuple[int, float, float]]:
        """Return attempt, duration and end time of each import of TensorFlow in a task, in order."""
        lines = [line.split() for line in _lines(self.directory / "imports")]
        return [(int(attempt), float(took), float(at)) for name, attempt, took, at in lines if name == task]

    def steps(self) -> list[tuple[int, int, float]]:
        """Return attempt, step and time of the completed closures, as recorded by the chief."""
        lines = [line.split() for line in _lines(self.directory / "steps")]
        return [(int(attempt), int(step), float(at)) for attempt, step, at in lines]

    def worker_ran_at(self, task: str) -> list[float]:
        """Return the times at which a worker ran a closure, in all attempts."""
        logs = self.run_directory.glob(f"logs/{task.replace('/', '-')}.*.log")
        return sorted(int(at) / 1000 for log in logs for at in re.findall(r"^ran at (\d+)$", log.read_text(), re.M))

    def time_in(self, name: str) -> float | None:
        """Return the time that the script wrote to a file."""
        path = self.directory / name
        text = path.read_text() if path.exists() else ""
        return float(text) if text else None

    # Waiting

    def wait_until_training(self) -> None:
        """Wait until a checkpoint exists and both workers have run a closure."""

        def is_training() -> bool:
            return self.time_in("saved") is not None and all(self.worker_ran_at(t) for t in TASKS if "worker" in t)

        self.wait_for(is_training, _START_SECONDS, "training did not begin")

    def wait_for_event(self, kind: str, timeout_seconds: float) -> float:
        """Wait for the first event of this kind; return its time."""
        self.wait_for(lambda: self.event(kind) is not None, timeout_seconds, f"there was no {kind}")
        return float(next(event for event in self.events if event["kind"] == kind)["time"])

    def wait_for(self, condition: Any, timeout_seconds: float, otherwise: str) -> None:
        is_met = wait_until(condition, timeout_seconds)
        assert is_met, f"{otherwise} within {timeout_seconds:g} s; the job printed:\n{self.output[-6000:]}"

    def wait_for_exit_code(self, timeout_seconds: float) -> int:
        """Return the exit code of the batch job, or of salloc, as a shell reports it."""
        if self._salloc is not None:
            code = self._salloc.wait(timeout_seconds)
            return 128 - code if code < 0 else code
        _, code_and_signal = self.lab.wait_for_job(self._job_id, timeout_seconds)
        code, number = map(int, code_and_signal.split(":"))
        return 128 + number if number else code

    def _replace_srun(self, absent: str) -> dict[str, str]:
        wrapper = self.directory / "bin" / "srun"
        wrapper.parent.mkdir()
        wrapper.write_text(_SRUN)
        wrapper.chmod(0o755)
        path = subprocess.run(["printenv", "PATH"], capture_output=True, text=True, check=True).stdout.strip()
        return {"PATH": f"{wrapper.parent}:{path}", "ABSENT_RANK": str(TASKS.index(absent))}


def _is_child_of(process: MarkedProcess, task: str) -> bool:
    environ = read_process(process.pid, "environ").split(b"\0")
    return f"TF4SLURM_TASK={task}".encode() in environ and _arguments(process)[1:2] == [str(TRAIN)]


def _is_agent(process_id: int) -> bool:
    """Return whether it is an agent, or the guard above one, whose command is the same."""
    return psutil.Process(process_id).cmdline()[1:4] == ["-I", "-S", "-c"]


def _arguments(process: MarkedProcess) -> list[str]:
    return shlex.split(process.command) if process.command.count("'") % 2 == 0 else []


def _lines(path: Path) -> list[str]:
    """Return the whole lines of a file that is being written."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
