"""Show how a page that this host serves on its loopback address is reached from the person's own computer."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
from collections.abc import Mapping

from tf4slurm.slurm.environ import SlurmAllocation

_SSH_PORT = "22"
_SESSION_VARIABLES = ("SSH_CONNECTION", "SSH_TTY")


def is_remote(environ: Mapping[str, str]) -> bool:
    """Return whether this host is probably not the person's own computer.

    That is so in an SSH session, in a job of Slurm, and on a host with sbatch, such as a login node.
    """
    in_session = any(environ.get(name) for name in _SESSION_VARIABLES)
    in_job = SlurmAllocation.from_environ(environ) is not None
    return in_session or in_job or shutil.which("sbatch", path=environ.get("PATH")) is not None


def ssh_tunnel(environ: Mapping[str, str], port: int) -> str:
    """Return the ssh command that forwards a port of the person's own computer to the same port of this host.

    It names this user and host. In an SSH session, it also has the port of the SSH server if that is not 22, and the
    address of the server if this host has no full name.
    """
    server = environ.get("SSH_CONNECTION", "").split()[2:4]  # after the client's address and port
    host, user, option = socket.getfqdn(), "USER", ""
    if len(server) == 2:
        if "." not in host or host.startswith("localhost"):
            host = server[0]
        if server[1] != _SSH_PORT:
            option = f"-p {server[1]} "
    with contextlib.suppress(OSError, KeyError):  # the host has no name for this user
        user = getpass.getuser()
    return f"ssh {option}-N -L {port}:127.0.0.1:{port} {user}@{host}"
