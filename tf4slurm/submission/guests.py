"""`grow` submits Slurm jobs that add workers to a running job, and `shrink` cancels them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf4slurm.batch_spec import BatchSpec, parse_pairs
from tf4slurm.errors import JobStateError, OptionError
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.schema import GuestFile
from tf4slurm.jobs.status import JobFiles, StatusReader
from tf4slurm.launch.guest import check_growable, find_guests
from tf4slurm.slurm.commands import cancel_job
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.submit import make_output_directory, submit_environment, submit_script

OPTIONS = (
    *("partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "reservation", "dependency"),
    *("cpus_per_task", "mem", "mem_per_cpu", "mem_per_gpu", "gpus_per_task", "gres", "exclusive", "output"),
    *("sbatch", "no_sbatch", "module", "load_env", "venv", "conda", "env", "prologue", "python"),
)
"""The fields of BatchSpec that `grow` takes."""

_FIXED = {"array", "job-name", "nodes", "ntasks", "ntasks-per-node"}


def make_guest_spec(job: KnownJob, workers: int, options: Mapping[str, Any]) -> BatchSpec:
    """Return the job array whose elements join a job; see `api.grow`."""
    _check_workers(workers)
    fixed = sorted(_FIXED & parse_pairs("sbatch", options.get("sbatch", ())).keys())
    if fixed:
        raise OptionError(f"--sbatch {fixed[0]}: tf4slurm grow sets this option itself. Omit it.", option="sbatch")
    directory = latest_run(job)
    file = directory.read_trusted_job()
    (status,) = StatusReader([job]).read()
    if status.has_ended or job.job_id is None:
        why = "has ended" if status.has_ended else "is a local job, which Slurm cannot add workers to"
        advice = "" if status.has_ended else f' Start each on its host: "tf4slurm join {job.name}".'
        raise JobStateError(f"{job.name} {why}.{advice}", job=job.name, state=status.state)
    check_growable(job, file.counts)
    if error := JobFiles(directory).status.workers_error:
        text = f"{job.name} cannot use more workers: {error}."
        raise JobStateError(text, job=job.name, state=status.state)
    spec = BatchSpec(
        command=("tf4slurm",),
        name=f"{directory.path.name}-guest",
        single=True,
        array=f"0-{workers - 1}",
        gpus_per_worker=file.options.get("gpus_per_worker"),
        **{"output": str(directory.path).replace("%", "%%") + "/guest-%A_%a.out", **options},
    )
    first_run = Path(job.runs_directory) / job.name  # `join` finds the latest run of a requeued job by it
    return dataclasses.replace(spec, command=(*spec.tf4slurm, "join", str(first_run)))


def grow(job: KnownJob, workers: int, options: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Submit the job array of `make_guest_spec`; return its id."""
    spec = make_guest_spec(job, workers, options)
    text = make_script(spec)
    make_output_directory(spec)
    directory = latest_run(job)
    before = directory.read(GuestFile) or GuestFile()
    directory.write(before)  # `join` writes the file if it is missing, possibly before the array's id is known here
    job_id = submit_script(text, submit_environment(environ, text))
    directory.write(GuestFile((*before.job_ids, job_id)))
    return job_id


def shrink(job: KnownJob, workers: int) -> tuple[str, ...]:
    """Cancel `workers` of the Slurm jobs that `grow` has submitted; see `api.shrink`."""
    _check_workers(workers)
    guests = find_guests(*job.run_directories)
    if workers > len(guests):
        text = f"{job.name} has {len(guests)} workers that tf4slurm grow has added, so {workers} cannot leave."
        raise JobStateError(text, job=job.name, state="RUNNING")
    guests.sort(key=lambda guest: (guest.is_pending, *map(int, re.findall(r"\d+", guest.job_id))))
    leaving = tuple(guest.job_id for guest in guests[-workers:])
    cancel_job(*leaving)
    return leaving


def _check_workers(workers: int) -> None:
    if type(workers) is not int or workers < 1:
        raise OptionError(f"--workers {workers!r}: expected a number of workers, from 1.", option="workers")
