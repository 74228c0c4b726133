"""The recorder on a slow file system."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes import wait_until
from tf4slurm.cluster import Task
from tf4slurm.control.records import Outcome
from tf4slurm.control.state import JobState
from tf4slurm.jobs.recorder import Recorder
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import StatusFile
from tf4slurm.spec import JobSpec


def test_last_status_is_written_after_a_slow_earlier_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory.create(tmp_path, "run")
    state = JobState([Task("worker", 0)], JobSpec(), time.monotonic(), lambda *_, **__: None)
    files = ThreadPoolExecutor(1)
    recorder = Recorder(run, state, time.monotonic(), files)
    write = RunDirectory.write
    phases: list[str] = []
    goes_on = threading.Event()

    def write_slowly(run: RunDirectory, content: StatusFile) -> None:
        phases.append(str(content.phase))
        if len(phases) == 1:
            assert goes_on.wait(20)
        write(run, content)

    async def end_while_it_writes() -> None:
        recording = asyncio.create_task(recorder.run())
        await asyncio.to_thread(wait_until, lambda: bool(phases), 10)
        recording.cancel()
        state.on_spawner_exit(Outcome(7, "srun ended."), time.monotonic())
        recorder.write()
        assert phases == ["rendezvous"]
        goes_on.set()
        await asyncio.wrap_future(files.submit(lambda: None))

    monkeypatch.setattr(RunDirectory, "write", write_slowly)
    asyncio.run(end_while_it_writes())
    assert phases == ["rendezvous", "ended"]
    status = run.read(StatusFile)
    assert status is not None
    assert status.phase == "ended"
    assert "is not recorded" not in caplog.text
