"""Settings: where they come from, which wins, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tf4slurm.errors import ProfileError
from tf4slurm.settings import SHIPPED, Places, read_settings


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for directory in ("etc/sites", "user/sites", "shipped", "project/below"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "shipped" / "generic.toml").write_text("")
    project = tmp_path / "project" / "tf4slurm.toml"
    project.write_text("")
    return Places(tmp_path / "user", project, tmp_path / "etc", tmp_path / "shipped")


def values(places: Places, environ: dict[str, str] | None = None, site: str | None = None) -> dict[str, Any]:
    settings = read_settings(places, environ or {}, site)
    return {name: setting.value for name, setting in settings.items()}


def test_of_any_two_places_the_later_wins(places: Places) -> None:
    assert places.project is not None
    (places.shipped / "mine.toml").write_text('partition = "shipped"')
    order = [
        places.etc / "config.toml",
        places.user / "config.toml",
        places.project,
    ]
    for count in range(1, 4):
        for chosen in itertools.combinations(order, count):
            for path in order:
                path.write_text(f'partition = "{path}"' if path in chosen else "")
            assert values(places, site="mine")["partition"] == str(chosen[-1])
    assert values(places, {"TF4SLURM_PARTITION": "variable"}, "mine")["partition"] == "variable"
    for path in order:
        path.write_text("")
    assert values(places, site="mine")["partition"] == "shipped"


def test_the_origin_is_told(places: Places) -> None:
    (places.user / "config.toml").write_text('time = "5"')
    settings = read_settings(places, {"TF4SLURM_PARTITION": "p"})
    assert settings["time"].origin == str(places.user / "config.toml")
    assert settings["partition"].origin == "TF4SLURM_PARTITION"
    assert settings["site"].origin == "default"


def test_a_site_may_be_the_users_the_hosts_or_come_with_tf4slurm(places: Places) -> None:
    for directory in reversed(places.site_directories):
        (directory / "mine.toml").write_text(f'partition = "{directory}"')
        assert values(places, site="mine")["partition"] == str(directory)


def test_a_file_may_name_the_site(places: Places) -> None:
    (places.shipped / "mine.toml").write_text('partition = "p"')
    (places.etc / "config.toml").write_text('site = "mine"')
    assert values(places)["partition"] == "p"
    assert "partition" not in values(places, {"TF4SLURM_SITE": "generic"})


def test_without_a_site_there_is_nothing(places: Places) -> None:
    (places.user / "config.toml").write_text('partition = "p"')
    assert values(places, {"TF4SLURM_TIME": "5"}, "none") == {}
    assert values(places, {"TF4SLURM_SITE": "none"}) == {}


def test_of_options_that_exclude_each_other_the_later_place_has_its_way(places: Places) -> None:
    (places.etc / "config.toml").write_text('mem = "1G"\ntime = "5"')
    (places.user / "config.toml").write_text('mem_per_cpu = "2G"')
    assert values(places) == {"mem-per-cpu": "2G", "time": "5", "site": "generic"}


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
def test_a_file_that_is_wrong_is_named(places: Places, text: str, words: str) -> None:
    path = places.user / "config.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=words) as refused:
        values(places)
    assert refused.value.source == str(path)
    assert refused.value.exit_code == 3


def test_a_profile_that_is_not_there_is_told_with_those_that_are(places: Places) -> None:
    with pytest.raises(ProfileError, match=r"Did you mean 'generic'\? The profiles are generic"):
        values(places, site="genric")


def test_variables_that_are_no_options_are_left_alone(places: Places) -> None:
    assert values(places, {"TF4SLURM_TASK": "worker/0", "TF4SLURM_TIME": ""}) == {"site": "generic"}


def test_the_project_is_looked_for_upwards(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "tf4slurm.toml").touch()
    environ = {"HOME": str(tmp_path)}
    assert Places.from_environ(environ, tmp_path / "a" / "b").project == tmp_path / "tf4slurm.toml"
    (tmp_path / "a" / "tf4slurm.toml").touch()
    assert Places.from_environ(environ, tmp_path / "a" / "b").project == tmp_path / "a" / "tf4slurm.toml"


def test_where_the_user_keeps_settings(tmp_path: Path) -> None:
    assert Places.from_environ({"HOME": "/home/me"}, tmp_path).user == Path("/home/me/.config/tf4slurm")
    assert Places.from_environ({"XDG_CONFIG_HOME": "/x"}, tmp_path).user == Path("/x/tf4slurm")


def test_the_shipped_profile_of_a_site_that_nobody_has_tried_says_so() -> None:
    assert "UNCONFIRMED" in (SHIPPED / "cesga-ft3.toml").read_text(encoding="utf-8").partition("\n")[0]
