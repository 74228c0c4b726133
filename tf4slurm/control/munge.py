"""A text that only its own user can read, on any host of the cluster: by MUNGE, where it runs.

MUNGE is how Slurm's own daemons know who sent a message: munged, on each host, seals a text with the cluster's key,
tells which user had it sealed, and opens it for one user alone. This is the only file that starts its programs, `munge`
and `unmunge`; each takes 2 ms. The text goes through their standard input and output, never through their arguments.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess

from tf4slurm.errors import AuthenticationError

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
_PURPOSE = b"tf4slurm control secret: "
_OPENED = (0, 15, 16, 17)
"""STATUS of credentials that are good, expired, from the future, or opened before on this host (munge.h). All are
accepted: many tasks read the text, late ones too. An old text leads to a job that has ended."""


def seal_for_this_user(secret: str) -> str | None:
    """Return a credential that only processes of this user open; None where MUNGE does not work."""
    try:
        sealed = _run("munge", f"--restrict-uid={os.getuid()}", "--ttl=-1", text=_PURPOSE + secret.encode())
        credential = sealed.decode("ascii").strip()
        return credential if open_from_this_user(credential) == secret else None
    except (AuthenticationError, ValueError) as error:
        logger.debug("no MUNGE here: %s", error)
        return None


@functools.lru_cache(maxsize=1)
def open_from_this_user(credential: str) -> str:
    """Return the secret that a process of this user has sealed for this user; the last answer is remembered.

    Raises:
        AuthenticationError: MUNGE does not open it here, or it is another user's, or was made for something else.
    """
    answer = _run("unmunge", "--numeric", "--keys=STATUS,UID,UID_RESTRICTION", text=credential.encode())
    metadata, _, text = answer.partition(b"\n\n")
    facts = {key: int(value) for key, value in re.findall(rb"^(\w+):\s*(-?\d+)$", metadata, re.MULTILINE)}
    me = os.getuid()
    if facts.get(b"STATUS") not in _OPENED or facts.get(b"UID") != me or facts.get(b"UID_RESTRICTION") != me:
        raise AuthenticationError("The job's secret was not sealed by this user for this user. It is not used.")
    if not text.startswith(_PURPOSE):
        raise AuthenticationError("The MUNGE credential in place of the job's secret is for something else.")
    return text.removeprefix(_PURPOSE).decode()


def _run(program: str, *options: str, text: bytes) -> bytes:
    try:
        done = subprocess.run((program, *options), input=text, capture_output=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AuthenticationError(_failed(program, type(error).__name__)) from error
    if done.returncode not in _OPENED:
        raise AuthenticationError(_failed(program, done.stderr.decode(errors="replace").strip()))
    return done.stdout


def _failed(program: str, words: str) -> str:
    return (
        f"{program!r} does not work on {os.uname().nodename}: {words}. The job's secret travels by MUNGE, which must "
        "run on every host of the job or on none: look at munged, and at what a container lacks."
    )
