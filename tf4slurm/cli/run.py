"""Run a job or one of its tasks: `tf4slurm run` and `tf4slurm task`.

Each of the two functions imports the modules that only it needs, so that an agent (`tf4slurm task`) starts faster.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from tf4slurm.cli.options import JobVerb, given, job_options, read_options, site_option
from tf4slurm.spec.job_spec import SLURM_OPTIONS, JobSpec
from tf4slurm.spec.options import key_of
from tf4slurm.system.variables import ANSWER_VARIABLE


@click.command(
    cls=JobVerb,
    examples=(
        "tf4slurm run --ps 1 --workers 2 -- python train.py --epochs 3",
        "tf4slurm run --no-chief --ps 1 --workers 2 -- python old.py --ps_hosts={ps_hosts} "
        "--worker_hosts={worker_hosts} --job_name={task_type} --task_index={task_index}",
    ),
)
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@click.option(
    "--isolated",
    is_flag=True,
    help="Run local processes in a network of their own, which has only loopback: no other host or user reaches them.",
)
@site_option
@job_options("run")
@click.pass_obj
def run(environ: dict[str, str], /, local: bool, isolated: bool, **options: Any) -> None:
    """Run COMMAND once per task as one TensorFlow cluster, and end all its processes, whatever fails.

    Outside of Slurm the tasks are local processes; inside a Slurm allocation srun starts them. COMMAND stands after
    "--" and finds its role and the cluster in TF_CONFIG.

    In COMMAND {ps_hosts}, {worker_hosts}, {chief_hosts} ("host:port,host:port"), {task_type} or {job_name}, and
    {task_index} are filled in for each task.
    """
    from tf4slurm.cli.terminal_output import make_terminal_output
    from tf4slurm.launch.start import find_allocation, run_job

    allocation = find_allocation(environ, local=local)
    for option in SLURM_OPTIONS:
        if allocation is None and option in given(options):
            raise click.UsageError(f"--{key_of(option)} is for jobs of Slurm, and this is not one.")
    spec = JobSpec(**read_options(JobSpec, environ, options))
    answer = environ.pop(ANSWER_VARIABLE, None)  # not for the tasks
    result = run_job(
        spec, environ, allocation, make_terminal_output, isolated=isolated, arguments=sys.argv, answer=answer
    )
    sys.exit(result.file.exit_code)


@click.command(
    cls=JobVerb,
    examples=(
        "srun --ntasks=4 tf4slurm task --ps 1 -- python train.py",
        "srun --nodes=2 --ntasks=8 tf4slurm task --ps 2 --placement spread -- python train.py",
    ),
)
@job_options("task")
@click.pass_obj
def task(environ: dict[str, str], /, **options: Any) -> None:
    """Run as one task of a job: srun starts this command on every task.

    Under "tf4slurm run", environment variables describe the task. Alone, as in "srun -n4 tf4slurm task --ps 1 -- python
    train.py", the options determine the roles, and rank 0 runs the launcher. COMMAND is that of "tf4slurm run".
    Settings files and TF4SLURM_<OPTION> variables are not read.
    """
    from tf4slurm.agent.agent import run_agent
    from tf4slurm.agent.rendezvous import is_under_launcher

    if is_under_launcher(environ):
        sys.exit(run_agent(options["command"], environ))

    from tf4slurm.cli.terminal_output import PlainOutput
    from tf4slurm.launch.task_program import run_task
    from tf4slurm.slurm.environ import SlurmStep
    from tf4slurm.system.output import LineWriter

    step = SlurmStep.from_environ(environ)
    spec = JobSpec(**given(options)).for_tasks(step.num_tasks)
    writer = LineWriter(sys.stdout)
    terminal = PlainOutput(spec.num_tasks, writer, writer)
    try:
        sys.exit(run_task(spec, step, environ, writer, terminal))
    finally:
        terminal.close()
