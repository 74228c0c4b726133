"""The jobs of tests/tensorflow/test_versions.py on four hosts, with four of the versions of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.jobs import Job
from tests.slurm.lab import SlurmLab
from tests.tensorflow.test_versions import CASES, check_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class LabJob(Job):
    """A job whose tasks run on one host each, in an allocation of salloc."""

    def __init__(self, directory: Path, lab: SlurmLab) -> None:
        super().__init__(
            directory, lambda command, *, stdout, stderr, text: lab.popen(*command, stdout=stdout, stderr=stderr)
        )

    def start(self, *options: str, command: Sequence[str] | None = None, prefix: Sequence[str] = ()) -> None:
        number = 3 if "--no-chief" in options else 4
        super().start(*options, command=command, prefix=(*prefix, "salloc", "-Q", f"-N{number}", f"-n{number}"))

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        (launcher,) = psutil.Process(self.process.pid).children()
        launcher.send_signal(number)


@pytest.mark.parametrize("version", ["1.15", "2.4", "2.11", "2.15"])
@pytest.mark.parametrize("name", CASES)
def test_job_with_version_of_tensorflow_on_several_hosts(
    lab: SlurmLab,
    tmp_path: Path,
    name: str,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    with LabJob(tmp_path, lab) as job:
        check_job(job, name, version, monkeypatch, record_property)
