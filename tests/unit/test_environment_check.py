"""What `submit` and `grow` check of the environment of a batch script, before sbatch. Slurm's programs are fakes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.growing_job import GrowingJob
from tests.processes import wait_until
from tf4slurm import __version__, api
from tf4slurm.errors import OptionError
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.submission import environment_check

OTHER = "__version__ = '0.0.9'"
BROKEN = f"__version__ = {__version__!r}"  # without its modules


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a fake sbatch, and virtual environments whose Pythons find other tf4slurms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "slurm"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(
        "BASH_FUNC_module%%", '() { [ "$2" = known ] || { echo "Unable to locate $2" >&2; return 1; }; }'
    )
    make_program(tmp_path / "slurm" / "sbatch", "touch submitted; echo 4711")
    own = str(Path(environment_check.__file__).parents[2])
    make_venv(tmp_path / "good", f'PYTHONPATH={own} exec {sys.executable} "$@"')
    make_venv(tmp_path / "nothing", f'exec {sys.executable} -I -S "$@"')
    make_venv(tmp_path / "no python", "echo 'bad interpreter' >&2; exit 126")
    make_venv(tmp_path / "noisy", f'echo "{{}} Welcome"; PYTHONPATH={own} exec {sys.executable} "$@"')
    make_venv(tmp_path / "hangs", "sleep 600")
    for name, text in (("old", OTHER), ("broken", BROKEN)):
        make_venv(tmp_path / name, f'PYTHONPATH={tmp_path / name} exec {sys.executable} -S "$@"')
        (tmp_path / name / "tf4slurm").mkdir()
        (tmp_path / name / "tf4slurm" / "__init__.py").write_text(text)
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    return tmp_path


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def make_venv(path: Path, text: str) -> None:
    make_program(path / "bin" / "python", text)
    (path / "bin" / "activate").write_text(f"PATH={str(path / 'bin')!r}:$PATH\n")


Options = dict[str, Any]

REFUSED: dict[str, tuple[Options, str, tuple[str, ...]]] = {
    "no venv": ({"venv": "/no/such"}, "venv", ("'/no/such/bin/activate' does not exist", "--no-check-env")),
    "no module": (
        {"module": ("known", "nope")},
        "module",
        ("--module known --module nope fails on this host", "locate nope"),
    ),
    "no conda": ({"conda": "nope"}, "conda", ("--conda nope fails on this host", "conda")),
    "lines that fail": ({"load_env": "exit 4"}, "load-env", ("--load-env 'exit 4' fails on this host", "code 4")),
    "lines that end": ({"load_env": "exit"}, "load-env", ("--load-env exit ends the batch script",)),
    "no python": ({"venv": "no python"}, "venv", ("'python' after --venv, cannot be run", "bad interpreter", "126")),
    "missing python": ({"python": "/no/python3"}, "python", ("'/no/python3', cannot be run", "No such file")),
    "no tf4slurm": (
        {"venv": "nothing"},
        "venv",
        ("after --venv, cannot import tf4slurm: ModuleNotFoundError", f"-m pip install tf4slurm=={__version__}"),
    ),
    "another version": (
        {"venv": "old"},
        "venv",
        ("after --venv, has tf4slurm 0.0.9 (", f"this is {__version__}", f"-m pip install tf4slurm=={__version__}"),
    ),
    "incomplete": ({"venv": "broken"}, "venv", ("cannot import tf4slurm: ModuleNotFoundError",)),
}
SUBMITTED: dict[str, Options] = {
    "venv": {"venv": "good"},
    "relative with a slash": {"venv": "./good/"},
    "module": {"module": ("known",), "python": sys.executable},
    "a Python that prints": {"venv": "noisy"},
    "variable of the Python": {"load_env": "true", "python": sys.executable, "env": ("A=b c",)},
    "nothing to check": {},
    "skipped": {"venv": "/no/such", "check_env": False},
    "prologue may change it": {"venv": "old", "prologue": "PATH=x"},
    "single needs no tf4slurm": {"venv": "nothing", "single": True},
}


def spec_of(options: Options) -> BatchSpec:
    roles: Options = {} if options.get("single") else {"workers": 1}
    return BatchSpec(command=("true",), **roles, **options)


@pytest.mark.parametrize("case", REFUSED)
def test_environment_that_does_not_work_is_refused(place: Path, case: str) -> None:
    options, option, words = REFUSED[case]
    for call in (api.submit, api.estimate):
        with pytest.raises(OptionError) as found:
            call(spec_of(options))
        assert found.value.option == option
        for text in words:
            assert text in str(found.value)
    assert not (place / "submitted").exists()
    assert not (place / "runs").exists()


@pytest.mark.parametrize("options", SUBMITTED.values(), ids=SUBMITTED)
def test_job_is_submitted(place: Path, options: Options) -> None:
    assert api.submit(spec_of(options)).job_id == "4711"
    assert (place / "submitted").exists()


def test_prologue_is_not_run_and_its_effect_is_not_known(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    api.submit(spec_of({"venv": "old", "prologue": "touch ran"}))
    assert not (place / "ran").exists()
    assert "unless --prologue changes it: The Python of the job" in caplog.text


def test_check_has_a_time_limit_and_ends_its_processes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_check, "_TIMEOUT_SECONDS", 0.5)
    with pytest.raises(OptionError, match=r"\(--venv\) did not end within 0.5 s on this host\. .*--no-check-env"):
        api.submit(spec_of({"venv": "hangs"}))


def test_check_does_not_wait_for_a_process_in_the_background_and_ends_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_check, "_TIMEOUT_SECONDS", 20)
    options = {"load_env": "sleep 600 & echo $! > background", "python": sys.executable}
    assert api.submit(spec_of(options)).job_id == "4711"
    process_id = int((place / "background").read_text())
    assert wait_until(lambda: not Path(f"/proc/{process_id}").exists() or "\nState:\tZ" in read_status(process_id), 10)


def read_status(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return "\nState:\tZ"


@pytest.mark.parametrize(("venv", "is_refused"), [("../good", False), ("good", True), ("", False)])
def test_relative_venv_is_found_from_the_directory_of_chdir(place: Path, venv: str, is_refused: bool) -> None:
    (place / "sub").mkdir()
    options: Options = {"venv": venv or str(place / "good"), "sbatch": ("chdir=sub",)}
    if is_refused:
        with pytest.raises(OptionError, match=r"'sub/good/bin/activate' does not exist"):
            api.submit(spec_of(options))
    else:
        assert api.submit(spec_of(options)).job_id == "4711"


def test_option_is_not_passed_to_the_job_itself(place: Path) -> None:
    assert "check-env" not in api.script(spec_of({"venv": "good", "check_env": False}))


def test_workers_are_not_added_with_an_environment_that_does_not_work(
    growing_job: GrowingJob, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing_job.fake("sbatch", "cat > script; echo 4712")
    monkeypatch.setenv("PATH", str(growing_job.directory), prepend=os.pathsep)

    def grow(**options: Any) -> str:
        return api.grow(growing_job.known, 1, **options)

    for refused in ({"venv": "/no/such"}, {"venv": "nothing"}):
        with pytest.raises(OptionError):
            grow(**refused)
    assert (growing_job.was_submitted, growing_job.run.has_worker_arrays()) == (False, False)
    assert grow(venv="/no/such", check_env=False) == "4712"
