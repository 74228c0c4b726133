"""The sidecar of an external chief: the agent of a process, such as a notebook, that joins a job as its chief.

The process starts this program with `script_client/tf4slurm_sidecar.py`. The program finds the control service as
`join` does, through control.json in the run directory.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tf4slurm.agent.agent import Agent
from tf4slurm.agent.rendezvous import ExternalChief, Rendezvous
from tf4slurm.agent.sidecar import CallingChief, send_error, send_leave
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.errors import RendezvousError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.slurm.environ import own_node_name
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.exec_child import OTHER_SIGNALS, STOP_SIGNALS
from tf4slurm.system.program import run_program


def main() -> NoReturn:
    """Run the sidecar of the process that started this process.

    The process writes one line of JSON to standard input, with the path of the run directory. It reads a line of JSON
    when the cluster has formed, and another one when it has left the job to another chief (see `CallingChief`).
    """
    for number in (*STOP_SIGNALS, *OTHER_SIGNALS):
        signal.signal(
            number, signal.SIG_IGN
        )  # Jupyter sends SIGINT to interrupt a cell; the sidecar ends with the process

    def run(environ: Mapping[str, str]) -> None:
        request = json.loads(sys.stdin.readline())
        try:
            asyncio.run(_run_sidecar(RunDirectory(Path(request["run_directory"])), environ))
        except Exception as error:
            send_error(error)

    run_program(run)


async def _run_sidecar(directory: RunDirectory, environ: Mapping[str, str]) -> None:
    file = directory.read_trusted_job()
    spec = JobSpec(file.command, **file.options)
    identity = ExternalChief(own_node_name(environ), spec.num_tasks - 1)
    rendezvous = Rendezvous(identity, spec, lambda: ControlEndpoint.from_file(directory.control))
    chief = CallingChief(rendezvous, directory)
    agent = Agent(rendezvous, chief)
    await agent.run()
    if not chief.has_started and not chief.has_ended:
        send_error(agent.failure or RendezvousError("The cluster did not form."))
    elif chief.has_left:
        desired = rendezvous.client.desired
        if desired.terminate or desired.stop_reason:
            send_error(RendezvousError(desired.terminate_reason or desired.stop_reason))
        elif agent.is_end_confirmed:
            send_leave()
        else:
            send_error(RendezvousError("The launcher did not confirm the restart."))
