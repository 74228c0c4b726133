"""Show how a page that this host serves on its loopback address is reached from the person's own computer."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
from collections.abc import Mapping

from tf4slurm.slurm.environ import SlurmAllocation, find_node_and_submit_host

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

    On a node of a job, the command goes through the login node from which the job was submitted, because nodes are
    seldom reached from elsewhere. There SSH_CONNECTION is that of the session on the login node.
    """
    server = environ.get("SSH_CONNECTION", "").split()[2:4]  # after the client's address and port
    address, ssh_port = server if len(server) == 2 else ("", _SSH_PORT)
    host, user = socket.getfqdn(), "USER"
    with contextlib.suppress(OSError, KeyError):  # the host has no name for this user
        user = getpass.getuser()
    forward = f"-N -L {port}:127.0.0.1:{port}"
    node, login = find_node_and_submit_host(environ)
    if node:
        login = "" if login.partition(".")[0] == node.partition(".")[0] else login
        login = login if _is_full_name(login) else address or login
        suffix = ""
        if ssh_port != _SSH_PORT and login:
            login, suffix = f"[{login}]" if ":" in login else login, f":{ssh_port}"
        words = f"ssh -J {user}@{login or 'LOGIN'}{suffix} {forward} {user}@{host if _is_full_name(host) else node}"
        return words if login else f"{words} (LOGIN: a login node of the cluster)"
    if address and not _is_full_name(host):
        host = address
    return f"ssh {'' if ssh_port == _SSH_PORT else f'-p {ssh_port} '}{forward} {user}@{host}"


def _is_full_name(host: str) -> bool:
    return "." in host and not host.startswith("localhost")
