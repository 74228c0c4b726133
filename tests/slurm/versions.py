"""`python -m tests.slurm.versions [RELEASE…] [TEST…]`: run the Slurm tests on each version of Slurm that Debian has.

The version on this machine comes first, then those of other Debian releases, each in its own root directory with this
machine's Python (debian.sh). Each test file's result replaces the earlier one for that version in RESULTS, which the
documentation shows and `tf4slurm doctor` reads.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.slurm.test_sites import SITES, site_id
from tf4slurm.doctor.scheduler import SETTINGS, SubjectTests

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tf4slurm" / "doctor" / "slurm_tests.json"
TESTS = ("tests/slurm", "tests/faults/test_matrix.py")
DEBIAN_RELEASES = {  # Slurm 22.05, 24.11, 26.05
    "bookworm": "libpmix2",
    "trixie": "libpmix2t64",
    "sid": "libpmix2t64 apptainer",
}
"""The names of Debian's releases, and the packages that only some have."""
_PACKAGES = (
    "slurm-wlm munge slurmdbd slurm-wlm-mysql-plugin mariadb-server-core libffi8 iproute2 iptables procps e2fsprogs"
)
_DEBIAN = Path(__file__).with_name("debian.sh")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tf4slurm-tests"


def main(arguments: Sequence[str]) -> int:
    """Return the number of versions on which a test failed."""
    releases = [word for word in arguments if word in DEBIAN_RELEASES] or DEBIAN_RELEASES
    tests = [word for word in arguments if word not in DEBIAN_RELEASES] or TESTS
    failures = 0
    for release in releases:
        if reason := prepare(release):
            print(f"Debian {release}: skipped. {reason}")
            continue
        version, subjects = run(release, tests)
        failed = sum(subject["failed"] for subject in subjects.values())
        print(f"Slurm {version}: {failed or 'no'} test{'s' * (failed != 1)} failed.", flush=True)
        failures += failed > 0
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        stored[version] = stored.get(version, {}) | subjects
        RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return failures


def prepare(release: str) -> str | None:
    """Make the root directory of a release, or exit if that fails; return why its tests cannot run, or None."""
    if os.geteuid() != 0:
        return "A root directory can be made and entered as root only."
    if is_own(release):
        return None if shutil.which("slurmctld") else "Slurm is not installed here: make slurm"
    if sys.base_prefix == "/usr":
        return "This Python is the system's, which another release does not have: use one in its own directory."
    if (_CACHE / release).is_dir():
        return None
    if shutil.which("debootstrap") is None:
        return "It needs debootstrap: apt-get install debootstrap"
    _CACHE.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        [_DEBIAN, "make", release, _CACHE / release, *_PACKAGES.split(), *DEBIAN_RELEASES[release].split()],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        sys.exit(f"Debian {release}: its root directory cannot be made: {made.stderr.strip()}")
    # With MariaDB's client library 11.8.9 slurmdbd fails at its first query (error 5027); this machine's works.
    for library in Path("/usr/lib").glob("*/libmariadb.so.3"):
        shutil.copy(library, _CACHE / release / library.relative_to("/"))
    return None


def is_own(release: str) -> bool:
    """Return whether this machine runs that release."""
    return f"VERSION_CODENAME={release}\n" in Path("/etc/os-release").read_text()


def run(release: str, tests: Sequence[str]) -> tuple[str, dict[str, SubjectTests]]:
    """Run the tests on the Slurm of a release; return its version and the numbers of outcomes by subject."""
    enter = [] if is_own(release) else enter_command(release)
    shown = subprocess.run([*enter, "slurmctld", "-V"], capture_output=True, text=True, check=True)
    version = shown.stdout.split()[-1]
    print(f"Slurm {version}, Debian {release}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "", "-n", "2", "--dist=loadfile", f"--junitxml={report}"]
        environ = os.environ | {"TF4SLURM_REQUIRE_SLURM": "1"}
        subprocess.run([*enter, *command, *tests], env=environ, cwd=ROOT)
        return version, read(report)


def enter_command(release: str) -> list[str]:
    """Return the start of a command line that runs a command in the root directory of a release."""
    paths = [str(ROOT), tempfile.gettempdir(), sys.base_prefix]
    return [str(_DEBIAN), "enter", str(_CACHE / release), ":".join(paths)]


def read(report: Path) -> dict[str, SubjectTests]:
    """Return the numbers of passed, failed and skipped tests, by test file, and of each site by its name."""
    subjects: dict[str, SubjectTests] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.get("classname", "").split(".")[-1], case.get("name", "")
        site = next((site for site in SITES if file == "test_sites" and f"[{site_id(site)}" in name), None)
        pairs = (line.split("=", 1) for line in (SITES[site].get("extra_conf", "") if site else "").splitlines())
        new = SubjectTests(passed=0, failed=0, skipped=0, settings={k: v for k, v in pairs if k in SETTINGS})
        subject = subjects.setdefault(site or first_sentence(case.get("classname", "")), new)
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        subject["passed" if not outcomes else "skipped" if outcomes == {"skipped"} else "failed"] += 1
    return subjects


def first_sentence(module: str) -> str:
    """Return the first sentence of a module's docstring, without its end."""
    text = ast.get_docstring(ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())) or module
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
