"""Start the preloader that the tasks of a host share in a step of Slurm.

The first task of the host starts it, but no agent owns it: the guard of an agent, which kills what its agent leaves
behind, must not end the processes of other tasks. It ends when the last agent that holds it has ended. Tasks whose
cgroup, limits or CPUs differ do not share one.
"""

from __future__ import annotations

import os
import sys

from tf4slurm.system.variables import PRELOADER_VARIABLE


def start_shared_preloader() -> None:
    """Start the preloader of this host and step, unless another task has. Call this before `start_guard`.

    The environment variable of the preloader, in which the launcher sets a secret of the step, is then its address. If
    no preloader can be started, the variable is removed. A fork does all this, so that the guard stays small.
    """
    secret = os.environ.pop(PRELOADER_VARIABLE, "")
    if not secret:
        return
    readable, writable = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        _start(secret, writable)
    os.close(writable)
    with open(readable) as pipe:
        address = pipe.read()
    os.waitpid(process_id, 0)
    if address:
        os.environ[PRELOADER_VARIABLE] = address


def _start(secret: str, writable: int) -> None:
    try:
        from tf4slurm.preload.client import start_shared
        from tf4slurm.system.variables import base_environment

        address = start_shared(secret, sys.argv[1:], base_environment(os.environ))
        os.write(writable, address.to_text().encode())
    except Exception:  # noqa: S110 - the agent starts a preloader of its own, or tells why there is none
        pass
    finally:
        os._exit(0)
