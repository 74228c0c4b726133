"""The sidecar of a script under plain srun: an agent, and on rank 0 also the control service."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from tf4slurm.agent.agent import Agent
from tf4slurm.agent.sidecar import CallingScript, send_error
from tf4slurm.control.client import ControlClient
from tf4slurm.errors import RendezvousError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.launch.hosting import close_service, make_service, start_service, wait_for_late_tasks, write_control
from tf4slurm.launch.plain_srun import FILE_SYSTEM_SECONDS, claim, end_step, make_rendezvous
from tf4slurm.placement import check_step, count_roles
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import OTHER_SIGNALS, STOP_SIGNALS
from tf4slurm.system.program import run_program
from tf4slurm.system.threads import in_thread

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 3.0


def main() -> NoReturn:
    """Run the sidecar of the script that started this process.

    The script writes one line of JSON to standard input: the parent of the run directory, the roles, and the options
    of the job.
    """
    for number in (*STOP_SIGNALS, *OTHER_SIGNALS):
        signal.signal(number, signal.SIG_IGN)  # the script handles them; the sidecar ends with the script

    def run(environ: Mapping[str, str]) -> None:
        try:
            asyncio.run(_run_sidecar(json.loads(sys.stdin.readline()), SlurmStep.from_environ(environ)))
        except Exception as error:
            send_error(error)

    run_program(run)


async def _run_sidecar(request: dict[str, Any], step: SlurmStep) -> None:
    spec = JobSpec(
        placement=request["placement"],
        interface=request["interface"],
        ports=tuple(request["ports"]),
        start_timeout_seconds=request["timeout_seconds"],
        kill_wait_seconds=0,
        cancels_step=request["cancels_step"],
        hold_ports=request["hold_ports"],
    )
    counts = count_roles(request["counts"])
    check_step(counts, spec.placement, step.num_tasks)
    number = f".{request['number']}" if request["number"] > 1 else ""
    path = Path(request["directory"], f"step-{step.job_id}.{step.step_id}-{step.restart_count}{number}")
    runs_service = step.rank == 0
    directory = RunDirectory.open(path, reserve_result=False) if runs_service else RunDirectory(path.absolute())
    rendezvous = make_rendezvous(step, spec, directory, owns_child=False)

    async def on_launcher_loss() -> None:
        if spec.cancels_step:
            await _end_without_service(script, rendezvous.client, directory, step)

    script = CallingScript(rendezvous, on_launcher_loss)
    agent = Agent(rendezvous, script)
    acting = asyncio.create_task(agent.run())
    serving = asyncio.create_task(_host(counts, spec, directory, step)) if runs_service else None
    tasks: set[asyncio.Task[Any]] = {acting} if serving is None else {acting, serving}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not script.has_started and not script.has_ended:
        if serving is not None and serving.done():
            serving.result()
        send_error(agent.failure or RendezvousError("The cluster did not form."), step.rank)
    await acting
    if serving is not None:
        await asyncio.wait({serving})


async def _host(counts: Mapping[str, int], spec: JobSpec, directory: RunDirectory, step: SlurmStep) -> None:
    """Run the control service until the job has ended, and make sure that the step ends."""
    is_decided = asyncio.Event()

    def on_event(kind: str, *_: object, **__: object) -> None:
        if kind == "outcome":
            is_decided.set()

    service, files, is_cancelled = make_service(spec, counts, on_event), ThreadPoolExecutor(1), False
    state = service.state
    try:
        endpoint = await start_service(service, step.node_name)
        await asyncio.wrap_future(files.submit(write_control, endpoint, directory))
        ending, deciding = asyncio.create_task(service.wait_for_end()), asyncio.create_task(is_decided.wait())
        await asyncio.wait({ending, deciding}, return_when=asyncio.FIRST_COMPLETED)
        if state.outcome is not None and (state.tasks.has_running or state.desired.shared.stop_reason):
            logger.error("%s The step ends.", state.outcome.reason)
            await asyncio.wait({ending}, timeout=_EXIT_SECONDS)  # scripts that have saved exit by themselves
            if state.tasks.has_running:
                await in_thread(end_step, step)
                is_cancelled = True
        await ending
        await wait_for_late_tasks(service)
    finally:
        await close_service(service, directory, files)
    if not is_cancelled and any(record.is_hidden_from_slurm for record in state.tasks.members):
        await in_thread(end_step, step)  # srun would wait for ever for a task whose end Slurm does not notice


async def _end_without_service(
    script: CallingScript, client: ControlClient, directory: RunDirectory, step: SlurmStep
) -> None:
    """Request that the script saves, after the loss of rank 0's sidecar. One task then cancels the step.

    Without the control service of rank 0, the ps cannot notice that training is over.
    """
    assert client.cluster is not None
    rank_0 = client.cluster.member(0)
    reason = f"The sidecar of {rank_0.task} on {rank_0.node}, which ran the control service, is lost."
    script.request_save(reason)
    claiming = in_thread(claim, directory)
    await asyncio.wait({claiming}, timeout=FILE_SYSTEM_SECONDS)
    if claiming.done() and not claiming.result():
        return
    await script.wait_until_saved()
    logger.error("%s The step ends.", reason)
    await in_thread(end_step, step)
