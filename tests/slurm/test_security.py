"""Credentials of a job on a real Slurm with MUNGE: its own tasks get them, other users do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import CHILD, HEARTBEAT_TIMEOUT, TF4SLURM, Job
from tests.processes import marked_processes, read_process, wait_until
from tests.slurm.lab import SlurmLab
from tf4slurm.cluster import Address

ROOT = Path(__file__).parent.parent.parent
ROLES = ("--ps", "1", "--workers", "2")
NAMES = ("chief-0", "ps-0", "worker-0", "worker-1")


class Step:
    """A job of four hosts without a launcher (`srun tf4slurm task`), with its output in a file."""

    def __init__(self, directory: Path, lab: SlurmLab, *prefix: str) -> None:
        self.job = Job(directory)
        self._output = directory / "output"
        task = [*prefix, TF4SLURM, "task", "--runs-directory", str(directory / "runs"), *ROLES]
        task += ["--heartbeat-timeout", HEARTBEAT_TIMEOUT, "--"]
        with self._output.open("w") as file:
            self.srun = lab.popen(
                *("srun", "-Q", "-N4", "-n4", *task, sys.executable, str(CHILD), str(self.job.children)),
                stdout=file,
                stderr=file,
                env={"TF4SLURM_LOG": "DEBUG"},
            )

    def wait_until_training(self) -> dict[str, Any]:
        """Return the content of control.json."""
        for name in NAMES:
            self.job.wait_for_child(name)
        control: dict[str, Any] = json.loads((self.job.run_directory / "control.json").read_text())
        return control

    def end(self) -> None:
        self.job.end_child("chief-0")
        assert self.srun.wait(60) == 0, self._output.read_text()

    def close(self) -> None:
        if self.srun.poll() is None:
            self.srun.terminate()  # srun ends its tasks
            self.srun.wait(60)


@pytest.fixture
def step(tmp_path: Path, lab: SlurmLab) -> Iterator[Step]:
    step = Step(tmp_path, lab)
    yield step
    step.close()


def credentials_in(control: dict[str, Any], lab: SlurmLab) -> dict[str, str]:
    code = "import sys; from tf4slurm.control import credentials; print(credentials.open_from_this_user(sys.argv[1]))"
    found: dict[str, str] = json.loads(lab.on(lab.nodes[0], sys.executable, "-c", code, control["munge"]).stdout)
    return found


def test_credentials_are_sealed_by_munge_and_the_token_is_found_nowhere(
    step: Step, lab: SlurmLab, process_mark: str
) -> None:
    control = step.wait_until_training()
    assert set(control) == {"addresses", "munge"}
    credentials = credentials_in(control, lab)
    assert set(credentials) == {"certificate", "token"}
    token = credentials["token"]
    assert len(bytes.fromhex(token)) == 32
    assert "BEGIN CERTIFICATE" in credentials["certificate"]
    slurm = [lab.run("scontrol", "-o", "show", what).stdout for what in ("job", "step")]
    marked = marked_processes(process_mark)
    seen = [text for each in marked for name in ("cmdline", "environ") if (text := read_process(each.pid, name))]
    assert len(seen) > 2 * len(NAMES)
    step.end()
    files = [path for path in step.job.directory.rglob("*") if path.is_file()]
    assert {"events.jsonl", "job.json", "result.json", "output", "chief-0.1"} <= {path.name for path in files}
    for text in (*(path.read_bytes() for path in files), *seen, *(text.encode() for text in slurm)):
        assert token.encode() not in text
        assert b"PRIVATE KEY" not in text
    assert not (step.job.run_directory / "control.json").exists()


def test_other_user_gets_no_credentials_and_cannot_register(step: Step, lab: SlurmLab, process_mark: str) -> None:
    control = step.wait_until_training()
    host, port = Address.from_text(control["addresses"][0])
    arguments = (str(step.job.run_directory), process_mark, host, str(port))
    with (step.job.directory / "intruder").open("w+") as output:
        intruder = lab.popen_on(
            lab.nodes[1],
            *(sys.executable, "-m", "tests.slurm.intruder", *arguments),
            stdin=subprocess.PIPE,
            stdout=output,
        )
        intruder.communicate(control["munge"], timeout=60)
        output.seek(0)
        found = json.load(output)
    assert found["processes"] > 0
    assert found["list"] == found["read"] == found["plant"] == "PermissionError"
    assert found["find"] == "None"
    assert found["open"] == "AuthenticationError"
    assert found["environ"] == found["memory"] == ["PermissionError"]
    assert found["register"].startswith("RendezvousConnectionError: ")
    assert "does not accept this job's token" in found["register"]
    assert found["register"].endswith(" None")
    for credential in found["sealed"]:  # a credential that another user sealed for this one is not used
        assert credential.startswith("MUNGE:")
        code = "import sys; from tf4slurm.control import credentials; credentials.open_from_this_user(sys.argv[1])"
        refused = lab.on(lab.nodes[1], sys.executable, "-c", code, credential, check=False)
        assert "was not sealed by this user for this user" in refused.stderr
    step.end()


def test_credentials_are_in_a_private_file_without_munge(tmp_path: Path, lab: SlurmLab) -> None:
    step = Step(tmp_path, lab, "env", "PATH=/nowhere")
    try:
        control = step.wait_until_training()
        assert set(control) == {"addresses", "credentials"}
        assert set(control["credentials"]) == {"certificate", "token"}
        assert (step.job.run_directory / "control.json").stat().st_mode & 0o777 == 0o600
        assert step.job.run_directory.stat().st_mode & 0o777 == 0o700
        step.end()
    finally:
        step.close()


@pytest.mark.long
def test_task_on_a_host_without_munge_reports_it(tmp_path: Path, lab: SlurmLab) -> None:
    script = tmp_path / "task.sh"
    script.write_text('#!/bin/sh\n[ "$SLURM_PROCID" != 2 ] || PATH=/nowhere\nexec "$@"\n')
    script.chmod(0o755)
    step = Step(tmp_path, lab, str(script))
    try:
        output = tmp_path / "output"
        assert wait_until(lambda: "which must run on every host of the job or on none" in output.read_text(), 60)
        assert "'unmunge' does not work on r1-n9: FileNotFoundError" in output.read_text()
    finally:
        step.close()
