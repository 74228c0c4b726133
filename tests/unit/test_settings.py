"""Settings as the command line obeys them: `script`, `run`, `config`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tf4slurm import settings as profiles
from tf4slurm.batch_spec import BatchSpec
from tf4slurm.cli.main import cli
from tf4slurm.errors import ProfileError
from tf4slurm.options import options_by_key

TRAIN = ("--workers", "1", "--", "python", "train.py")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project of a user without settings, as the current directory."""
    (tmp_path / "config" / "tf4slurm").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def tf4slurm(home: Path, *arguments: str, **variables: str) -> Result:
    environ = {**os.environ, "XDG_CONFIG_HOME": str(home / "config"), **variables}
    return CliRunner().invoke(cli, arguments, obj=environ)


def directives(result: Result) -> set[str]:
    assert result.exit_code == 0, result.output
    return {line.removeprefix("#SBATCH --") for line in result.stdout.splitlines() if line.startswith("#SBATCH")}


def user_file(home: Path, text: str) -> Path:
    path = home / "config" / "tf4slurm" / "config.toml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_variable_project_user_and_site(home: Path) -> None:
    variables = {"TF4SLURM_PARTITION": "variable"}
    user_file(home, 'partition = "user"\nsite = "cesga-ft3"')
    Path("tf4slurm.toml").write_text('partition = "project"')
    assert "partition=typed" in directives(tf4slurm(home, "script", "-p", "typed", *TRAIN, **variables))
    assert "partition=variable" in directives(tf4slurm(home, "script", *TRAIN, **variables))
    assert "partition=project" in directives(tf4slurm(home, "script", *TRAIN))
    Path("tf4slurm.toml").unlink()
    assert {"partition=user", "mem-per-cpu=3G"} <= directives(tf4slurm(home, "script", *TRAIN))
    assert directives(tf4slurm(home, "script", "--site", "none", *TRAIN, **variables)) == {
        "job-name=train",
        "open-mode=append",
        "ntasks=3",
    }


def test_memory_on_the_command_line_takes_the_place_of_the_sites(home: Path) -> None:
    found = directives(tf4slurm(home, "script", "--site", "cesga-ft3", "--mem", "9G", *TRAIN))
    assert "mem=9G" in found
    assert not any(text.startswith("mem-per-cpu") for text in found)


def test_a_site_can_fix_interface_modules_gpu_flag_and_run_directory(home: Path) -> None:
    user_file(home, 'module = ["a/1", "b"]\nruns-directory = "/scratch"\nps = 2\nchief = false\nexclusive = true')
    result = tf4slurm(home, "script", "--site", "cesga-ft3", "-N", "1", "--gpus-per-worker", "1", *TRAIN)
    assert {"gres=gpu:a100:1", "ntasks=3", "exclusive"} <= directives(result)
    assert "module load a/1 || exit 3\nmodule load b || exit 3\n" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert "--ps 2 --workers 1 --no-chief" in last
    assert "--runs-directory /scratch --interface infiniband --" in last


def test_variables_give_flags_and_lists(home: Path) -> None:
    variables = {"TF4SLURM_MODULE": "a 'b c'", "TF4SLURM_CHIEF": "0", "TF4SLURM_REQUEUE": "3", "TF4SLURM_PS": "2"}
    result = tf4slurm(home, "script", "--workers", "2", "--", "python", "train.py", **variables)
    assert "module load a || exit 3\nmodule load 'b c' || exit 3\n" in result.stdout
    assert "--ps 2 --workers 2 --no-chief" in result.stdout
    assert "--requeue 3" in result.stdout


def test_a_wrong_file_ends_every_verb_that_reads_it_but_its_help(home: Path) -> None:
    path = user_file(home, "partitoin = 'x'")
    for verb in ("script", "submit", "run"):
        assert isinstance(tf4slurm(home, verb, *TRAIN).exception, ProfileError)
        assert tf4slurm(home, verb, "--help").exit_code == 0
    assert isinstance(tf4slurm(home, "config", "show").exception, ProfileError)
    assert str(path) in tf4slurm(home, "config", "path").stdout


def test_a_setting_for_jobs_does_not_keep_run_from_a_laptop(home: Path) -> None:
    typed = tf4slurm(home, "run", "--requeue", "3", *TRAIN)
    assert (typed.exit_code, "--requeue is for jobs of Slurm" in typed.output) == (2, True)
    user_file(home, "requeue = 3\nsrun = ['label']")
    assert "There is no command" in str(tf4slurm(home, "run", "--workers", "1").exception)


def test_no_option_has_the_name_of_a_variable_that_tasks_have() -> None:
    """Else TF4SLURM_TASK, which a child has, would be --task of what it starts."""
    assert not {"attempt", "control", "line", "log", "rank", "secret", "settings", "task"} & set(
        options_by_key(BatchSpec)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ps = 'two'", "sets --ps: 'two' is not an integer."),
        ("heartbeat-interval = -1", "sets --heartbeat-interval: "),
        ("snapshot = 'all'", "sets --snapshot: "),
        ("chief = 'perhaps'", "sets --chief: "),
        ("ports = '9-1'", "sets --ports: "),
        ("module = 'a \"b'", "sets --module: No closing quotation"),
        ("module = 3", "sets --module: "),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_file(home: Path, text: str, words: str) -> None:
    path = user_file(home, text)
    error = tf4slurm(home, "script", *TRAIN).exception
    assert isinstance(error, ProfileError)
    assert str(error).startswith(f"{path} {words}")


def test_in_a_directory_that_was_removed_there_is_no_project(home: Path) -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    (home / "project" / "gone").rmdir()
    assert tf4slurm(home, "script", *TRAIN).exit_code == 0


def test_a_directory_that_may_not_be_read_is_passed_over(home: Path) -> None:
    (home / "config" / "tf4slurm").rmdir()
    (home / "config" / "tf4slurm").symlink_to("tf4slurm")  # not even root can read a loop
    assert tf4slurm(home, "script", *TRAIN).exit_code == 0


def test_config_shows_what_counts_and_why(home: Path) -> None:
    path = user_file(home, 'time = "5"\nmodule = ["a", "b"]')
    assert tf4slurm(home, "config", "show", TF4SLURM_PS="2").stdout.splitlines() == [
        'module = ["a", "b"]',
        'ps = "2"',
        'site = "generic"',
        'time = "5"',
    ]
    shown = tf4slurm(home, "config", "show", "--origin", TF4SLURM_PS="2").stdout.splitlines()
    assert shown[1:4] == ['ps = "2"  # TF4SLURM_PS', 'site = "generic"  # default', f'time = "5"  # {path}']


def test_config_lists_profiles_and_files(home: Path) -> None:
    listed = tf4slurm(home, "config", "profiles").stdout
    assert {line.split()[0] for line in listed.splitlines()} == {"cesga-ft3", "generic"}
    assert f"{home}/config/tf4slurm/config.toml  (does not exist)" in tf4slurm(home, "config", "path").stdout


def test_config_init_makes_a_file_that_changes_nothing_and_never_writes_over_one(home: Path) -> None:
    for arguments in (("config", "init"), ("config", "init", "--project")):
        path = Path(tf4slurm(home, *arguments).stdout.strip())
        assert path.is_file()
        assert tf4slurm(home, "config", "show").stdout == 'site = "generic"\n'
        assert isinstance(tf4slurm(home, *arguments).exception, ProfileError)


def test_the_first_file_names_options_that_exist(home: Path) -> None:
    path = Path(tf4slurm(home, "config", "init").stdout.strip())
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and " = " in line]
    path.write_text("\n".join(lines))
    shown = tf4slurm(home, "config", "show")
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == len(lines)


def test_the_shipped_profiles_are_read(home: Path) -> None:
    for path in profiles.SHIPPED.glob("*.toml"):
        assert tf4slurm(home, "script", "--site", path.stem, *TRAIN).exit_code == 0
