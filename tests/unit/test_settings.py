"""Settings: their effect on the verbs, their paths, their precedence, and refusals."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tf4slurm.cli.main import cli
from tf4slurm.errors import SettingsError
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.options import options_by_key
from tf4slurm.spec.settings import SHIPPED, SettingsPaths, read_settings

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


def test_command_line_overrides_variable_project_user_and_site(home: Path) -> None:
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


def test_memory_on_command_line_replaces_that_of_site(home: Path) -> None:
    found = directives(tf4slurm(home, "script", "--site", "cesga-ft3", "--mem", "9G", *TRAIN))
    assert "mem=9G" in found
    assert not any(text.startswith("mem-per-cpu") for text in found)


def test_single_on_command_line_replaces_roles_of_files(home: Path) -> None:
    user_file(home, "ps = 2\nchief = false\nrequeue = 3")
    assert "ntasks=1" in directives(tf4slurm(home, "script", "--single", "--", "true"))
    assert "ntasks=4" in directives(tf4slurm(home, "script", "--no-single", "--workers", "2", "--", "true"))


def test_files_set_options_of_job_and_sbatch(home: Path) -> None:
    user_file(home, 'module = ["a/1", "b"]\nruns-directory = "/scratch"\nps = 2\nchief = false\nexclusive = true')
    result = tf4slurm(home, "script", "--site", "cesga-ft3", "-N", "1", "--gpus-per-worker", "1", *TRAIN)
    assert {"gres=gpu:a100:1", "ntasks=3", "exclusive"} <= directives(result)
    assert "module load a/1 || exit 3\nmodule load b || exit 3\n" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert "--ps 2 --workers 1 --no-chief" in last
    assert "--runs-directory /scratch --interface infiniband --" in last


def test_variables_set_flags_and_lists(home: Path) -> None:
    variables = {"TF4SLURM_MODULE": "a 'b c'", "TF4SLURM_CHIEF": "0", "TF4SLURM_REQUEUE": "3", "TF4SLURM_PS": "2"}
    result = tf4slurm(home, "script", "--workers", "2", "--", "python", "train.py", **variables)
    assert "module load a || exit 3\nmodule load 'b c' || exit 3\n" in result.stdout
    assert "--ps 2 --workers 2 --no-chief" in result.stdout
    assert "--requeue 3" in result.stdout


def test_invalid_file_fails_every_verb_but_not_its_help(home: Path) -> None:
    path = user_file(home, "partitoin = 'x'")
    for verb in ("script", "submit", "run"):
        assert isinstance(tf4slurm(home, verb, *TRAIN).exception, SettingsError)
        assert tf4slurm(home, verb, "--help").exit_code == 0
    assert isinstance(tf4slurm(home, "config", "show").exception, SettingsError)
    assert str(path) in tf4slurm(home, "config", "path").stdout


def test_run_without_slurm_ignores_settings_for_slurm(home: Path) -> None:
    typed = tf4slurm(home, "run", "--requeue", "3", *TRAIN)
    assert "--requeue is for jobs of Slurm" in str(typed.exception)
    user_file(home, "requeue = 3\nsrun = ['label']")
    assert "There is no command" in str(tf4slurm(home, "run", "--workers", "1").exception)


def test_no_option_shares_its_variable_with_tasks() -> None:
    """Otherwise TF4SLURM_TASK of a child would set --task in its own jobs."""
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
def test_invalid_value_is_refused_with_its_file(home: Path, text: str, words: str) -> None:
    path = user_file(home, text)
    error = tf4slurm(home, "script", *TRAIN).exception
    assert isinstance(error, SettingsError)
    assert str(error).startswith(f"{path} {words}")


def test_removed_directory_has_no_project(home: Path) -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    (home / "project" / "gone").rmdir()
    assert tf4slurm(home, "script", *TRAIN).exit_code == 0


def test_unreadable_directory_of_user_is_ignored(home: Path) -> None:
    (home / "config" / "tf4slurm").rmdir()
    (home / "config" / "tf4slurm").symlink_to("tf4slurm")  # not even root can read a loop
    assert tf4slurm(home, "script", *TRAIN).exit_code == 0


def test_config_show_prints_settings_and_origins(home: Path) -> None:
    path = user_file(home, 'time = "5"\nmodule = ["a", "b"]')
    assert tf4slurm(home, "config", "show", TF4SLURM_PS="2").stdout.splitlines() == [
        'module = ["a", "b"]',
        'ps = "2"',
        'site = "generic"',
        'time = "5"',
    ]
    shown = tf4slurm(home, "config", "show", "--origin", TF4SLURM_PS="2").stdout.splitlines()
    assert shown[1:4] == ['ps = "2"  # TF4SLURM_PS', 'site = "generic"  # default', f'time = "5"  # {path}']


def test_config_prints_profiles_and_files(home: Path) -> None:
    listed = tf4slurm(home, "config", "profiles").stdout
    shipped = {"cesga-ft3", "generic", "leonardo", "lumi", "marenostrum5", "nersc-perlmutter"}
    assert {line.split()[0] for line in listed.splitlines()} == shipped
    assert f"{home}/config/tf4slurm/config.toml  (does not exist)" in tf4slurm(home, "config", "path").stdout


def test_config_init_creates_file_without_settings_and_overwrites_none(home: Path) -> None:
    for arguments in (("config", "init"), ("config", "init", "--project")):
        path = Path(tf4slurm(home, *arguments).stdout.strip())
        assert path.is_file()
        assert tf4slurm(home, "config", "show").stdout == 'site = "generic"\n'
        assert isinstance(tf4slurm(home, *arguments).exception, SettingsError)


def test_created_file_names_existing_options(home: Path) -> None:
    path = Path(tf4slurm(home, "config", "init").stdout.strip())
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and " = " in line]
    path.write_text("\n".join(lines))
    shown = tf4slurm(home, "config", "show")
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == len(lines)


def test_shipped_profiles_are_valid(home: Path) -> None:
    for path in SHIPPED.glob("*.toml"):
        assert tf4slurm(home, "script", "--site", path.stem, *TRAIN).exit_code == 0


# The paths of settings


@pytest.fixture
def paths(tmp_path: Path) -> SettingsPaths:
    for directory in ("etc/sites", "user/sites", "shipped", "project/below"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "shipped" / "generic.toml").write_text("")
    project = tmp_path / "project" / "tf4slurm.toml"
    project.write_text("")
    return SettingsPaths(tmp_path / "user", project, tmp_path / "etc", tmp_path / "shipped")


def values(paths: SettingsPaths, environ: dict[str, str] | None = None, site: str | None = None) -> dict[str, Any]:
    settings = read_settings(environ or {}, site, paths)
    return {name: setting.value for name, setting in settings.items()}


def test_later_file_overrides_earlier(paths: SettingsPaths) -> None:
    (paths.shipped / "mine.toml").write_text('partition = "shipped"')
    order = [
        paths.etc / "config.toml",
        paths.files[1],
        paths.project,
    ]
    for count in range(1, 4):
        for chosen in itertools.combinations(order, count):
            for path in order:
                path.write_text(f'partition = "{path}"' if path in chosen else "")
            assert values(paths, site="mine")["partition"] == str(chosen[-1])
    assert values(paths, {"TF4SLURM_PARTITION": "variable"}, "mine")["partition"] == "variable"
    for path in order:
        path.write_text("")
    assert values(paths, site="mine")["partition"] == "shipped"


def test_settings_have_their_origin(paths: SettingsPaths) -> None:
    (paths.files[1]).write_text('time = "5"')
    settings = read_settings({"TF4SLURM_PARTITION": "p"}, paths=paths)
    assert settings["time"].origin == str(paths.files[1])
    assert settings["partition"].origin == "TF4SLURM_PARTITION"
    assert settings["site"].origin == "default"


def test_profile_of_user_overrides_host_and_shipped(paths: SettingsPaths) -> None:
    for directory in reversed(paths.site_directories):
        (directory / "mine.toml").write_text(f'partition = "{directory}"')
        assert values(paths, site="mine")["partition"] == str(directory)


def test_file_or_variable_names_the_site(paths: SettingsPaths) -> None:
    (paths.shipped / "mine.toml").write_text('partition = "p"')
    (paths.etc / "config.toml").write_text('site = "mine"')
    assert values(paths)["partition"] == "p"
    assert "partition" not in values(paths, {"TF4SLURM_SITE": "generic"})


def test_site_none_disables_settings(paths: SettingsPaths) -> None:
    (paths.files[1]).write_text('partition = "p"')
    assert values(paths, {"TF4SLURM_TIME": "5"}, "none") == {}
    assert values(paths, {"TF4SLURM_SITE": "none"}) == {}


def test_later_file_replaces_excluded_options(paths: SettingsPaths) -> None:
    (paths.etc / "config.toml").write_text('mem = "1G"\ntime = "5"')
    (paths.files[1]).write_text('mem_per_cpu = "2G"')
    assert values(paths) == {"mem_per_cpu": "2G", "time": "5", "site": "generic"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('partitoin = "x"', r"'partitoin' is not an option. Did you mean 'partition'\?"),
        ('qqq = "x"', "'qqq' is not an option."),
        ("partition = ", "cannot be read as TOML"),
        ("[partition]\nname = 1", "is not a text"),
        ("module = [1]", "is not a list of texts"),
    ],
)
def test_invalid_file_is_refused_with_its_path(paths: SettingsPaths, text: str, words: str) -> None:
    path = paths.files[1]
    path.write_text(text)
    with pytest.raises(SettingsError, match=words) as refused:
        values(paths)
    assert refused.value.source == str(path)
    assert refused.value.exit_code == 2


def test_unknown_profile_is_refused_with_known_ones(paths: SettingsPaths) -> None:
    with pytest.raises(SettingsError, match=r"Did you mean 'generic'\? The profiles are generic"):
        values(paths, site="genric")


def test_other_variables_are_ignored(paths: SettingsPaths) -> None:
    assert values(paths, {"TF4SLURM_TASK": "worker/0", "TF4SLURM_TIME": ""}) == {"site": "generic"}


def test_project_file_is_found_in_parent(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "tf4slurm.toml").touch()
    environ = {"HOME": str(tmp_path)}
    assert SettingsPaths.from_environ(environ, tmp_path / "a" / "b").project == tmp_path / "tf4slurm.toml"
    (tmp_path / "a" / "tf4slurm.toml").touch()
    assert SettingsPaths.from_environ(environ, tmp_path / "a" / "b").project == tmp_path / "a" / "tf4slurm.toml"


def test_directory_of_user_settings(tmp_path: Path) -> None:
    assert SettingsPaths.from_environ({"HOME": "/home/me"}, tmp_path).user == Path("/home/me/.config/tf4slurm")
    assert SettingsPaths.from_environ({"XDG_CONFIG_HOME": "/x"}, tmp_path).user == Path("/x/tf4slurm")


def test_unconfirmed_profile_is_marked() -> None:
    assert "UNCONFIRMED" in (SHIPPED / "cesga-ft3.toml").read_text(encoding="utf-8").partition("\n")[0]
