"""The job's event log: one JSON object per line, with the time on the wall and since the job's start."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One change of life: of a task ("worker/0"), or of the job (task None). `seconds` is since the job's start."""

    seconds: float
    kind: str
    task: str | None
    text: str


class EventLog:
    """Appends events to events.jsonl. A disk that is full ends the log, not the job."""

    def __init__(self, path: Path) -> None:
        self._started = time.monotonic()
        self._file: TextIO | None = None
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            logger.warning("there is no events.jsonl: %s", error)

    def add(self, kind: str, task: str | None, text: str) -> Event:
        event = Event(round(time.monotonic() - self._started, 4), kind, task, text)
        if self._file is not None:
            try:
                self._file.write(json.dumps({"time": round(time.time(), 3), **vars(event)}) + "\n")
            except OSError as error:
                self._file = None
                logger.warning("events.jsonl ends here: %s", error)
        return event

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # told at the last write
                self._file.close()
