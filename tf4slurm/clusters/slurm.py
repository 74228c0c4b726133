"""`SlurmCluster`: ps and workers in a Slurm job, or in the allocation of a notebook, which is their chief."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tf4slurm import api
from tf4slurm.clusters.base import NotebookCluster
from tf4slurm.clusters.batch_job import BatchJob
from tf4slurm.clusters.launcher_process import SERVER_PROGRAM, AttachedLauncher, LauncherProcess
from tf4slurm.errors import JobStateError, LaunchError, OptionError, RendezvousError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.worker_jobs import find_worker_jobs
from tf4slurm.slurm.commands import has_no_cluster, missing_programs
from tf4slurm.slurm.environ import SlurmAllocation
from tf4slurm.spec.batch_spec import MEMORY_OPTIONS, BatchSpec, parse_pairs
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.keywords import JobKeywords, takes_options_of
from tf4slurm.spec.options import options_of, to_fields
from tf4slurm.spec.settings import SITE, fill_in, read_settings

if TYPE_CHECKING:
    from tf4slurm.job import Job

_ENVIRONMENTS = ("module", "load_env", "venv", "conda", "container")
_NO_ARRAY = "a cluster is one job"
_NO_ATTEMPTS = "variables of a lost ps are lost, and the notebook must connect again"
_OWN_TASKS = "a cluster has ps and workers, and the notebook is its chief"
_REFUSED = {
    "chief": _OWN_TASKS,
    "external_chief": _OWN_TASKS,
    "single": _OWN_TASKS,
    "evaluators": _OWN_TASKS,
    "data_workers": _OWN_TASKS,
    "data_python": _OWN_TASKS,
    **dict.fromkeys(("array", "array_args", "grid", "at_most", "label"), _NO_ARRAY),
    **dict.fromkeys(("max_attempts", "requeue"), _NO_ATTEMPTS),
    "snapshot": "the tasks run no file of this directory",
}
"""The options of a job that a cluster does not have, each with the reason."""

_OF_WORKERS = (
    *("partition", "account", "qos", "time", "constraint", "exclude", "reservation"),
    *("cpus_per_task", "mem_per_cpu", "mem_per_gpu", "gpus_per_task", "gpu_flag", "gpu_type"),
    *("module", "load_env", "venv", "conda", "env", "prologue", "python", "check_env"),
)
"""The options of a cluster that the workers of `scale` have, too."""

_OF_NODES = ("nodes", "ntasks", "ntasks-per-node", "job-name", "array", "wait", "nodelist", "mem", "exclusive", "gres")

_HOST_ADVICE = (
    "Start the notebook on a host of the cluster, such as its login node. For ps and workers on this host: use "
    "tf4slurm.LocalCluster."
)


@dataclass(frozen=True, kw_only=True)
class _Keywords(JobKeywords):
    """The arguments of `SlurmCluster`, for type checkers."""

    ps: int = field(default=1, kw_only=False)
    workers: int = field(default=2, kw_only=False)
    pending_timeout_seconds: float | None = None
    here: bool = False


class SlurmCluster(NotebookCluster):
    """ps and workers in a Slurm job, whose chief is this process, from `start` to `close` or during a `with` block.

    Example:
        cluster = tf4slurm.SlurmCluster(ps=1, workers=4, nodes=2, mem="32G", time="2h").start()
        strategy, coordinator = tf4slurm.tensorflow.parameter_server_strategy()
        …  # in this cell or in others
        cluster.close()

    The tasks belong to an ordinary job, with logs and a report in its `run_directory`, which all its hosts and this one
    must share. They end with this process, also if it is killed, and the allocation is freed. Variables and models can
    be used in all cells until `close`. TensorFlow can connect a process to one cluster only: for another one, restart
    the notebook's kernel.

    Attributes:
        cluster: The cluster spec, such as {"chief": ["10.0.0.1:40123"], "ps": […], "worker": […]}. Empty before
            `start`.
        run_directory: The run directory of the job, or None before it has started.
    """

    @takes_options_of(_Keywords, left_out=_REFUSED)
    def __init__(self, ps: int = 1, workers: int = 2, **options: Any) -> None:
        """Check the options, which are those of `tf4slurm submit`. Nothing is submitted.

        Args:
            ps: Number of ps (default 1).
            workers: Number of workers (default 2).
            OPTIONS
            pending_timeout_seconds: Timeout in seconds for the start of the job in Slurm. By default there is none.
                `start_timeout_seconds` begins when the job has started, and again when a strategy is created, for the
                tasks' servers.
            here: Start the tasks with srun in the allocation that this process is in. Nothing is submitted, and options
                for sbatch are refused. The allocation has one task for each ps and worker.
            site: Profile of the cluster's settings, or "none" to read no settings. By default the settings name it.

        Raises:
            OptionError: An option is unknown or invalid, a cluster does not have it, or two options exclude each other.
        """
        self._site: str | None = options.pop(SITE, None)
        self._pending_timeout_seconds: float | None = options.pop("pending_timeout_seconds", None)
        self._is_here: bool = options.pop("here", False)
        self._options = _check_options({"ps": ps, "workers": workers, **options}, is_here=self._is_here)
        super().__init__(BatchSpec.start_timeout_seconds)  # `_launch` has that of the settings
        self._launched: BatchJob | LauncherProcess | AttachedLauncher | None = None
        self._is_attached = False
        self._more: Mapping[str, Any] = {}  # options of the workers of `scale`

    @classmethod
    def attach(
        cls, job: str, *, start_timeout_seconds: float = BatchSpec.start_timeout_seconds, site: str | None = None
    ) -> SlurmCluster:
        """Join a running cluster as its next chief, after its chief has called `restart`.

        The result is as after `start`: `close` ends the job. `scale` uses only options that it is given, and settings.

        Args:
            job: The name of the job, its Slurm job id or its run directory. `restart` prints the name.
            start_timeout_seconds: Timeout in seconds for the cluster, and again for the tasks' servers (default 300).
            site: As for `SlurmCluster`.

        Raises:
            UnknownJobError: There is no such job.
            JobStateError: The job has ended, has a chief, or is no cluster in Slurm. The message says which.
            RunDirectoryError, UntrustedFileError: The files of the job cannot be read or trusted.
            RendezvousError, RendezvousTimeoutError: As for `start`.
        """
        from tf4slurm.joining.attach import check_attachable  # imported here: it imports asyncio

        known = api.find(job)
        directory, file = check_attachable(known)
        name = directory.path.name
        if file.job_id is None or file.process is None:
            text = f"{name} is a cluster of local processes: call tf4slurm.LocalCluster.attach({name!r})."
            raise JobStateError(text, job=name, state="RUNNING")
        ps, workers = file.counts.get("ps", 0), file.counts.get("worker", 0)
        cluster = cls(ps, workers, start_timeout_seconds=start_timeout_seconds, site=site)
        cluster._timeout_seconds = start_timeout_seconds
        cluster._is_attached = True
        if known.batch_script.exists():
            cluster._launched = BatchJob(cluster._spec(), known=known)
        elif file.process.host == os.uname().nodename:  # started with here=True
            cluster._launched = AttachedLauncher(file.process)
        else:
            text = f"{name} runs in the allocation of a notebook on {file.process.host}. Attach there."
            raise JobStateError(text, job=name, state="RUNNING")
        cluster._attach(directory)
        return cluster

    def script(self) -> str:
        """Return the batch script that `start` submits. This host needs no Slurm.

        Raises:
            OptionError, PlacementError: Options and settings contradict each other. Or with `here` there is no script.
            SettingsError, UntrustedFileError: A settings file cannot be used.
        """
        if self._is_here:
            raise OptionError("With here=True nothing is submitted, so there is no batch script.", option="here")
        return api.script(self._spec())

    def scale(self, workers: int, **options: Any) -> None:
        """Change the number of workers, as `tf4slurm.grow` and `shrink` do: by a job array of single workers.

        See `LocalCluster.scale`. Slurm may keep new workers pending.

        Args:
            workers: The new number of workers. Those with which the cluster has started stay until its end.
            options: Options of the new workers, as for `tf4slurm.grow`, such as partition="preempt". The others are
                those of this cluster, but for the ones that are for whole nodes: mem, exclusive, gres, gpus_per_node.

        Raises:
            OptionError: `workers` is less than the number of workers with which the cluster has started, or an option
                is invalid.
            RendezvousError: The cluster was not started, is closed or has ended. The message has the reason.
            JobStateError: The job cannot use more workers. The message has the reason.
            RefusedError, LaunchError: sbatch refused the new workers, or a request to Slurm failed.
        """
        self._more = options
        super().scale(workers)

    def _scale(self, num_added: int) -> None:
        directory = self.run_directory
        assert directory is not None
        known = api.find(str(directory.path))
        num_missing = num_added - len(find_worker_jobs(known))
        if num_missing > 0 and (self._is_here or self._is_attached):
            api.grow(known, num_missing, site=self._site, **self._more)
        elif num_missing > 0:
            api.grow(known, num_missing, **{**_worker_options(self._spec(), self._more), **self._more})
        elif num_missing < 0:
            api.shrink(known, -num_missing)

    @property
    def job(self) -> Job:
        """The job of this cluster, with its report and its plot. It can be read after `close`, too.

        Raises:
            UnknownJobError: The cluster was not started.
        """
        known = self._launched.known if isinstance(self._launched, BatchJob) else None
        if self.run_directory is None and known is not None:
            from tf4slurm.job import Job

            return Job.find(known.job_id)
        return super().job

    def _spec(self) -> BatchSpec:
        """Return the job: the given options, completed with options from the settings files."""
        options = self._fill_in(BatchSpec)
        return BatchSpec((_find_python(options), *SERVER_PROGRAM), **options)

    def _fill_in(self, kind: type[JobSpec]) -> dict[str, Any]:
        given = {"name": "notebook", "external_chief": True, **self._options}
        settings = read_settings(os.environ, self._site)
        return fill_in(kind, given, {name: setting for name, setting in settings.items() if name not in _REFUSED})

    def _launch(self) -> RunDirectory:
        if missing := missing_programs():
            text = f"Slurm's programs {', '.join(missing)} are not on PATH of {os.uname().nodename}. {_HOST_ADVICE}"
            raise RendezvousError(text)
        spec = self._spec_here() if self._is_here else self._spec()
        self._timeout_seconds = spec.start_timeout_seconds
        launched: BatchJob | LauncherProcess
        if isinstance(spec, BatchSpec):
            launched = BatchJob(spec, self._pending_timeout_seconds)
        else:
            command = api.own_command("run", "--site", "none", *spec.to_arguments(), "--", *spec.command)
            launched = LauncherProcess(command, self._timeout_seconds)
        self._launched = launched
        try:
            return launched.launch()
        except LaunchError as error:
            if has_no_cluster(error.stderr):
                raise RendezvousError(f"{error}\n{_HOST_ADVICE}") from error
            raise

    def _spec_here(self) -> JobSpec:
        """Return the job for the allocation of this process. Raise RendezvousError if this process is in none."""
        spec = JobSpec((sys.executable, *SERVER_PROGRAM), **self._fill_in(JobSpec))
        if SlurmAllocation.from_environ(os.environ) is None:
            raise RendezvousError(
                "here=True is for a notebook in an allocation of Slurm, and this process is in none. Start it there, "
                f'such as with "salloc --ntasks={spec.num_spawned} jupyter lab", or omit here=True to submit a job.'
            )
        return spec

    def _has_launcher_ended(self) -> bool:
        return self._launched is not None and self._launched.has_ended()

    def _describe_launch(self) -> str:
        return "" if self._launched is None else self._launched.describe()

    def _end_launcher(self, *, is_started: bool) -> None:
        if self._launched is not None:
            self._launched.end(is_started=is_started)


def _check_options(options: Mapping[str, Any], *, is_here: bool) -> dict[str, Any]:
    """Return the options by field name. Raise OptionError for those that a cluster does not have, or that are invalid.

    Rules about several options are not applied, because settings may still add options.
    """
    if "command" in options:
        text = "A SlurmCluster has no command: its tasks run TensorFlow servers. For a script: tf4slurm.Job."
        raise OptionError(text, option="command")
    found = to_fields(BatchSpec, options)
    for name in found:
        if name in _REFUSED:
            raise OptionError(f"A SlurmCluster has no {name}: {_REFUSED[name]}. Omit it.", option=name)
        if is_here and name not in options_of(JobSpec):
            raise OptionError(f"With here=True nothing is submitted, so {name} has no effect. Omit it.", option=name)
    BatchSpec.check_each((sys.executable,), {**found, "external_chief": True})
    if type(found["workers"]) is not int:  # None would mean the remaining tasks of an allocation
        raise OptionError(f"workers={found['workers']!r}: expected a number of workers.", option="workers")
    return found


def _worker_options(spec: BatchSpec, given: Collection[str]) -> dict[str, Any]:
    """Return the options of a cluster that its new workers have, too, but for those that are `given` for them.

    Of --sbatch, those for nodes and tasks are left out. If an amount of memory is given, the cluster's is left out.
    """
    memory = [key.replace("-", "_") for key in MEMORY_OPTIONS]
    left_out = {*given, *(memory if set(memory) & set(given) else ())}
    found = {name: getattr(spec, name) for name in _OF_WORKERS if name not in left_out}
    own = parse_pairs("sbatch", spec.sbatch)
    kept = {name: value for name, value in own.items() if name not in _OF_NODES}
    if "sbatch" not in given:
        found["sbatch"] = tuple(f"{name}={value}" if value else name for name, value in kept.items())
    return found


def _find_python(options: Mapping[str, Any]) -> str:
    """Return the Python of the tasks: that of the job's environment, or without one that of this process."""
    if options.get("python"):
        return str(options["python"])
    return "python" if any(options.get(name) for name in _ENVIRONMENTS) else sys.executable
