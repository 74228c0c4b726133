"""The doctor's findings about the TensorFlow of Pythons on PATH, of modules and of containers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tf4slurm.doctor import pythons
from tf4slurm.doctor.pythons import VersionTests, check_versions, describe_version, read_tensorflow_tests

TESTS = {
    "1.15": VersionTests(
        tensorflow="1.15.5",
        python="3.7.16",
        jobs={"flags": "works", "fit": "ImportError: old", "predict": "ImportError: old"},
    ),
    "2.13": VersionTests(tensorflow="2.13.1", python="3.11.7", jobs={"flags": "works", "fit": "works"}),
}


@pytest.fixture
def two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pythons, "read_tensorflow_tests", lambda: TESTS)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.15.5", 'tested with this tf4slurm: works: flags. Ends with "ImportError: old": fit; predict'),
        ("2.13.0", "tested with this tf4slurm: all works"),
        (
            "2.4.4",
            "not tested with this tf4slurm; like 1.15 and 2.13: works: flags. "
            'Ends with "ImportError: old": fit; predict',
        ),
        ("2.30.1", "not tested with this tf4slurm; like 2.13, the newest tested version: all works"),
        ("1.4.0", "not tested with this tf4slurm, and older than each tested version (1.15, 2.13)"),
    ],
)
@pytest.mark.usefixtures("two_versions")
def test_version_is_described_by_the_tests_with_it_or_its_neighbours(version: str, words: str) -> None:
    assert describe_version(version) == words


def make_python(directory: Path, tensorflow: str | None) -> str:
    """Make an environment with a program `python` that prints these versions. Return its directory of programs."""
    programs = directory / "bin"
    programs.mkdir(parents=True)
    found = {"python": "3.8.10", **({} if tensorflow is None else {"tensorflow": tensorflow})}
    (programs / "python").write_text(f"#!/bin/sh\necho a banner\necho '{json.dumps(found)}'\n")
    (programs / "python").chmod(0o755)
    (programs / "python3").symlink_to("python")
    return str(programs)


@pytest.mark.usefixtures("two_versions")
def test_each_environment_on_path_with_tensorflow_is_named_once(tmp_path: Path) -> None:
    old, without = make_python(tmp_path / "old", "2.13.1"), make_python(tmp_path / "none", None)
    path = ":".join((without, old, old, str(Path(sys.executable).parent), "/nowhere", ""))
    texts = [each.text for each in check_versions({"PATH": path}, (), None)]
    assert texts[-1] == f"{old}/python: TensorFlow 2.13.1, Python 3.8.10; tested with this tf4slurm: all works"
    assert [text for text in texts[:-1] if not text.startswith("this Python: ")] == []


def test_module_without_tensorflow_and_missing_container_program_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASH_FUNC_module%%", "() { PATH=$MODULES/$2/bin:$PATH; }")
    monkeypatch.setenv("MODULES", str(tmp_path))
    make_python(tmp_path / "with", "2.13.1")
    make_python(tmp_path / "without", None)
    found = [
        each for each in check_versions({"PATH": ""}, ("with", "without"), "image.sif") if "this Py" not in each.text
    ]
    assert [each.level for each in found] == ["ok", "warn", "warn"]
    assert found[0].text.startswith("module with: TensorFlow 2.13.1, Python 3.8.10; ")
    assert found[1].text == "module without: Python 3.8.10 has no TensorFlow"
    assert "needs Apptainer or Singularity" in found[2].text


def test_stored_results_belong_to_their_versions() -> None:
    tests = read_tensorflow_tests()
    assert tests
    assert all(each["tensorflow"].startswith(f"{version}.") and each["jobs"] for version, each in tests.items())
