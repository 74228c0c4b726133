"""The checks of command and ports before a start, against real files."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from tf4slurm.errors import CommandError, PlacementError, PortsInUseError
from tf4slurm.launch.checks import check_command, check_program_source, warn_of_resolver
from tf4slurm.launch.start import check_free_ports, check_ports
from tf4slurm.network.ports import format_ranges, hold_port
from tf4slurm.spec.job_spec import JobSpec


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of each test, with a script, a program and a file that is no program."""
    for name, mode in (("train.py", 0o644), ("program", 0o755), ("container", 0o755), ("data.txt", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    for interpreter in ("python3.11", "shifter", "python-wrapper", "bash"):
        (tmp_path / interpreter).write_text("#!/bin/sh\n")
        (tmp_path / interpreter).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("ports", "tasks", "control_port"),
    [
        ((), 1, None),
        ((), 100, None),
        ((4000,), 1, 5000),
        (range(4000, 4005), 4, None),
        (range(4000, 4006), 4, None),
        (range(4000, 4004), 4, 5000),
        (range(4000, 4005), 4, 4002),
    ],
)
def test_enough_ports_for_tasks_and_control_service_are_accepted(
    ports: tuple[int, ...], tasks: int, control_port: int | None
) -> None:
    check_ports(ports, tasks, control_port)


@pytest.mark.parametrize(("tasks", "control_port", "needed"), [(2, None, 3), (3, 0, 3)])
def test_message_has_the_numbers_of_needed_and_free_ports(tasks: int, control_port: int | None, needed: int) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(hold_port())) for _ in range(5)]
        ports = sorted(each.port for each in held)
        for each in held[:2]:
            each.close()
        with pytest.raises(PortsInUseError) as caught:
            check_free_ports(ports, tasks, control_port)
        check_free_ports(ports, 1, None)
        check_free_ports(ports[:0], 9, None)
    end = ": one for each of 2 tasks and one for the control service." if control_port is None else " of 3 tasks."
    assert f"Only 2 of the 5 ports {format_ranges(ports)} are free on this host, but the job" in str(caught.value)
    assert f"the job needs {needed}" in str(caught.value)
    assert end in str(caught.value)


@pytest.mark.parametrize(("control_port", "requested"), [(None, 5), (4001, 5), (5000, 4)])
def test_too_few_ports_are_refused_with_the_required_number(control_port: int | None, requested: int) -> None:
    with pytest.raises(PlacementError) as caught:
        check_ports(range(4000, 4003), 4, control_port)
    assert str(caught.value) == (
        "3 ports (4000-4002) are too few for 4 tasks on one host and the control service. "
        f"Give --ports a range of at least {requested}."
    )


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "train.py"),
        ("./program",),
        ("./program", "no-such-argument"),
        ("sh", "train.py", "--steps", "3"),
        ("sh", "-c", "exit 0"),
        ("./bash", "-lc", "python train.py"),
        ("./bash", "-xec", "python train.py"),
        ("./bash", "-o", "pipefail", "train.py"),
        ("./python3.11", "train.py"),
        ("./python3.11", "-u", "train.py"),
        ("./python3.11", "-m", "trainer.main"),
        ("./python3.11", "-um", "trainer.main"),
        ("./python3.11", "-c", "print(1)"),
        ("./python3.11", "-V"),
        ("sh", "-", "train.py"),
        ("sh", "+x", "--", "train.py"),
        ("./python3.11", "-W", "ignore", "train.py"),
        ("./python3.11", "-X", "dev", "train.py"),
        ("./python3.11", "-O", "train.py", "data"),
        ("./python3.11", "-s", "train.py", "data"),
        ("./python3.11", "-Wignore", "-Xdev", "train.py"),
        ("./shifter", "--image=tf", "python", "train.py"),
        ("./python-wrapper", "some", "thing"),
    ],
    ids=" ".join,
)
def test_existing_command_is_accepted(command: tuple[str, ...]) -> None:
    check_program_source(command)
    check_command(JobSpec(command))


@pytest.mark.parametrize(
    "command",
    [
        ("python",),
        ("/opt/python3.12", "-"),
        ("pypy3", "-", "--steps", "3"),
        ("python", "-u", "-W", "ignore"),
        ("python", "-Wignore", "-Xdev", "-"),
        ("python3", "--check-hash-based-pycs", "never"),
        ("python3", "--"),
        ("bash",),
        ("bash", "-x", "-"),
        ("bash", "-s", "argument"),
        ("bash", "-ls"),
        ("bash", "-eo", "pipefail"),
        ("bash", "--rcfile", "file"),
        ("zsh", "+x"),
    ],
    ids=" ".join,
)
def test_program_on_standard_input_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match="reads its program from standard input, which is empty") as caught:
        check_program_source(command)
    assert caught.value.command == command


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("no-such-program",), "The program 'no-such-program' does not exist. Check its name, or the environment"),
        (("./no/such",), "The program './no/such' does not exist. "),
        (("",), "The program '' does not exist. "),
        (("./train.py",), "The program './train.py' is not executable. Start it with its interpreter, such as "),
        (("./data.txt", "train.py"), "The program './data.txt' is not executable. "),
        (("sh", "no-such.sh"), "The script 'no-such.sh' does not exist in "),
        (("./python3.11", "-u", "no-such.py"), "The script 'no-such.py' does not exist in "),
        (("./python3.11", "-X", "dev", "no-such.py"), "The script 'no-such.py' does not exist in "),
        (("./bash", "-e", "no-such.sh"), "The script 'no-such.sh' does not exist in "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_missing_command_is_refused_with_a_reason(command: tuple[str, ...], words: str) -> None:
    with pytest.raises(CommandError) as caught:
        check_command(JobSpec(command))
    assert str(caught.value).startswith(words)
    assert caught.value.command == command
    if "in " in words:
        assert os.getcwd() in str(caught.value)


@pytest.mark.parametrize(
    ("code", "is_warned"),
    [
        ("resolver = tf.distribute.cluster_resolver.SlurmClusterResolver({'ps': 1})", True),
        ("from tensorflow.distribute.cluster_resolver import TPUClusterResolver, SlurmClusterResolver", True),
        ("from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import SlurmClusterResolver", True),
        ("from tf4slurm import SlurmClusterResolver\nresolver = SlurmClusterResolver()", False),
        ("resolver = tf4slurm.tensorflow.SlurmClusterResolver()", False),
        ("resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()", False),
        ("# not tf.distribute.cluster_resolver.SlurmClusterResolver()", False),
    ],
)
def test_resolver_of_tensorflow_is_a_warning(
    directory: Path, code: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "train.py").write_text(f"import tensorflow as tf\n{code}\n")
    warn_of_resolver(("python", "train.py", "no-such-file.py"))
    words = "train.py: TensorFlow's own SlurmClusterResolver does not use the cluster"
    assert [message[: len(words)] for message in caplog.messages] == [words] * is_warned


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_directory_that_a_container_cannot_have_is_refused(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / name).mkdir()
    with pytest.raises(CommandError, match=f"directory '.*/{name}/runs/true'"):
        check_command(JobSpec(("true",), container=f"{directory}/container", runs_directory=Path(name, "runs")))
    monkeypatch.chdir(directory / name)
    with pytest.raises(CommandError, match=f"directory '.*/{name}'"):
        check_command(JobSpec(("true",), container="docker://image", runs_directory=Path("/runs")))
    monkeypatch.chdir(directory)
    with pytest.raises(CommandError, match=f"directory '/runs/{name}'.*--name"):
        check_command(JobSpec(("true",), container="docker://image", name=name, runs_directory=Path("/runs")))


def test_script_with_the_line_endings_of_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, binary = tmp_path / "train.py", tmp_path / "binary"
    script.write_bytes(b"#!/usr/bin/env python3\r\nprint(1)\r\n")
    binary.write_bytes(b"\x7fELF\r\n")
    for path in (script, binary):
        path.chmod(0o755)
    with pytest.raises(CommandError, match=r"line endings of Windows \(CRLF\).*dos2unix \./train\.py"):
        check_command(JobSpec(("./train.py",)))
    check_command(JobSpec(("python3", "train.py")))  # Python reads such lines
    check_command(JobSpec(("./binary",)))
    script.write_bytes(b"#!/usr/bin/env python3\nprint(1)\r\n")
    check_command(JobSpec(("./train.py",)))


def test_command_in_quotes_is_refused_with_the_line_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CommandError, match=r"several words in quotes\. Remove the quotes, .* -- python train\.py '--x 1'"
    ):
        check_command(JobSpec(("python train.py", "--x 1")))
    (tmp_path / "my program").touch(mode=0o755)
    check_command(JobSpec(("./my program",)))
