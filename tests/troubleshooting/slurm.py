"""Mistakes on Slurm, made in the lab."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import tf4slurm
from tests.jobs import TF4SLURM
from tests.processes import wait_until
from tests.troubleshooting.workplace import Producer, Table, Workplace

ROLES = ("--ps", "1", "--workers", "1")
ALONE = f"exec {TF4SLURM} run --ps 0 --workers 0"
SALLOC = ("salloc", "-Q", "-N3", "-n3")


def login(*command: str, **environ: str) -> Producer:
    return Producer(lambda place: place.login(*command, **environ))


def submit(*options: str) -> Producer:
    return login(TF4SLURM, "submit", *ROLES, *options, "--", "true")


def run(*options: str, prefix: tuple[str, ...] = SALLOC) -> Producer:
    return login(*prefix, TF4SLURM, "run", *ROLES, *options, "--", "true")


def task(options: str, *, others: str, is_long: bool = False) -> Producer:
    """Start rank 0 of a step as it should be, and run `others` in the second rank."""

    def produce(place: Workplace) -> str:
        own = f"{TF4SLURM} task --no-chief {' '.join(ROLES)} {options}"
        script = place.write("task.sh", f'if [ "$SLURM_PROCID" = 1 ]; then {others}; else exec {own} -- true; fi\n')
        return place.login("srun", "-Q", "-N2", "-n2", "--kill-on-bad-exit=0", "bash", script)

    return Producer(produce, is_long)


def first_rank_alone_fails(place: Workplace) -> str:
    command = f"exec {TF4SLURM} task --no-chief {' '.join(ROLES)} --start-timeout 3 -- true"
    script = place.write("task.sh", f'if [ "$SLURM_PROCID" = 1 ]; then {command}; else exit 0; fi\n')
    return place.login("srun", "-Q", "-N2", "-n2", "bash", script)


def pending(*options: str) -> Producer:
    """Submit a job that does not start, and ask for its state."""

    def produce(place: Workplace) -> str:
        sbatch = [word for option in options for word in ("--sbatch", option)]
        job_id = place.login(TF4SLURM, "submit", *ROLES, *sbatch, "--", "true").splitlines()[0]
        # Slurm shows PartitionConfig until its scheduler has compared the job with each limit.
        wait_until(lambda: place.login("squeue", "-ho", "%r").strip() not in ("", "None", "PartitionConfig"), 60)
        state = place.login(TF4SLURM, "status", job_id)
        place.lab.cancel_all()
        return state

    return Producer(produce)


def over_time_limit(place: Workplace) -> str:
    partition = place.lab.run("sinfo", "-ho", "%R").stdout.split()[0]
    place.lab.run("scontrol", "update", f"PartitionName={partition}", "MaxTime=10")
    try:
        return pending("time=20").produce(place)
    finally:
        place.lab.run("scontrol", "update", f"PartitionName={partition}", "MaxTime=UNLIMITED")


def without_configuration(place: Workplace) -> str:
    """On this host, which has Slurm's programs, without a network and without /etc/slurm."""
    place.request.getfixturevalue("slurm")
    hide = "mount -t tmpfs none /etc/slurm 2>/dev/null"
    submit = f"exec {TF4SLURM} submit {' '.join(ROLES)} -- true"
    return place.shell("unshare", "--mount", "--net", "sh", "-c", f"{hide}; {submit}")


def early_failure(place: Workplace) -> str:
    place.login(TF4SLURM, "submit", *ROLES, "--python", "/no/such/python", "--no-check-env", "--", "true")
    place.lab.wait_idle()
    return place.login(TF4SLURM, "logs")


def unknown_module(place: Workplace) -> str:
    text = place.login(TF4SLURM, "script", *ROLES, "--module", "tensorflow/2.21", "--", "true")
    return place.batch(*text.splitlines()[1:], options=())


def cancelled(place: Workplace) -> str:
    place.batch("hostname; sleep 300", wait=False)
    output = place.directory / "slurm.out"
    wait_until(lambda: output.exists() and bool(output.read_text()), 60)
    place.lab.cancel_all()
    wait_until(lambda: "CANCELLED" in output.read_text(), 60)
    return output.read_text()


def other_version(place: Workplace) -> str:
    """Rank 1 runs another version of tf4slurm."""
    source = Path(tf4slurm.__file__).parent
    copy = place.directory / "other" / "tf4slurm"
    shutil.copytree(source, copy)
    text = (copy / "__init__.py").read_text()
    (copy / "__init__.py").write_text(text.replace(tf4slurm.__version__, "0.0.1"))
    other = f"PYTHONPATH={copy.parent} {sys.executable} -m tf4slurm task --no-chief {' '.join(ROLES)} -- true"
    return task("--start-timeout 10", others=other).produce(place)


SLURM: Table = {
    "invalid partition specified": submit("-p", "short"),
    "Requested node configuration is not available": submit("--test-only", "-N", "20", "--workers", "18"),
    "Memory specification can not be satisfied": submit("--mem", "900G"),
    "Invalid generic resource (gres) specification": submit("--gres", "tpu:1"),
    "Invalid feature specification": submit("--constraint", "infiniband"),
    "Unable to create step": login("salloc", "-Q", "-n1", "srun", "-n2", "true"),
    "step creation temporarily disabled": Producer(
        lambda place: place.batch("srun -n1 sleep 4 &", "sleep 1; srun -n1 true"), is_long=True
    ),
    "execve()": login("srun", "-Q", "-n1", "/no/such/python", "train.py"),
    "If only the nodes of the job have it, add --no-check-env.": submit("--venv", "/no/such/venv"),
    "module: command not found": Producer(unknown_module),
    "have no cluster": Producer(without_configuration),
    "has no logs: it is FAILED": Producer(early_failure),
    "JobHeldUser": pending("hold"),
    "PartitionTimeLimit": Producer(over_time_limit),
    "CANCELLED AT": Producer(cancelled),
    "Exited with exit code": login("srun", "-Q", "-n2", "bash", "-c", "exit 3"),
    "did not register": task("--start-timeout 3", others="sleep 5", is_long=True),
    "The launcher has ended or was not started": Producer(first_rank_alone_fails, is_long=True),
    "cannot take part": Producer(other_version, is_long=True),
    "which no other host": run("--interface", "lo"),
    "matches several": run("--interface", "*"),
    "GPUs for each of": login(*SALLOC, TF4SLURM, "run", *ROLES, "--gpus-per-worker", "2", "--", "sleep", "5"),
    "roles were given": login(
        "srun", "-Q", "-n3", sys.executable, "-c", "import tf4slurm; tf4slurm.get_server_dictionary(['ps', 'worker'])"
    ),
    "The job cannot be requeued": Producer(
        lambda place: place.batch(f"{ALONE} --requeue 1 -- true", options=("-n1", "--no-requeue")), is_long=True
    ),
    "the job is not requeued": Producer(
        lambda place: place.batch("(sleep 2; kill -USR1 $$) &", f"{ALONE} --requeue 0 -- sleep 60"), is_long=True
    ),
}
