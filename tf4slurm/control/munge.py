"""Encrypt a text with MUNGE, so that only processes of the same user can read it, on any host of the cluster.

Slurm's daemons authenticate each other with MUNGE. The daemon munged on each host encrypts a text with the cluster's
key, records the user who encrypted it, and decrypts it for one user only. This module runs the programs `munge` and
`unmunge`, which take 2 ms each. The text passes through standard input and output, never through arguments.
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
"""STATUS of credentials that are valid, expired, from the future, or already opened on this host (munge.h). All are
accepted, because many tasks open the same credential, some of them late."""


def seal_for_this_user(secret: str) -> str | None:
    """Return a MUNGE credential that only this user can open; None if MUNGE does not work on this host."""
    try:
        sealed = _run("munge", f"--restrict-uid={os.getuid()}", "--ttl=-1", text=_PURPOSE + secret.encode())
        credential = sealed.decode("ascii").strip()
        return credential if open_from_this_user(credential) == secret else None
    except (AuthenticationError, ValueError) as error:
        logger.debug("MUNGE does not work here: %s", error)
        return None


@functools.lru_cache(maxsize=1)
def open_from_this_user(credential: str) -> str:
    """Return the secret in a credential from `seal_for_this_user`; the last result is cached.

    Raises:
        AuthenticationError: MUNGE cannot open the credential on this host, or another user or program created it.
    """
    answer = _run("unmunge", "--numeric", "--keys=STATUS,UID,UID_RESTRICTION", text=credential.encode())
    metadata, _, text = answer.partition(b"\n\n")
    facts = {key: int(value) for key, value in re.findall(rb"^(\w+):\s*(-?\d+)$", metadata, re.MULTILINE)}
    me = os.getuid()
    if facts.get(b"STATUS") not in _OPENED or facts.get(b"UID") != me or facts.get(b"UID_RESTRICTION") != me:
        raise AuthenticationError(
            "The job's secret was not sealed by this user for this user. Check who can write to the run directory."
        )
    if not text.startswith(_PURPOSE):
        raise AuthenticationError(
            "The MUNGE credential that should contain the job's secret was made for another purpose."
        )
    return text.removeprefix(_PURPOSE).decode()


def _run(program: str, *options: str, text: bytes) -> bytes:
    try:
        done = subprocess.run(
            (program, *options), input=text, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AuthenticationError(_failed(program, type(error).__name__)) from error
    if done.returncode not in _OPENED:
        raise AuthenticationError(_failed(program, done.stderr.decode(errors="replace").strip()))
    return done.stdout


def _failed(program: str, reason: str) -> str:
    return (
        f"{program!r} does not work on {os.uname().nodename}: {reason}. The job's secret is encrypted by MUNGE, which "
        "must run on every host of the job or on none. Check munged, and its socket inside of containers."
    )
