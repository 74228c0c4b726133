"""Whether the host of a notebook and the hosts of its cluster reach each other, and what to do if they do not."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

from tf4slurm.cluster import Address
from tf4slurm.control.credentials import ControlEndpoint
from tf4slurm.errors import RendezvousConnectionError
from tf4slurm.jobs.run_directory import RunDirectory

_CONNECT_SECONDS = 5.0

ADVICE = (
    "This notebook is the chief: its host and those of the job must reach each other, on any TCP port or on those of "
    "ports= and control_port=. If a firewall is between them, choose another network with interface=, or start the "
    'notebook in an allocation: "srun --pty jupyter lab --no-browser --ip=0.0.0.0".'
)


def check_service(directory: RunDirectory) -> None:
    """Check that this host can connect to the control service of a job, whose control.json exists, within 5 s.

    Raises:
        RendezvousConnectionError: It cannot. The message names the addresses that were tried.
    """
    endpoint = ControlEndpoint.from_file(directory.control)
    if endpoint is None:  # the job has just ended, which the sidecar reports
        return
    with ThreadPoolExecutor(len(endpoint.addresses)) as pool:
        if any(pool.map(_connects, endpoint.addresses)):
            return
    tried = " and ".join(map(str, endpoint.addresses))
    raise RendezvousConnectionError(
        f"{os.uname().nodename} does not reach the launcher of {directory.path.name} at {tried} within "
        f"{_CONNECT_SECONDS:g} s. {ADVICE}"
    )


def _connects(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
