"""The job's event log: one JSON object per line, with the time on the wall and since the job's start."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tf4slurm.jobs.run_directory import open_to_append
from tf4slurm.system.background import OrderedThread

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One change of life: of a task ("worker/0"), or of the job (task None). `seconds` is since the job's start."""

    seconds: float
    kind: str
    task: str | None
    text: str


class EventLog:
    """Appends events to events.jsonl in a thread. A disk that is full ends the log, not the job."""

    def __init__(self, path: Path, files: OrderedThread) -> None:
        self._started = time.monotonic()
        self._file: BinaryIO | None = None
        self._files = files
        files.submit(self._open, path)

    def add(self, kind: str, task: str | None, text: str) -> Event:
        event = Event(round(time.monotonic() - self._started, 4), kind, task, text)
        self._files.submit(self._write, json.dumps({"time": round(time.time(), 3), **vars(event)}).encode() + b"\n")
        return event

    def close(self) -> None:
        self._files.submit(self._close)

    def _open(self, path: Path) -> None:
        try:
            self._file = open_to_append(path)
        except OSError as error:
            logger.warning("there is no events.jsonl: %s", error)

    def _write(self, line: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(line)
            except OSError as error:
                logger.warning("events.jsonl ends here: %s", error)
                self._close()

    def _close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:  # NFS reports a full disk only now
            logger.warning("events.jsonl may be incomplete: %s", error)
        self._file = None
