"""Mistakes on the command line: nothing is started."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from tests.jobs import STEP, TF4SLURM
from tests.troubleshooting.workplace import Producer, Table, Workplace

ROLES = ("--ps", "1", "--workers", "1")


def command(*arguments: str, **environ: str) -> Producer:
    return Producer(lambda place: place.tf4slurm(*arguments, **environ))


def run(*options: str, **environ: str) -> Producer:
    return command("run", *ROLES, *options, **environ)


def with_file(name: str, text: str, *arguments: str, **environ: str) -> Producer:
    def produce(place: Workplace) -> str:
        place.write(name, text)
        return place.tf4slurm(*arguments, **environ)

    return Producer(produce)


def settings_of_others(place: Workplace) -> str:
    place.write("tf4slurm.toml", 'partition = "short"\n')
    (place.directory / "tf4slurm.toml").chmod(0o666)
    return place.tf4slurm("config", "show")


def no_free_port(place: Workplace) -> str:
    """A port of the range is in use; the next one is for the control service."""
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        ports = ("--ports", f"{port}-{port}", "--control-port", str(port + 1))
        return place.tf4slurm("run", "--ps", "0", "--workers", "0", *ports, "--", "true")


def bad_suffix(place: Workplace) -> str:
    place.tf4slurm("run", "--ps", "0", "--workers", "0", "--", "true")
    return place.tf4slurm("report", "-o", "job.pdf")


def moved_run_directory(place: Workplace) -> str:
    place.tf4slurm("run", "--name", "first", "--ps", "0", "--workers", "0", "--", "true")
    (place.directory / "runs").rename(place.directory / "moved")
    return place.tf4slurm("logs", next((place.directory / "moved").iterdir()).name)


def unknown_task(place: Workplace) -> str:
    place.run_script("print('hello')")
    (run_directory,) = (place.directory / "runs").iterdir()
    return place.tf4slurm("logs", run_directory.name, "worker/9")


def no_event_files(place: Workplace) -> str:
    place.run_script("print('hello')")
    return place.tf4slurm("tensorboard")


def newer_schema(place: Workplace) -> str:
    place.run_script("print('hello')")
    (run_directory,) = (place.directory / "runs").iterdir()
    path = run_directory / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 999}))
    return place.tf4slurm("report", str(run_directory))


def unknown_job(place: Workplace) -> str:
    place.run_script("print('hello')")
    return place.tf4slurm("status", "4711")


def few_open_files(place: Workplace) -> str:
    return place.shell("/bin/sh", "-c", f"ulimit -n 40 && exec {TF4SLURM} doctor --quick")


def python_without_tf4slurm(place: Workplace) -> str:
    return place.shell(sys.executable, "-I", "-S", "-m", "tf4slurm", "run")


def not_on_path(place: Workplace) -> str:
    return place.shell("/bin/bash", "-c", "PATH=/usr/bin:/bin; tf4slurm run")


def python_without_tensorflow(place: Workplace) -> str:
    """A virtual environment that has the packages of tf4slurm and no TensorFlow."""
    own = Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages = place.directory / "packages"
    packages.mkdir()
    for each in own.iterdir():
        if not each.name.startswith(("tensorflow", "keras", "tf_keras")):
            (packages / each.name).symlink_to(each)
    source = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[:0] = {[source, str(packages)]!r}; from tf4slurm.cli.main import main; main()"
    return place.shell(os.path.realpath(sys.executable), "-I", "-S", "-c", code, "doctor", "--quick")


COMMANDS: Table = {
    "There is no command.": run(),
    "No such option": run("--wrokers", "2", "--", "true"),
    "The program": run("--", "pyhton", "train.py"),
    "The script": run("--", sys.executable, "trian.py"),
    "is not executable": with_file("train.sh", "#!/bin/sh\n", "run", *ROLES, "--", "./train.sh"),
    "The number of workers is not known": command("run", "--ps", "1", "--", "true"),
    "The number of workers is unknown": command("submit", "--ps", "1", "--", "true"),
    "is not set: this process is not a task": command("task", *ROLES, "--", "true"),
    "srun started": run("--", "true", **STEP),
    "srun cannot be started": run("--", "/bin/true", SLURM_JOB_ID="1", SLURM_NTASKS="3", PATH="/no"),
    "cannot be created": run("--runs-directory", "/proc/runs", "--", "true"),
    "is refused, as it could run commands": Producer(settings_of_others),
    "cannot be read as TOML": with_file("tf4slurm.toml", "partition = short\n", "config", "show"),
    "is not an option": with_file("tf4slurm.toml", "partitoin = 'short'\n", "config", "show"),
    "The command has {worker_hosts}": run("--", "echo", "{worker_hosts}"),
    "exclude each other": command("script", *ROLES, "--mem", "1G", "--mem-per-cpu", "1G", "--", "true"),
    "the job would have to stop": command("script", *ROLES, "-t", "1", "--requeue", "1", "--", "true"),
    "tasks, but Slurm gives": command("script", *ROLES, "-n", "8", "--", "true"),
    "is not shorter than": run("--heartbeat-interval", "10", "--", "true"),
    "Slurm's programs must be on PATH": command("submit", *ROLES, "--", "/bin/true", PATH="/no"),
    "--requeue is for jobs of Slurm": run("--requeue", "1", "--", "true"),
    "does not exist on node": run("--interface", "ib99", "--", "true"),
    "is not a range of ports": run("--ports", "40000-39999", "--", "true"),
    "on one host and the control service": run("--ports", "40000-40001", "--", "true"),
    "is free on this host": Producer(no_free_port),
    "There is no job": Producer(unknown_job),
    "This user has not started any job": command("status"),
    "No task of": Producer(unknown_task),
    "has no logs: it is UNKNOWN": Producer(moved_run_directory),
    "No event files of TensorBoard": Producer(no_event_files),
    "is no format of a report": Producer(bad_suffix),
    "has schema version": Producer(newer_schema),
    "too few for TensorFlow to start": Producer(few_open_files),
    "No module named tf4slurm": Producer(python_without_tf4slurm),
    "tf4slurm: command not found": Producer(not_on_path),
    "TensorFlow is not installed in this Python": Producer(python_without_tensorflow),
    "no_proxy": command("doctor", "--quick", http_proxy="http://proxy:3128"),
}
