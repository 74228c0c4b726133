"""Read the answer of the sidecar that this process has started (`script_client/tf4slurm_sidecar.py`)."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tf4slurm import errors
from tf4slurm.errors import RendezvousError
from tf4slurm.script_client.tf4slurm_sidecar import read_line


def read_answer(sidecar: subprocess.Popen[str], timeout_seconds: float) -> dict[str, Any]:
    """Return the sidecar's answer.

    Raises:
        RendezvousError: The sidecar exits, is stopped, or sends no answer in time.
        Exception: The error that the sidecar has sent, with its type if `errors` has it, else RendezvousError.
    """
    line = read_line(sidecar, timeout_seconds)
    missing = ["RendezvousError", "The sidecar exited, or is stopped.", {}]
    answer: dict[str, Any] = json.loads(line) if line else {"error": missing}
    if "error" in answer:
        name, message, facts = answer["error"]
        kind = getattr(errors, name, None)
        raise kind(message, **facts) if kind else RendezvousError(f"The sidecar failed: {name}: {message}")
    return answer
