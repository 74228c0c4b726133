"""Run the tasks of a job that plain srun has started. Rank 0's process also runs the launcher or the control service.

`run_task` runs `srun tf4slurm task`: each task has an agent, and rank 0's process also runs the launcher. `main` runs
the sidecar of a script under plain srun (see `server_dictionary.py`): an agent, and on rank 0 also the control service.
The other tasks find the service through control.json (mode 0600) in a run directory whose path contains the step's id.
MUNGE, where it works, seals the job's credentials in this file.

So that srun exits with the job's exit code, rank 0 exits with this code and the other ranks with 0: srun exits with the
highest exit code of its tasks. If Slurm misses the end of rank 0, the other ranks exit with this code. A killed task
counts as 128 + the number of its signal, so the step is cancelled only if a task does not end by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from tf4slurm.agent.agent import Agent
from tf4slurm.agent.child import OwnedChild
from tf4slurm.agent.rendezvous import Rendezvous
from tf4slurm.agent.sidecar import CallingScript, send_error
from tf4slurm.cluster import Address
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.errors import EXIT_TASK_LOST, InterfaceError, LaunchError, RendezvousError
from tf4slurm.jobs.registry import register_job
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.jobs.status import JobFiles
from tf4slurm.launch.checks import check_command, check_program_source, warn_of_resolver
from tf4slurm.launch.hosting import close_service, make_service, start_service, wait_for_late_tasks, write_control
from tf4slurm.launch.launcher import Launcher
from tf4slurm.launch.result import Result, save_result
from tf4slurm.launch.spawners import ExternalSpawner
from tf4slurm.launch.terminal_output import TerminalOutput
from tf4slurm.network.interfaces import interface_address
from tf4slurm.slurm.commands import cancel_step
from tf4slurm.slurm.environ import SlurmStep
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import OTHER_SIGNALS, STOP_SIGNALS
from tf4slurm.system.output import LineWriter
from tf4slurm.system.program import run_program
from tf4slurm.system.threads import in_thread

logger = logging.getLogger(__name__)

_FILE_SYSTEM_SECONDS = 5.0
_RESULT_SECONDS, _POLL_SECONDS = 2.0, 0.05
_CONNECT_SECONDS = 1.0
_EXIT_SECONDS = 3.0
_FAILURE_SECONDS = 10.0  # for a task to report that its host lacks the interface


def _make_rendezvous(step: SlurmStep, spec: JobSpec, directory: RunDirectory, *, owns_child: bool) -> Rendezvous:
    """Return a task's rendezvous. If the host lacks the job's interface, the task registers only to report this."""
    failure = None
    try:
        if spec.interface:
            interface_address(spec.interface, step.node_name)
    except InterfaceError as error:  # rank 0 may have ended with the same error
        failure = error
        seconds = min(spec.start_timeout_seconds, _FAILURE_SECONDS)
        spec = dataclasses.replace(spec, start_timeout_seconds=seconds)
    rendezvous = Rendezvous(step, spec, lambda: ControlEndpoint.from_file(directory.control), owns_child=owns_child)
    rendezvous.failure = failure
    return rendezvous


# srun tf4slurm task


def run_task(
    spec: JobSpec, step: SlurmStep, environ: Mapping[str, str], writer: LineWriter, terminal: TerminalOutput
) -> int:
    """Run one task of the step. Return the exit code for this process.

    It is the exit code of the job on rank 0, and usually 0 on other ranks (see the module). A task that does not take
    part in the job, or has lost the launcher, returns the exit code of its agent.

    Raises:
        CommandError: See `check_program_source` and `check_command`.
        OptionError: See `check_command`.
        RunDirectoryError: Rank 0 cannot create the run directory.
    """
    check_program_source(spec.command)
    check_command(spec)
    restart = f"r{step.restart_count}" if step.restart_count else ""
    path = spec.runs_directory / f"{spec.name}-{step.job_id}.{step.step_id}{restart}"
    directory = RunDirectory.open(path) if step.rank == 0 else RunDirectory(path.absolute())
    rendezvous = _make_rendezvous(step, spec, directory, owns_child=True)
    agent = Agent(rendezvous, OwnedChild(rendezvous, environ, directory, writer))
    if step.rank != 0:
        exit_code = asyncio.run(agent.run())
        if agent.has_lost_launcher and rendezvous.client.cluster is not None:
            _end_without_rank_0(rendezvous.client, directory, step)
        desired = rendezvous.client.desired
        if step.rank == 1 and desired.exit_code:
            logger.error("%s The step ends.", desired.terminate_reason)
        return desired.exit_code if agent.was_terminated else exit_code
    warn_of_resolver(spec.command)
    register_job(path.name, spec.runs_directory, environ, step.job_id)
    launcher = Launcher(spec, ExternalSpawner(), directory, terminal, job_id=step.job_id, node=step.node_name)

    async def run_both() -> Result:
        return (await asyncio.gather(launcher.run(), agent.run()))[0]

    result = asyncio.run(run_both())
    if launcher.leaves_step_running:
        terminal.close()
        _cancel(step)
    return result.file.exit_code


def _end_without_rank_0(client: ControlClient, directory: RunDirectory, step: SlurmStep) -> None:
    """Write the job's result, which the lost rank 0 could not write, and make sure that the step ends."""
    has_written: list[bool] = []
    thread = threading.Thread(target=lambda: has_written.append(_write_result(client, directory)), daemon=True)
    thread.start()
    thread.join(_FILE_SYSTEM_SECONDS)
    if has_written != [False] and not _has_ended(client.service_address):  # one task runs scancel, not all
        _cancel(step)  # rank 0 may be stopped by a signal, and srun would wait for it for ever


def _write_result(client: ControlClient, directory: RunDirectory) -> bool:
    """Write the job's result if this task can remove control.json. Return whether it has removed this file.

    Every task but rank 0 tries to remove the file, so exactly one succeeds. It writes the result, unless rank 0 has
    written one before. The others wait at most 2 s for the result.
    """
    if not _claim(directory):
        deadline = time.monotonic() + _RESULT_SECONDS
        while directory.read(ResultFile) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return False
    if directory.read(ResultFile) is not None:
        return True
    assert client.cluster is not None
    rank_0 = client.cluster.member(0)
    files = JobFiles(directory)
    what = f"The agent of {rank_0.task} on {rank_0.node}, which hosted the control service, is lost."
    content = ResultFile(
        exit_code=EXIT_TASK_LOST,
        reason=f"{what} {files.describe_last_state()}".strip(),
        cause=str(rank_0.task),
        seconds=files.status.seconds or None,
        attempts=client.observed.attempt,
    )
    logger.error("%s The step ends.", what)
    save_result(content, directory)
    return True


def _has_ended(address: Address | None) -> bool:
    """Return whether the process that listened at `address` has ended: its host refuses connections there.

    A process stopped by SIGSTOP has not ended: its host still accepts connections. If the host does not answer or
    `address` is None, the result is False.
    """
    if address is None:
        return False
    try:
        socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _cancel(step: SlurmStep) -> None:
    try:
        cancel_step(step)
    except LaunchError as error:
        logger.error("what is left of the step could not be ended: %s", error)


# The sidecar of a script under plain srun


def main() -> NoReturn:
    """Run the sidecar of the script that started this process.

    The script writes one line of JSON to standard input: the run directory, the roles and the options of the job.
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
    )
    path = Path(request["run_directory"])
    runs_service = step.rank == 0
    directory = RunDirectory.open(path, reserve_result=False) if runs_service else RunDirectory(path.absolute())
    rendezvous = _make_rendezvous(step, spec, directory, owns_child=False)

    async def on_launcher_loss() -> None:
        if spec.cancels_step:
            await _end_without_service(script, rendezvous.client, directory, step)

    script = CallingScript(rendezvous, on_launcher_loss)
    agent = Agent(rendezvous, script)
    acting = asyncio.create_task(agent.run())
    serving = asyncio.create_task(_host(request["counts"], spec, directory, step)) if runs_service else None
    tasks: set[asyncio.Task[Any]] = {acting} if serving is None else {acting, serving}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not script.has_started and not script.has_ended:
        if serving is not None and serving.done():
            serving.result()
        send_error(agent.failure or RendezvousError("The cluster did not form."))
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
                await in_thread(_cancel, step)
                is_cancelled = True
        await ending
        await wait_for_late_tasks(service)
    finally:
        await close_service(service, directory, files)
    if not is_cancelled and any(record.is_hidden_from_slurm for record in state.tasks.members):
        await in_thread(_cancel, step)  # srun would wait for ever for a task whose end Slurm does not notice


async def _end_without_service(
    script: CallingScript, client: ControlClient, directory: RunDirectory, step: SlurmStep
) -> None:
    """Request that this script saves, after the loss of rank 0's sidecar, and let one task cancel the step.

    Without the control service, the ps cannot notice that training is over.
    """
    assert client.cluster is not None
    rank_0 = client.cluster.member(0)
    reason = f"The sidecar of {rank_0.task} on {rank_0.node}, which ran the control service, is lost."
    script.request_save(reason)
    claiming = in_thread(_claim, directory)
    await asyncio.wait({claiming}, timeout=_FILE_SYSTEM_SECONDS)
    if claiming.done() and not claiming.result():
        return
    await script.wait_until_saved()
    logger.error("%s The step ends.", reason)
    await in_thread(_cancel, step)


def _claim(directory: RunDirectory) -> bool:
    """Remove control.json. Return whether this task removed it, so that only one task ends the step."""
    try:
        directory.control.unlink()
    except OSError:
        return False
    return True
