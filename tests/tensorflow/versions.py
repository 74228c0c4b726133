"""`python -m tests.tensorflow.versions [VERSION…]`: run the jobs of test_versions.py with each version of TensorFlow.

The results of a version replace its earlier ones in RESULTS, which the documentation shows and `tf4slurm doctor` reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.tensorflow.test_versions import CASES, ROOT, VERSIONS, find_python
from tf4slurm.doctor.pythons import FAILS, RESULTS, WORKS, VersionTests

TESTS = Path(__file__).with_name("test_versions.py")


def main(arguments: Sequence[str]) -> int:
    """Return the number of versions with which a job failed."""
    failures = 0
    for version in arguments or VERSIONS:
        if find_python(version) is None:
            print(f"TensorFlow {version}: skipped. Its environment cannot be made here.")
            continue
        found = run(version)
        failed = [name for name, result in found["jobs"].items() if result == FAILS]
        print(f"TensorFlow {found['tensorflow']}: {', '.join(failed) or 'no job'} failed.", flush=True)
        failures += bool(failed)
        path = ROOT / "tf4slurm" / "doctor" / RESULTS
        stored = json.loads(path.read_text()) if path.exists() else {}
        stored[version] = found
        order = sorted(stored, key=lambda name: [*map(int, name.split("."))])
        path.write_text(json.dumps({name: stored[name] for name in order}, indent=1, ensure_ascii=False) + "\n")
    return failures


def run(version: str) -> VersionTests:
    """Run all jobs with a version. Return their results, in the order of the cases."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        options = ["-m", "", "-k", version, f"--junitxml={report}", "-o", "junit_family=xunit1", "-p", "no:xdist"]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *options, str(TESTS)], env=environ, cwd=ROOT)
        return read(report)


def read(report: Path) -> VersionTests:
    """Return what pytest's report says about the jobs of one version."""
    found = VersionTests(tensorflow="", python="", jobs={})
    for case in ElementTree.parse(report).iter("testcase"):
        name = next(name for name in CASES if f"[{name}-" in case.get("name", ""))
        facts = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        has_failed = any(child.tag in ("failure", "error") for child in case)
        found["jobs"][name] = FAILS if has_failed else facts.get("sentence", WORKS)
        found["tensorflow"], found["python"] = facts["tensorflow"], facts["python"]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
