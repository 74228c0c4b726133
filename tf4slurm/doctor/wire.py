"""How a node's answer comes through srun whole: as short lines that say whose they are.

srun passes on up to 1,024 bytes of a task's output at a time, and between two such parts there may be another task's
(MAX_MSG_LEN in slurmstepd). So a value goes as lines of fewer bytes, each with the task's rank, the last one marked.
"""

from __future__ import annotations

import base64
import json
from typing import Any

_MARK = "tf4slurm-doctor"
_BYTES = 900


def to_lines(rank: int, value: Any) -> str:
    """Return the lines that carry one value of one task."""
    text = base64.b64encode(json.dumps(value).encode()).decode()
    parts = [text[start : start + _BYTES] for start in range(0, len(text), _BYTES)]
    last = len(parts) - 1
    return "".join(f"{_MARK} {rank} {'.' if number == last else '+'} {part}\n" for number, part in enumerate(parts))


class Assembler:
    """Puts the lines of many tasks together again."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}

    def feed(self, line: str) -> tuple[int, Any] | None:
        """Take one line; return the rank and its value once that is whole. What is no such line is passed over."""
        words = line.split()
        if len(words) != 4 or words[0] != _MARK or not words[1].isdecimal():
            return None
        rank = int(words[1])
        self._parts[rank] = self._parts.get(rank, "") + words[3]
        if words[2] != ".":
            return None
        try:
            return rank, json.loads(base64.b64decode(self._parts.pop(rank), validate=True))
        except ValueError:
            return None
