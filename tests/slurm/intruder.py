"""Another user on a host of a job: try to read its credentials and to register; print the results as JSON.

    python intruder.py RUN-DIRECTORY MARK HOST PORT    (as root; standard input is a stolen MUNGE credential)

It imports its modules, becomes the user "nobody", and examines all processes that carry the test's MARK.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401, for ssl.get_server_certificate: the user "nobody" cannot read root's Python
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import marked_processes
from tf4slurm import __version__
from tf4slurm.cluster import Address
from tf4slurm.control.client import ControlClient
from tf4slurm.control.credentials import ControlEndpoint, Credentials, open_from_this_user
from tf4slurm.control.messages import Registration
from tf4slurm.errors import Tf4SlurmError
from tf4slurm.spec.job_spec import JobSpec

NOBODY = 65534


def attempt(function: Any, *arguments: Any) -> str:
    """Return the result as text, or the name of the error."""
    try:
        return str(function(*arguments))
    except (OSError, Tf4SlurmError) as error:
        return type(error).__name__


def attempt_on_processes(pids: list[int], function: Callable[[int], Any]) -> list[str]:
    """Return the different results for these processes, without those that have ended."""
    results = {attempt(function, pid) for pid in pids}
    return sorted(results - {"FileNotFoundError", "ProcessLookupError"})


def register(address: Address) -> str:
    """Register with the certificate that the service shows to any client, and a guessed token."""
    credentials = Credentials(ssl.get_server_certificate(address), "0" * 64)
    registration = Registration(0, "n", "h", 1, "intruder", __version__)
    spec = JobSpec(heartbeat_timeout_seconds=3, start_timeout_seconds=5)
    member = ControlClient(lambda: ControlEndpoint((address,), credentials), lambda _: registration, spec)
    try:
        asyncio.run(member.run())
        return f"registered {member.cluster}"
    except Tf4SlurmError as error:
        return f"{type(error).__name__}: {error} {member.cluster}"


def main(run_directory: Path, mark: str, host: str, port: int) -> None:
    credential = sys.stdin.read()
    pids = [process.pid for process in marked_processes(mark) if process.pid != os.getppid()]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    control = run_directory / "control.json"
    found = {
        "list": attempt(os.listdir, run_directory),
        "read": attempt(control.read_text),
        "find": attempt(ControlEndpoint.from_file, control),
        "plant": attempt((run_directory / "control.json").write_text, "{}"),
        "open": attempt(open_from_this_user, credential),
        "environ": attempt_on_processes(pids, lambda pid: Path(f"/proc/{pid}/environ").read_bytes()),
        "memory": attempt_on_processes(pids, lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
        "register": register(Address(host, port)),
        "processes": len(pids),
    }
    sealed = [
        subprocess.run(["munge", "--restrict-uid=0", *options], input=text, capture_output=True).stdout.decode()
        for text, options in ((b"tf4slurm control secret: mine", ()), (b"", ()))
    ]
    print(json.dumps({**found, "sealed": sealed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
