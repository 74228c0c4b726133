"""The options of sbatch that are set, and those that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.submissions import job_of
from tf4slurm.errors import OptionError
from tf4slurm.spec.batch_spec import BatchSpec, own_program
from tf4slurm.submission.batch_script import make_sbatch_options, make_script

TRAIN = ("--", "python", "train.py")


def sbatch_options_of(*arguments: str) -> dict[str, str]:
    (options,) = make_sbatch_options(job_of(*arguments, *TRAIN))
    return options


@pytest.mark.parametrize(
    ("arguments", "ntasks"),
    [
        (("--workers", "2"), "4"),
        (("-N", "2", "--workers", "3"), "5"),
        (("-n", "4"), "4"),
        (("-N", "2", "--ntasks-per-node", "3"), "6"),
        (("--sbatch", "n=5"), "5"),
        (("--single",), "1"),
    ],
)
def test_number_of_tasks_follows_from_roles_or_ntasks(arguments: tuple[str, ...], ntasks: str) -> None:
    assert sbatch_options_of(*arguments)["ntasks"] == ntasks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-N", "2", "--workers", "3"), {"ntasks-per-node": "3", "gpus-per-node": "3"}),
        (("-N", "3", "--workers", "1"), {"ntasks-per-node": "1", "gpus-per-node": "1"}),
        (("-N", "2", "-n", "8", "--ntasks-per-node", "4"), {"ntasks-per-node": "4", "gpus-per-node": "4"}),
        (("-N", "1", "--workers", "2", "--gpu-flag", "gres", "--gpu-type", "a100"), {"gres": "gpu:a100:2"}),
        (("--single",), {"gpus-per-node": "1"}),
        (("--workers", "2", "--gres", "gpu:7"), {"gres": "gpu:7"}),
    ],
)
def test_gpus_per_worker_requests_gpus_of_each_node(arguments: tuple[str, ...], expected: dict[str, str]) -> None:
    options = sbatch_options_of("--gpus-per-worker", "1", *arguments)
    assert expected.items() <= options.items()
    assert len({"gres", "gpus-per-node"} & set(options)) == 1


def test_het_gives_ps_a_component_without_gpus() -> None:
    ps, others = make_sbatch_options(
        job_of(
            *("--het", "-N2", "-w", "g[1-2]", "--ps", "2", "--workers", "3", "--gres", "gpu:2", "-c", "8"),
            *("--mem", "9G", "--ps-sbatch", "mem-per-cpu=1G", "--ps-sbatch", "partition=cpu", *TRAIN),
        )
    )
    assert (ps["ntasks"], others["ntasks"]) == ("2", "4")
    assert not {"gres", "nodes", "nodelist", "mem"} & set(ps)
    assert (ps["mem-per-cpu"], ps["partition"], ps["cpus-per-task"]) == ("1G", "cpu", "8")
    assert (others["mem"], others["gres"], others["cpus-per-task"]) == ("9G", "gpu:2", "8")


def test_het_sets_cpus_of_each_component() -> None:
    """Slurm gives the batch script the CPUs of the first component in the variable that srun reads."""
    ps, others = make_sbatch_options(job_of("--het", "--workers", "1", "--ps-sbatch", "cpus-per-task=4", *TRAIN))
    assert (ps["cpus-per-task"], others["cpus-per-task"]) == ("4", "1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--signal", "USR1@60"), {"signal": "B:USR1@60"}),
        (("--signal", "B:10@60"), {"signal": "B:10@60"}),
        (("--signal", "R:USR2"), {"signal": "RB:USR2"}),
        (("--requeue", "2"), {"signal": "B:USR1@120", "requeue": ""}),
        (("--requeue", "2", "--signal", "USR2@9"), {"signal": "B:USR2@9", "requeue": ""}),
        (("--after", "7", "--after", "8_2"), {"dependency": "afterok:7:8_2"}),
        (("--sbatch", "p=gpu", "--sbatch", "--overcommit"), {"partition": "gpu", "overcommit": ""}),
        (("--sbatch", "comment=a=b"), {"comment": "a=b"}),
    ],
)
def test_options_of_sbatch_are_derived(arguments: tuple[str, ...], expected: dict[str, str]) -> None:
    assert expected.items() <= sbatch_options_of("--workers", "1", *arguments).items()


@pytest.mark.parametrize(
    ("limit", "is_refused"),
    [
        *(("1", True), ("3", True), ("4", False), ("3:00", True), ("3:01", False), ("0:03:00", True)),
        *(("0:03:01", False), ("0-0", True), ("0-1", False), ("1-00", False), ("0-0:03", True), ("0-0:02:59", True)),
        *(("UNLIMITED", False), ("", False)),
    ],
)
def test_requeue_with_signal_at_start_of_job_is_refused(limit: str, is_refused: bool) -> None:
    """The default signal is 120 s before the limit, and Slurm may send it 60 s earlier."""
    arguments = ("--workers", "1", "--requeue", "2", "-t", limit)
    if is_refused:
        with pytest.raises(OptionError, match="have to stop as soon as it starts"):
            sbatch_options_of(*arguments)
    else:
        assert sbatch_options_of(*arguments)["signal"] == "B:USR1@120"


def test_single_leaves_signal_unchanged() -> None:
    assert sbatch_options_of("--single", "--signal", "USR1@60")["signal"] == "USR1@60"


def test_no_sbatch_removes_option_by_name_or_letter() -> None:
    options = sbatch_options_of(
        "--workers", "1", "-p", "gpu", "-t", "5", "--exclusive", "--no-sbatch", "p", "--no-sbatch", "--time"
    )
    assert "exclusive" in options
    assert not {"partition", "time"} & set(options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mem", "1G", "--mem-per-cpu", "2G"), "--mem 1G and --mem-per-cpu 2G exclude each other"),
        (("--mem", "1G", "--sbatch", "mem-per-gpu=2G"), "--mem 1G and --mem-per-gpu 2G exclude each other"),
        (("--after", "train"), "--after 'train' is not the id of a job"),
        (("--signal", "USR1 at 60"), "'USR1 at 60' is not a signal"),
        (("--sbatch", "Q=1"), "'Q' is not a long option"),
        (("--sbatch", "comment=a\n#SBATCH --nodes=9"), "line break"),
        (("--name", "a\ntouch b"), "line break"),
        (("--het", "--name", "a\rb"), "line break"),
        (("-N", "1", "--gpus-per-worker", "1", "--gpu-type", "a\nrm -rf /"), "line break"),
        (("--env", "PATH"), "--env 'PATH': expected NAME=VALUE"),
        (("--env", "1=2"), "--env '1=2': expected NAME=VALUE with the name of a variable"),
        (("--gpus-per-worker", "1"), "Give that with -N"),
        (("--name", "a/b"), "has a slash"),
        (("--het", "--array", "0-1"), "no arrays of heterogeneous jobs"),
        (("--het", "--ps", "0"), "at least one ps and one other task"),
        (("--het", "--placement", "spread"), "gives the first 1 ranks to the ps"),
        (("--het", "--placement", "worker,ps,chief"), "gives the first 1 ranks to the ps"),
    ],
)
def test_invalid_options_of_sbatch_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        make_script(job_of("--workers", "1", *arguments, *TRAIN))
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "The number of workers is unknown."),
        (("--workers", "1", "--ps-sbatch", "mem=1G"), "Give --het too"),
        (("--single", "--workers", "2"), "--single and --workers 2 exclude each other"),
        (("--single", "--name", "a/b"), "has a slash"),
        (("--single", "--no-chief"), "--single and --no-chief exclude each other"),
        (("--single", "--ps", "1"), "--single and --ps 1 exclude each other"),  # 1 is the default
        (("--chief", "--single"), "--single and --chief exclude each other"),
        (("--workers", "1", "--sbatch", "=3"), "expected NAME=VALUE"),
    ],
)
def test_contradicting_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        job_of(*arguments, *TRAIN)
    assert words in str(refused.value)


def test_single_with_more_tasks_or_requeue_is_refused() -> None:
    for arguments, option in ((("-n", "2"), "ntasks"), (("--requeue", "1"), "single")):
        with pytest.raises(OptionError) as refused:
            make_script(job_of("--single", *arguments, *TRAIN))
        assert refused.value.option == option


@pytest.mark.parametrize(
    ("lines", "array", "words"),
    [
        ("# of a sweep\na 'b", "0", "line 2"),
        ("", "0", "has no line"),
        ("\n  # only a comment\n", "0", "has no line"),
        ("a\n\n", "0-1", "an element 1"),
        ("a\nb\n", "0-2", "an element 2"),
        ("a\nb\n", "0,5-7:2", "an element 7"),
        ("a\n", "x", "not numbers and ranges"),
    ],
)
def test_array_args_that_do_not_fit_array_are_refused(lines: str, array: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(lines)
    with pytest.raises(OptionError, match=words):
        job_of("--workers", "1", "--array-args", str(tmp_path / "lines"), "--array", array, *TRAIN)


def test_array_args_are_read_from_standard_input() -> None:
    options = ("--site", "none", "--workers", "1", "--array-args", "-")
    command = (sys.executable, "-m", "tf4slurm", "script", *options, *TRAIN)
    done = subprocess.run(command, input="--rate 1\n--rate 2\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --array=0-1" in done.stdout


def test_array_args_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"\xff.txt\n")
    spec = job_of("--workers", "1", "--array-args", str(tmp_path / "lines"), *TRAIN)
    assert spec.array_lines == (("\udcff.txt",),)


def test_array_defaults_to_the_lines_of_array_args(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\nb\nc")
    assert sbatch_options_of("--workers", "1", "--array-args", str(tmp_path / "lines"))["array"] == "0-2"


def test_blank_lines_and_comments_of_array_args_are_no_elements(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("# rate\n--rate 0.1\n\n   # slow\n \t\n--name run#3 '#1'\n")
    spec = job_of("--workers", "1", "--array-args", str(tmp_path / "lines"), *TRAIN)
    assert spec.array_lines == (("--rate", "0.1"), ("--name", "run#3", "#1"))


def test_job_runs_the_submitting_tf4slurm_unless_it_sets_up_an_environment() -> None:
    command = ("python", "train.py")
    assert BatchSpec(command, workers=1).tf4slurm == own_program()
    assert Path(own_program()[0]).is_absolute()
    assert BatchSpec(command, workers=1, module=("python",)).tf4slurm == ("python", "-m", "tf4slurm")
    spec = BatchSpec(command, workers=1, module=("cuda",), python="/opt/python")
    assert spec.tf4slurm == ("/opt/python", "-m", "tf4slurm")


def test_script_of_python_program_has_a_note() -> None:
    script = make_script(BatchSpec(("python", "train.py"), workers=2, nodes=2, program=("tf4slurm",)))
    assert "from Python" in script.splitlines()[1]
    assert "exec tf4slurm run --site none --workers 2 " in script
