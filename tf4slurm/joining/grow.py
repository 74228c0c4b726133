"""`grow` submits Slurm jobs that add workers to a running job, and `shrink` cancels them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf4slurm.errors import JobStateError, OptionError, Tf4SlurmError
from tf4slurm.jobs.registry import KnownJob, latest_run
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import WorkerArray
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.jobs.worker_jobs import find_worker_jobs
from tf4slurm.joining.join import check_joinable, warn_of_wait
from tf4slurm.slurm.commands import cancel_job
from tf4slurm.spec.batch_spec import BatchSpec, parse_pairs
from tf4slurm.spec.options import key_of, unknown
from tf4slurm.spec.settings import fill_in, read_settings
from tf4slurm.submission.batch_script import make_script
from tf4slurm.submission.environment_check import check_environment
from tf4slurm.submission.submit import make_output_directory, submit_environment, submit_script

OPTIONS = (
    *("partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "reservation", "dependency"),
    *("cpus_per_task", "mem", "mem_per_cpu", "mem_per_gpu", "exclusive", "output", "sbatch", "no_sbatch"),
    *("gpus_per_node", "gpus_per_task", "gres", "gpu_flag", "gpu_type"),
    *("module", "load_env", "venv", "conda", "env", "prologue", "python", "check_env"),
)
"""The fields of BatchSpec that `grow` takes."""

_FIXED = ("array", "job-name", "nodes", "ntasks", "ntasks-per-node", "test-only", "wait", "wrap")


def make_worker_spec(
    job: KnownJob,
    directory: RunDirectory,
    workers: int,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    site: str | None,
) -> BatchSpec:
    """Return the Slurm job array whose elements join the job with this run directory. See `api.grow`."""
    _check_workers(workers)
    options = _fill_in(options, environ, site)
    file = check_joinable(job, directory, "grow")
    if job.job_id is None:
        text = (
            f'{job.name} is a local job, which Slurm cannot add workers to. Run "tf4slurm join {job.name}" on its host.'
        )
        raise JobStateError(text, job=job.name, state="RUNNING")
    spec = BatchSpec(
        command=("tf4slurm",),
        name=f"{directory.path.name}-worker",
        single=True,
        array=f"0-{workers - 1}",
        gpus_per_worker=file.options.get("gpus_per_worker"),
        **{"output": str(directory.path).replace("%", "%%") + "/worker-%A_%a.out", **options},
    )
    first_run = Path(job.runs_directory) / job.name  # from it `join` finds the latest run of a requeued job
    return dataclasses.replace(spec, command=(*spec.tf4slurm, "join", str(first_run)))


def _fill_in(options: Mapping[str, Any], environ: Mapping[str, str], site: str | None) -> dict[str, Any]:
    """Return `options`, completed with the user's settings. Raise OptionError for options that `grow` does not take.

    `site` is the profile of settings (see `read_settings`).
    """
    for name in options:
        if name not in OPTIONS:
            raise OptionError(unknown(name, OPTIONS, "an option of tf4slurm grow"), option=name)
    settings = {name: setting for name, setting in read_settings(environ, site).items() if name in OPTIONS}
    filled = fill_in(BatchSpec, options, settings)
    for field in ("sbatch", "no_sbatch"):
        for name in parse_pairs(key_of(field), filled.get(field, ())):
            if any(fixed.startswith(name) for fixed in _FIXED):  # sbatch accepts abbreviations
                what = f"--{key_of(field)} {name} is not possible"
                text = f"{what}: tf4slurm grow submits an array of single tasks. Omit it."
                raise OptionError(text, option=key_of(field))
    return filled


def grow(job: KnownJob, workers: int, options: Mapping[str, Any], environ: Mapping[str, str], site: str | None) -> str:
    """Submit the job array of `make_worker_spec`. Return its id. See `api.grow`."""
    directory = latest_run(job)
    spec = make_worker_spec(job, directory, workers, options, environ, site)
    text = make_script(spec)
    environ = submit_environment(environ, text)
    check_environment(spec, environ, runs_tf4slurm=True)
    make_output_directory(spec.sbatch_options, Path.cwd())
    directory.add_worker_arrays()  # raises an error before the submission if the directory is not writable
    job_id = submit_script(text, environ)
    try:
        directory.add_worker_arrays(WorkerArray(str(job_id)))
        _check_running(job)  # after the id is written: a launcher that ends later cancels the array
    except Tf4SlurmError:
        cancel_job(job_id)
        raise
    warn_of_wait(job, directory)
    return str(job_id)


def _check_running(job: KnownJob) -> None:
    (status,) = StatusReader([job]).read()
    if not status.can_change or status.state == "PENDING":  # pending after a requeue
        text = f"{job.name} is {status.state} now, so the new workers are cancelled. Add workers while it runs."
        raise JobStateError(text, job=job.name, state=status.state)


def shrink(job: KnownJob, workers: int) -> tuple[str, ...]:
    """Cancel the Slurm jobs of `workers` workers that `grow` has added. Return these jobs' ids. See `api.shrink`."""
    _check_workers(workers)
    entries = find_worker_jobs(job)
    if workers > len(entries):
        text = f"{job.name} has {len(entries)} workers that tf4slurm grow has added, so {workers} cannot leave."
        raise JobStateError(text, job=job.name, state="RUNNING")
    entries.sort(key=lambda entry: (entry.is_pending, entry.job_id.number, entry.job_id.elements))
    leaving = tuple(entry.job_id for entry in entries[-workers:])
    cancel_job(*leaving)
    return tuple(map(str, leaving))


def _check_workers(workers: int) -> None:
    if type(workers) is not int or workers < 1:
        raise OptionError(f"--workers {workers!r}: expected a number of workers, from 1.", option="workers")
