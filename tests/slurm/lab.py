"""A real Slurm of several hosts on this machine: the Python interface of lab.sh."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.processes import MARK_VARIABLE, wait_until

DEFAULT_NODES = ("r1-n2", "r1-n9", "r1-n10", "gpu-09")  # not in string order, and with two prefixes
_SCRIPT = Path(__file__).with_name("lab.sh")
_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
_ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd slurm-wlm-mysql-plugin",
    "sacct": "slurm-wlm",
    "mariadbd": "mariadb-server-core",
}
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)


class LabError(Exception):
    """The lab or a command in it failed; the text has the command's output."""


def missing_slurm(*, accounting: bool = False) -> str | None:
    """Return what this machine lacks for a lab (with sacct if `accounting`) and how to install it; None if nothing."""
    if sys.platform != "linux":
        return f"The Slurm lab needs Linux, this is {sys.platform}."
    if os.geteuid() != 0:
        return "The Slurm lab makes network namespaces and needs root: run pytest as root."
    programs = _PROGRAMS | (_ACCOUNTING_PROGRAMS if accounting else {})
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        packages = " ".join(sorted({programs[program] for program in missing}))
        return f"The Slurm lab needs {', '.join(missing)} on PATH: apt-get install {packages} (some are in /usr/sbin)."
    return None


class SlurmLab:
    """A lab from `up` to `down`, as a context manager; it ends by itself if this Python is killed.

    CPUs and GPUs are simulated, memory is 16000 MB per node. Simultaneous labs are isolated from each other.

    Args:
        nodes: Node names, in the order of slurm.conf.
        host_suffix: Host name = node name + suffix.
        resolve_names: Whether /etc/hosts has the node names.
        proctrack: "linuxproc", or "cgroup" (cgroup v1 only), which also ends daemonised children of a job.
        constrain: With proctrack "cgroup", whether tasks are limited to their CPUs, memory and GPUs.
        accounting: Whether slurmdbd runs, with the lab's own database, so that sacct shows all jobs.
        configless: Whether nodes have no slurm.conf, but fetch it from slurmctld.
        ip_version: 4, or 6 for hosts without IPv4 addresses.
        programs: Directory of programs that hide those of the same name on PATH, as a site's wrapper of srun does.
        extra_conf: Lines of slurm.conf; each replaces the lab's own line with the same key.
    """

    def __init__(
        self,
        nodes: Sequence[str] = DEFAULT_NODES,
        *,
        cpus: int = 8,
        gpus: int = 4,
        kill_wait_seconds: int = 5,
        slurmd_timeout_seconds: int = 15,
        host_suffix: str = "",
        resolve_names: bool = True,
        proctrack: str = "linuxproc",
        constrain: bool = False,
        accounting: bool = False,
        configless: bool = False,
        ip_version: int = 4,
        programs: str | Path | None = None,
        extra_conf: str = "",
    ) -> None:
        self.nodes = tuple(nodes)
        self.directory = Path()
        self._programs = programs
        self._settings = {
            "NODES": " ".join(nodes),
            "CPUS": str(cpus),
            "GPUS": str(gpus),
            "KILLWAIT": str(kill_wait_seconds),
            "SLURMD_TIMEOUT": str(slurmd_timeout_seconds),
            "HOST_SUFFIX": host_suffix,
            "RESOLVE": str(int(resolve_names)),
            "PROCTRACK": proctrack,
            "CONSTRAIN": str(int(constrain)),
            "ACCOUNTING": str(int(accounting)),
            "CONFIGLESS": str(int(configless)),
            "IP_VERSION": str(ip_version),
            "EXTRA_CONF": extra_conf,
        }
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> SlurmLab:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Start Slurm and wait until all nodes are idle (about 1 s; with accounting 4 s).

        Raises:
            LabError: The lab did not start; the text has the ends of the logs, and nothing is left.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="tf4slurm-lab-"))
        with tempfile.TemporaryFile("w+") as output:
            # The holder stops the lab when its stdin ends, also if this process is killed.
            self._holder = holder = subprocess.Popen(
                [_SCRIPT, "hold"],
                env=self._daemon_environment() | self._settings,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            is_up = self.directory / "run" / "is-up"
            try:
                wait_until(lambda: is_up.exists() or holder.poll() is not None, timeout_seconds=120, poll_seconds=0.02)
                if not is_up.exists():
                    self.down()
                    output.seek(0)
                    raise LabError(f"The Slurm lab did not start.\n{output.read()}")
            except BaseException:
                self.down()
                raise

    def down(self) -> None:
        """Stop the lab and every process in it. Does nothing if the lab is not up."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        assert holder.stdin is not None
        holder.stdin.close()
        try:
            holder.wait(timeout=60)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        if (self.directory / "settings").exists():
            self._control("down")
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(
        self,
        *command: str | Path,
        timeout_seconds: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host, where slurmctld runs; its output is captured.

        Args:
            env: Variables added to those of this process.
            check: Whether an exit code other than 0 is a LabError.

        Raises:
            LabError: The command failed; the text has its output.
            subprocess.TimeoutExpired: The command timed out and was killed.
        """
        return self._call(["run", *command], timeout_seconds, env, cwd, check)

    def on(
        self,
        node: str,
        *command: str | Path,
        timeout_seconds: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, outside of any job; otherwise like `run`."""
        return self._call(["on", node, *command], timeout_seconds, env, cwd, check)

    def popen(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[str] | None = subprocess.DEVNULL,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on the login host; the process is the command itself, so signals reach it."""
        return self._open(["run", *command], env, cwd, stdin, stdout, stderr)

    def on_login_host(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the words before a command that start it on the login host, and the variables that they need."""
        return (str(_SCRIPT), "run"), self._environment()

    def popen_on(
        self, node: str, *command: str | Path, stdin: int | IO[str] | None, stdout: int | IO[str] | None
    ) -> subprocess.Popen[str]:
        """Start a command on a node; it ends with its stdin, if it reads that."""
        return self._open(["on", node, *command], None, None, stdin, stdout, None)

    def _open(
        self,
        arguments: Sequence[str | Path],
        env: Mapping[str, str] | None,
        cwd: str | Path | None,
        stdin: int | IO[str] | None,
        stdout: int | IO[str] | None,
        stderr: int | IO[str] | None,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [_SCRIPT, *arguments],
            env=self._environment(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def crash(self, node: str) -> None:
        """Power a node off without a FIN or RST to its peers. `boot` starts it again."""
        self._control("crash", node)

    def boot(self, node: str) -> None:
        """Start a crashed node again; `wait_idle` waits until Slurm uses it again."""
        self._control("boot", node)

    def partition(self, node: str) -> None:
        """Disconnect both interfaces of a node; its processes keep running."""
        self._control("partition", node)

    def heal(self, node: str) -> None:
        """Reconnect both interfaces of a node."""
        self._control("heal", node)

    def kill_slurmd(self, node: str) -> None:
        """Kill the slurmd of a node; its jobs go on."""
        self.on(node, "pkill", "-KILL", "-x", "slurmd")

    def start_slurmd(self, node: str) -> None:
        """Start a slurmd that was killed again."""
        self._control("slurmd", node)

    def wait_idle(self, timeout_seconds: float = 60) -> None:
        """Wait until no job is in the queue and all nodes are idle.

        Raises:
            LabError: The timeout expired; the text names the jobs and nodes.
        """
        if not wait_until(lambda: not self.queue() and not self._busy_nodes(), timeout_seconds, poll_seconds=0.1):
            busy = "; ".join([*self.queue(), *self._busy_nodes()])
            raise LabError(f"The Slurm lab is not idle after {timeout_seconds} s: {busy}.")

    def queue(self) -> list[str]:
        """One line per job in the queue: id, name, state."""
        return self.run("squeue", "-h", "-o", "%i %j %T").stdout.splitlines()

    def cancel_all(self, timeout_seconds: float = 60) -> None:
        """Cancel every job and wait until the lab is idle."""
        jobs = [line.split()[0] for line in self.queue()]
        if jobs:
            self.run("scancel", *jobs, check=False)  # some may have ended
        self.wait_idle(timeout_seconds)

    def job_state(self, job_id: int | str) -> tuple[str, str]:
        """Return Slurm's state and exit code, such as ("COMPLETED", "0:0"); of the first component of a het job."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(job_id)).stdout
        state, exit_code = re.search(r"\bJobState=(\S+)", text), re.search(r"\bExitCode=(\S+)", text)
        if state is None or exit_code is None:
            raise LabError(f"No state of job {job_id} in: {text}")
        return state[1], exit_code[1]

    def wait_for_job(self, job_id: int | str, timeout_seconds: float = 60) -> tuple[str, str]:
        """Wait until a job has ended; return its `job_state`.

        Raises:
            LabError: The timeout expired; the text has the job's state.
        """
        if not wait_until(lambda: self.job_state(job_id)[0] in _ENDED, timeout_seconds, poll_seconds=0.1):
            raise LabError(f"Job {job_id} is {self.job_state(job_id)[0]} after {timeout_seconds} s.")
        return self.job_state(job_id)

    def release(self, job_id: int | str, timeout_seconds: float = 60) -> None:
        """Wait until a job has been requeued, and let it start in 2 s: Slurm holds a requeued job for a while.

        slurmd refuses the job in the second in which its first run has ended.
        """
        if not wait_until(lambda: self.job_state(job_id)[0] == "PENDING", timeout_seconds, poll_seconds=0.1):
            raise LabError(f"Job {job_id} is {self.job_state(job_id)[0]} after {timeout_seconds} s, not requeued.")
        self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+2seconds")

    def _busy_nodes(self) -> list[str]:
        states = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T").stdout.splitlines()
        return [line for line in states if not line.endswith(" idle")]

    def _call(
        self,
        arguments: Sequence[str | Path],
        timeout_seconds: float,
        env: Mapping[str, str] | None,
        cwd: str | Path | None,
        check: bool,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [_SCRIPT, *arguments],
            env=self._environment(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        if check and done.returncode != 0:
            command = " ".join(map(str, arguments))
            raise LabError(f"{command!r} in the lab exited with {_exit(done.returncode)}.\n{done.stdout}{done.stderr}")
        return done

    def _control(self, *arguments: str) -> None:
        """Change the lab itself. Its processes carry no mark; output goes to a file, since daemons keep it open."""
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [_SCRIPT, *arguments],
                env=self._daemon_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=60,
            )
            output.seek(0)
            if done.returncode != 0:
                raise LabError(f"{' '.join(arguments)!r} exited with {_exit(done.returncode)}.\n{output.read()}")

    def _environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        environ = {**os.environ, **(env or {}), "LAB": str(self.directory)}
        if self._programs is not None:
            environ["PATH"] = f"{self._programs}{os.pathsep}{environ['PATH']}"
        return environ

    def _daemon_environment(self) -> dict[str, str]:
        environment = self._environment()
        environment.pop(MARK_VARIABLE, None)
        return environment


def _exit(returncode: int) -> str:
    return f"code {returncode}" if returncode >= 0 else signal.Signals(-returncode).name
