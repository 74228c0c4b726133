"""Batch scripts: compared whole with files in tests/data/scripts, and run by a real bash."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given as given_any
from hypothesis import strategies as st

from tests.processes import read_process, wait_until
from tests.submissions import job_of
from tf4slurm.cli.options import given, job_options
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.options import options_of
from tf4slurm.spec.points import format_labels
from tf4slurm.submission.batch_script import make_script, quote

GOLDEN = Path(__file__).parent.parent / "data" / "scripts"
TRAIN = ("--", "python", "train.py")
ARGUMENTS = str(GOLDEN / "arguments.txt")

SCRIPTS = {
    "plain": ("-N", "4", "--workers", "2", "-t", "1:00:00", *TRAIN),
    "single": ("--single", "--gpus-per-node", "1", "--module", "python/3.10", *TRAIN),
    "single-srun": ("--single", "--srun", "cpu-bind=cores", "--srun", "container=/images/tf.oci", *TRAIN),
    "het": (
        *("--het", "-N", "2", "--workers", "3", "--gpus-per-worker", "2", "-p", "gpu", "-c", "8", "--mem", "64G"),
        *("--ps-sbatch", "partition=cpu", "--ps-sbatch", "mem-per-cpu=2G", "--gpu-flag", "gres", "--gpu-type", "a100"),
        *TRAIN,
    ),
    "array": ("--workers", "1", "--array-args", ARGUMENTS, "--array", "0-2%2", *TRAIN),
    "grid": (
        *("--workers", "1", "--grid", "lr=0.1,0.01", "--grid", 'words="a,b",it\'s two', "--at-most", "2"),
        *("--label", "kind=test", *TRAIN, "--rate={lr}", "--ps={ps_hosts}"),
    ),
    "grid-single": ("--single", "--grid", "units=32,64", "--array", "1", "--srun", "label", *TRAIN),
    "requeue": ("-n", "4", "--requeue", "5", "--epilogue", "rm -rf /scratch/$USER", *TRAIN),
    "environment": (
        *("-n", "3", "--module", "cesga/system", "--module", "tensorflow/2.11.0", "--load-env", "ulimit -n 4096"),
        *("--venv", "/home/my tf", "--conda", "tf", "--env", "OMP_NUM_THREADS=4", "--env", "WORDS=it's two words"),
        *("--prologue", "nvidia-smi", *TRAIN),
    ),
    "everything": (
        *shlex.split("-J digits -N2 -n 5 --ntasks-per-node 3 -c 4 -p short -A me -q short"),
        *("-t", "2-00:00:00", "-C", "a100&ib", "-w", "c206-[3-4]", "-x", "c206-9", "--mem-per-cpu", "3G"),
        *("--gres", "gpu:a100:2", "--exclusive", "--reservation", "course", "-o", "logs/%x-%j.out", "--after", "12"),
        *("--after", "13_4", "--dependency", "singleton", "--mail-type", "END,FAIL", "--mail-user", "me@example.org"),
        *("--signal", "USR2@300", "--sbatch", "--nice=100", "--sbatch", "comment=it's two", "--sbatch", "chdir=/work"),
        *("--no-sbatch", "qos", "--srun", "cpu-bind=cores", "--srun", "label", "--ps", "2", "--evaluators", "1"),
        *("--no-chief", "--placement", "spread", "--gpus-per-worker", "1", "--runs-directory", "/scratch/my runs"),
        *("--interface", "ib*", "--ports", "40000-40009,40020", "--control-port", "40500"),
        *("--start-timeout", "60", "--heartbeat-timeout", "5.5"),
        *("--heartbeat-interval", "0.25", "--max-worker-restarts", "0", "--max-attempts", "3", "--grace-period", "0"),
        *shlex.split("--stop-signal SIGUSR1 --finish-timeout 10 --stall-timeout 600 --require-servers"),
        *("--python", "/opt/py/bin/python"),
        *("--", "python", "my train.py", "--words", 'it\'s "two"', "$HOME", "*", "", "two\nlines", "--", "\r\n"),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_equals_recorded_file(name: str) -> None:
    script = make_script(job_of(*SCRIPTS[name]))
    assert script.replace(str(GOLDEN), "/data") == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_file_is_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A tf4slurm that only writes its arguments to a file, each followed by NUL."""
    program = tmp_path / "bin" / "tf4slurm"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" >{tmp_path}/arguments\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def run_script(script: str, directory: Path, **variables: str) -> list[str]:
    """Run a script as Slurm would; return the arguments of its tf4slurm."""
    environ = {**os.environ, "SLURM_JOB_ID": "7", **variables}
    done = subprocess.run(["bash"], input=script, text=True, cwd=directory, env=environ, timeout=120)
    assert done.returncode == 0
    return (directory / "arguments").read_bytes().decode().split("\0")[:-1]


def spec_from(arguments: list[str]) -> JobSpec:
    """Return the job that `tf4slurm run` makes of its arguments."""
    specs: list[JobSpec] = []

    @click.command()
    @click.option("--site")
    @job_options("run")
    def run(site: str, **options: Any) -> None:
        assert site == "none"
        specs.append(JobSpec(**given(options)))

    assert arguments[0] == "run"
    CliRunner().invoke(run, arguments[1:], catch_exceptions=False, standalone_mode=False)
    return specs[0]


def as_run(spec: BatchSpec) -> JobSpec:
    """Return the part of a job that `tf4slurm run` reads."""
    return JobSpec(spec.command, **{name: getattr(spec, name) for name in options_of(JobSpec)})


RUN_ARGUMENTS = {
    "plain": ["--workers", "2", "--name", "train", *TRAIN],
    "requeue": ["--workers", "2", "--name", "train", "--requeue", "5", *TRAIN],
    "array": ["--workers", "1", "--name", "train", "--label", "arguments=--rate 0.1", *TRAIN, "--rate", "0.1"],
    "grid": [
        *("--workers", "1", "--name", "train", "--label", "kind=test", "--label", "lr=0.1", "--label", "words=a,b"),
        *(*TRAIN, "--rate=0.1", "--ps={ps_hosts}", "--words=a,b"),
    ],
    "everything": [
        *["--ps", "2", "--workers", "2", "--evaluators", "1", "--no-chief", "--placement", "spread"],
        *["--gpus-per-worker", "1", "--name", "digits", "--runs-directory", "/scratch/my runs", "--interface", "ib*"],
        *["--ports", "40000-40009,40020", "--control-port", "40500", "--start-timeout", "60"],
        *["--heartbeat-timeout", "5.5", "--heartbeat-interval", "0.25", "--max-worker-restarts", "0"],
        *["--max-attempts", "3", "--grace-period", "0", "--stop-signal", "SIGUSR1", "--finish-timeout", "10"],
        *["--stall-timeout", "600", "--require-servers", "--srun", "cpu-bind=cores", "--srun", "label"],
        *["--", "python", "my train.py", "--words", 'it\'s "two"', "$HOME", "*", "", "two\nlines", "--", "\r\n"],
    ],
}
"""The arguments of `tf4slurm run --site none` in the scripts of these names, for the first element of an array."""


@pytest.mark.parametrize("name", RUN_ARGUMENTS)
def test_run_in_job_gets_the_submitted_spec(name: str, tmp_path: Path, recorder: Path) -> None:
    words = [word for word in SCRIPTS[name] if word not in ("--python", "/opt/py/bin/python")]
    spec = job_of(*words, program=recorder)
    arguments = run_script(make_script(spec), tmp_path, SLURM_ARRAY_TASK_ID="0")
    assert arguments == ["run", "--site", "none", *RUN_ARGUMENTS[name]]
    labels = tuple(format_labels(spec.elements[0].labels)) if spec.elements else ()
    assert spec_from(arguments) == replace(as_run(spec), command=spec.commands[0], label=labels)


def test_array_element_has_arguments_of_its_line(tmp_path: Path, recorder: Path) -> None:
    script = make_script(job_of(*SCRIPTS["array"], program=recorder))
    for element, expected in (("0", ["--rate", "0.1"]), ("1", ["--words", "two words"]), ("2", ["--plain"])):
        assert run_script(script, tmp_path, SLURM_ARRAY_TASK_ID=element)[-2 - len(expected) :] == [
            *TRAIN[1:],
            *expected,
        ]
    beyond = subprocess.run(
        ["bash"], input=script, text=True, env={**os.environ, "SLURM_ARRAY_TASK_ID": "3"}, capture_output=True
    )
    assert beyond.returncode == 2
    assert "element 3" in beyond.stderr


HOSTILE = (
    *("", " ", "two words", "'", '"', 'it\'s "two"', "$HOME", "`id`", "$(id)", "\\", "\\x0a", "*", "~", "[0]=x", "a=b"),
    *(
        "#",
        "{lr}",
        "{other}",
        "{ps_host}",
        "two\nlines",
        "\r\n",
        "\x01f",
        ";;",
        ")",
        "(",
        "-n",
        "%s",
        "é",
        "\udcff\udce9",
    ),
)
"""Values that bash or sbatch could change."""


@pytest.mark.parametrize("is_single", [False, True], ids=["run", "single"])
def test_hostile_values_of_points_survive_bash(tmp_path: Path, is_single: bool) -> None:
    program = tmp_path / "print"
    program.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)
    command = (str(program), "--lr", "{lr}", "x{lr}{lr}y", "{other")
    points = tuple({"lr": value, "name-2": f"{value}2"} for value in HOSTILE)
    workers = None if is_single else 1
    script = make_script(BatchSpec(command, points=points, program=command[:1], workers=workers, single=is_single))
    for index, value in enumerate(HOSTILE):
        done = subprocess.run(
            ["bash"],
            input=script.encode("utf-8", "surrogateescape"),
            capture_output=True,
            env={"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(index)},
            check=True,
        )
        arguments = ["--lr", value, f"x{value}{value}y", "{other", f"--name-2={value}2"]
        labels = ["--label", f"lr={value}", "--label", f"name-2={value}2"]
        start = ["run", "--site", "none", "--workers", "1", "--name", "print", *labels, "--", str(program)]
        expected = arguments if is_single else [*start, *arguments]
        assert os.fsdecode(done.stdout).split("\0")[:-1] == expected


@given_any(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_quoted_words_survive_bash(words: list[str]) -> None:
    line = quote(words)
    assert "\n" not in line
    assert "\r" not in line
    output = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line or '/dev/null'}"], capture_output=True, check=True
    ).stdout
    assert output.decode().split("\0")[:-1] == (words or ["/dev/null"])


def test_words_that_are_not_utf8_survive_bash(tmp_path: Path) -> None:
    word = os.fsdecode(b"train-\xff\xe9.py")
    spec = job_of("--single", "--", "printf", "%s", word)
    script = make_script(spec).encode("utf-8", "surrogateescape")
    done = subprocess.run(["bash"], input=script, capture_output=True, env={"PATH": os.environ["PATH"]})
    assert done.stdout == b"train-\xff\xe9.py"


def test_header_has_the_command_that_made_the_script() -> None:
    arguments = ("--workers", "1", "--dry-run", "--", "python", "a b.py", "--dry-run", "two\n#SBATCH --nodes=9")
    spec = job_of(*(word for word in arguments[:2]), *arguments[3:])
    header = make_script(spec).splitlines()[2]
    assert header == r"#   tf4slurm submit --workers 1 -- python 'a b.py' --dry-run $'two\x0a#SBATCH --nodes=9'"


def catches(process_id: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    mask = re.search(r"^SigCgt:\s*(\w+)$", read_process(process_id, "status").decode(), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def test_script_with_epilogue_keeps_exit_code_and_forwards_signals(tmp_path: Path) -> None:
    program = tmp_path / "tf4slurm"
    program.write_text(
        f'#!/bin/bash\nfor name in INT USR1 ALRM XCPU; do trap "echo $name >>{tmp_path}/signals" $name; done\n'
        f"trap 'exit 9' TERM\ntouch {tmp_path}/up\nfor _ in $(seq 6000); do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    epilogue = f"bash -c 'kill -TERM $$; echo after >>{tmp_path}/signals'"
    script = make_script(job_of("--workers", "1", "--epilogue", epilogue, *TRAIN, program=program))
    bash = subprocess.Popen(["bash", "-c", script], cwd=tmp_path)
    try:
        assert wait_until((tmp_path / "up").exists, 60)
        assert wait_until(lambda: catches(bash.pid, signal.SIGXCPU), 60)  # the last trap of the script
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM, signal.SIGXCPU):
            bash.send_signal(number)
            name = number.name.removeprefix("SIG")
            assert wait_until(lambda name=name: name in words_of(tmp_path / "signals"), 60)  # type: ignore[misc]
        bash.send_signal(signal.SIGTERM)
        assert bash.wait(60) == 9
    finally:
        bash.kill()
        bash.wait()
    assert words_of(tmp_path / "signals") == ["INT", "USR1", "ALRM", "XCPU", "after"]


def words_of(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_failed_environment_ends_job_before_its_command(tmp_path: Path) -> None:
    script = make_script(job_of("--single", "--venv", str(tmp_path / "none"), "--", "touch", str(tmp_path / "ran")))
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True)
    assert done.returncode == 3
    assert not (tmp_path / "ran").exists()


def test_modules_are_loaded_in_order_by_exported_function(tmp_path: Path) -> None:
    """Sites export `module` as a bash function, and sbatch passes the environment on."""
    script = make_script(job_of("--single", "--module", "a/1", "--module", "b", "--", "touch", str(tmp_path / "ran")))
    for function, returncode, loaded in (
        ('echo "$@" >>loaded', 0, "load a/1\nload b\n"),
        ('echo "$@" >>loaded; [ "$2" != a/1 ]', 3, "load a/1\n"),
    ):
        environ = {**os.environ, "BASH_FUNC_module%%": f"() {{ {function}; }}"}
        done = subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=environ)
        assert done.returncode == returncode
        assert (tmp_path / "loaded").read_text() == loaded
        assert (tmp_path / "ran").exists() == (returncode == 0)
        (tmp_path / "loaded").unlink()
        (tmp_path / "ran").unlink(missing_ok=True)


@given_any(
    st.builds(
        BatchSpec,
        program=st.just(("tf4slurm",)),
        gres=st.just("gpu:1"),
        command=st.just(("python", "train.py")),
        ps=st.integers(0, 9),
        workers=st.integers(1, 9),
        chief=st.booleans(),
        evaluators=st.integers(0, 1),
        data_workers=st.integers(0, 2),
        name=st.from_regex(r"[\w.]+", fullmatch=True),
        runs_directory=st.just(Path("my runs")),
        start_timeout_seconds=st.floats(1, 1e9),
        heartbeat_timeout_seconds=st.floats(2, 1e6),
        heartbeat_interval_seconds=st.floats(0.001, 1.5),
        stall_timeout_seconds=st.none() | st.floats(0.1, 1e6),
        max_attempts=st.integers(1, 99),
        interface=st.none() | st.sampled_from(["ib0", "10.0.0.0/8", "{host}-ib0"]),
        gpus_per_worker=st.none() | st.integers(1, 8),
        placement=st.sampled_from(["pack", "spread"]),
    )
)
def test_last_line_makes_the_same_job(spec: BatchSpec) -> None:
    last = make_script(spec).splitlines()[-1]
    assert spec_from(shlex.split(last)[2:]) == as_run(spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 3}, "--workers 3 --name train"),
        ({"workers": 1, "ps": 0, "chief": False}, "--ps 0 --workers 1 --no-chief --name train"),
        (
            {
                **{"ps": 2, "workers": 4, "evaluators": 1, "data_workers": 2, "placement": "spread"},
                **{"gpus_per_worker": 2, "gres": "gpu:2"},
            },
            "--ps 2 --workers 4 --evaluators 1 --data-workers 2 --placement spread --gpus-per-worker 2 --name train",
        ),
        (
            {"workers": 1, "name": "a.b", "runs_directory": Path("my runs"), "interface": "{host}-ib0"},
            "--workers 1 --name a.b --runs-directory 'my runs' --interface '{host}-ib0'",
        ),
        (
            {"workers": 1, "start_timeout_seconds": 90.5, "heartbeat_timeout_seconds": 20.0},
            "--workers 1 --name train --start-timeout 90.5 --heartbeat-timeout 20",
        ),
        (
            {
                **{"workers": 1, "heartbeat_interval_seconds": 0.001, "max_attempts": 2},
                **{"grace_period_seconds": 0.0, "stall_timeout_seconds": 1e6},
            },
            "--workers 1 --name train --heartbeat-interval 0.001 --max-attempts 2 --grace-period 0 "
            "--stall-timeout 1000000",
        ),
    ],
)
def test_last_line_has_the_options_that_are_not_at_their_default(options: dict[str, Any], words: str) -> None:
    spec = BatchSpec(program=("tf4slurm",), command=("python", "train.py"), **options)
    last = make_script(spec).splitlines()[-1]
    assert last == f"exec tf4slurm run --site none {words} -- python train.py"


def test_requeued_job_writes_new_output_file(tmp_path: Path) -> None:
    script = make_script(job_of("--single", "--", "echo", "hello"))
    for count in ("1", "2"):
        environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": count}
        assert subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=environ).returncode == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "slurm-7.1.out": "hello\n",
        "slurm-7.2.out": "hello\n",
    }
