"""Run a job or one of its tasks: `tf4slurm run` and `tf4slurm task`.

Each of the two functions imports the modules that only it needs, so that an agent (`tf4slurm task`) starts faster.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from tf4slurm.cli.options import JobVerb, given, isolated_option, job_options, read_options, site_option
from tf4slurm.cli.shared import note
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import SLURM_OPTIONS, JobSpec
from tf4slurm.spec.options import key_of, options_of
from tf4slurm.system.exec_child import LAUNCHER_SIGNALS
from tf4slurm.system.variables import ANSWER_VARIABLE, RUN_NAME_VARIABLE


@click.command(
    cls=JobVerb,
    examples=(
        "tf4slurm run --ps 1 --workers 2 -- python train.py --epochs 3",
        "tf4slurm run --no-chief --ps 1 --workers 2 -- python old.py --ps_hosts={ps_hosts} "
        "--worker_hosts={worker_hosts} --job_name={task_type} --task_index={task_index}",
    ),
)
@click.option("--local", is_flag=True, help="Start local processes even inside a Slurm allocation.")
@isolated_option
@site_option
@job_options("run", BatchSpec, ["grid", "at_most"])
@job_options("run")
@click.pass_obj
def run(
    environ: dict[str, str],
    /,
    local: bool,
    isolated: bool,
    grid: tuple[str, ...],
    at_most: str | None,
    **options: Any,
) -> None:
    """Run COMMAND once per task as one TensorFlow cluster, and end all its processes, whatever fails.

    Outside of Slurm the tasks are local processes; inside a Slurm allocation srun starts them. COMMAND stands after
    "--" and finds its role and the cluster in TF_CONFIG.

    In COMMAND {ps_hosts}, {worker_hosts}, {chief_hosts} ("host:port,host:port"), {task_type} or {job_name}, and
    {task_index} are filled in for each task.

    With --grid, one local job runs for each combination of the values: one after another, or --at-most N at once.
    """
    from tf4slurm.cli.terminal_output import make_terminal_output
    from tf4slurm.launch.start import find_allocation, run_job

    allocation = find_allocation(environ, local=local)
    for option in SLURM_OPTIONS:
        if allocation is None and option in given(options):
            raise click.UsageError(f"--{key_of(option)} is for jobs of Slurm, and this is not one.")
    spec = JobSpec(**read_options(JobSpec, environ, options))
    if grid:
        if allocation is not None:
            text = "--grid runs local jobs. In an allocation give --local too, or submit it: tf4slurm submit --grid …"
            raise click.UsageError(text)
        number = 1 if at_most is None else options_of(BatchSpec)["at_most"].convert(at_most)
        sys.exit(_run_grid(spec, grid, number, isolated=isolated))
    if at_most is not None:
        raise click.UsageError("--at-most is for --grid, and there is none.")
    answer, element = environ.pop(ANSWER_VARIABLE, None), environ.pop(RUN_NAME_VARIABLE, None)  # not for the tasks
    result = run_job(
        *(spec, environ, allocation, make_terminal_output),
        isolated=isolated,
        arguments=sys.argv,
        answer=answer,
        element=element,
    )
    sys.exit(result.file.exit_code)


def _run_grid(spec: JobSpec, grid: tuple[str, ...], at_most: int, *, isolated: bool) -> int:
    from tf4slurm.spec.points import make_points, parse_grid
    from tf4slurm.sweep import LocalSweep

    def show(line: str) -> None:
        click.echo(line, nl=False)

    points = make_points(parse_grid(grid))
    sweep = LocalSweep(spec, points, at_most=at_most, isolated=isolated, on_output=show)
    exit_code = sweep.run(LAUNCHER_SIGNALS)
    note(f"{sweep.known.name}: tf4slurm status, or tf4slurm report {sweep.known.name}")
    return exit_code


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
