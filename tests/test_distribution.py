"""What is published: one version, valid install lines and metadata, and a wheel that works in a clean environment."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import tf4slurm
from tests.pythons import require_python

ROOT = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 600_000
PYTHONS = ("3.10", "3.13")
SECONDS = 600.0


def setup_of(section: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser[section]


def files_of_the_repository() -> list[Path]:
    """Return the files that git tracks or would track."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in sorted(set(done.stdout.split("\0"))) if name and (ROOT / name).exists()]


def install_lines() -> list[tuple[str, str]]:
    """Return each "pip install …" of code, pages and notebooks with its file."""
    found = []
    for path in files_of_the_repository():
        if path.suffix in (".md", ".py", ".ipynb") or path.name == "Makefile":
            text = (ROOT / path).read_text(encoding="utf-8").replace('\\"', '"')
            found += [(str(path), line) for line in re.findall(r"pip install ([^\n`]*)", text)]
    return found


def test_install_lines_name_existing_extras() -> None:
    extras, count = set(setup_of("options.extras_require")), 0
    for path, line in install_lines():
        for names in re.findall(r"(?:tf4slurm|\.)\[([\w,-]+)\]", line):
            assert set(names.split(",")) <= extras, f"{path}: pip install {line}"
            count += 1
    assert count > 10


def test_first_installation_is_from_a_clone_until_a_release() -> None:
    for path, line in install_lines():
        assert not re.match(r"""["']?tf4slurm["']?(?!\S)""", line), f"{path}: pip install {line}"


def test_dependencies_have_lower_bounds_only() -> None:
    texts = [setup_of("options")["install_requires"], *setup_of("options.extras_require").values()]
    for requirement in "\n".join(texts).split("\n"):
        if requirement and not requirement.startswith("types-"):
            assert re.fullmatch(r"[\w-]+>=[\d.]+(; python_version .*)?", requirement)


def test_citation_file_has_the_version_and_license_of_the_package() -> None:
    yaml = pytest.importorskip("yaml", reason="pip install tf4slurm[docs]")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == tf4slurm.__version__
    assert citation["license"] == setup_of("metadata")["license"]
    assert citation["title"] == setup_of("metadata")["name"]
    assert citation["message"]
    assert all(author["name"] for author in citation["authors"])


@dataclass(frozen=True)
class Distribution:
    """The built wheel and source distribution."""

    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """The files that `make dist` builds, from a copy of the repository's files."""
    directory = tmp_path_factory.mktemp("distribution")
    for path in files_of_the_repository():
        if not (ROOT / path).is_symlink():
            (directory / "source" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, directory / "source" / path)
    run(sys.executable, "-m", "build", "--outdir", directory / "dist", directory / "source")
    (wheel,), (source,) = (directory / "dist").glob("*.whl"), (directory / "dist").glob("*.tar.gz")
    return Distribution(wheel, source)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program that must succeed; return what it prints."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(SECONDS)
def test_distribution_is_accepted_by_twine(distribution: Distribution) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", distribution.wheel, distribution.source)


@pytest.mark.long
@pytest.mark.timeout(SECONDS)
def test_wheel_is_small_and_complete(distribution: Distribution) -> None:
    assert distribution.wheel.stat().st_size < MAX_WHEEL_BYTES
    assert distribution.wheel.name.startswith(f"tf4slurm-{tf4slurm.__version__}-py3-none-any")
    with zipfile.ZipFile(distribution.wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    tracked = {path for path in files_of_the_repository() if path.parts[0] == "tf4slurm"}
    assert names == tracked
    assert Path("tf4slurm/py.typed") in names
    assert {path.suffix for path in names} >= {".html", ".css", ".js", ".toml"}


@pytest.mark.long
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_installed_package_runs_a_job_and_reports_it(
    tmp_path: Path, distribution: Distribution, kind: str, version: str
) -> None:
    python = require_python(version)
    environment = tmp_path / "environment"
    run(python, "-m", "venv", environment)
    run(environment / "bin/pip", "install", "--quiet", "--disable-pip-version-check", getattr(distribution, kind))
    program = environment / "bin/tf4slurm"
    assert run(program, "--version", cwd=tmp_path).split()[-1] == tf4slurm.__version__
    run(program, "run", "--local", "--ps", "1", "--workers", "1", "--", "true", cwd=tmp_path)
    run(program, "report", "-o", tmp_path / "report.html", cwd=tmp_path)
    assert "COMPLETED" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run(program, "config", "profiles", cwd=tmp_path).startswith("cesga-ft3")
