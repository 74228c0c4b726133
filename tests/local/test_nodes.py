"""The output of `tf4slurm nodes`, from arguments and from standard input."""

from __future__ import annotations

import subprocess

import pytest

from tests.jobs import TF4SLURM


def nodes(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([TF4SLURM, "nodes", *arguments], input=stdin, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["expand", "n[08-10],gpu7"], "", "n08\nn09\nn10\ngpu7\n"),
        (["expand"], "n[1-2]\nm1\n", "n1\nn2\nm1\n"),
        (["fold", "n9", "n10", "gpu7"], "", "n[9-10],gpu7\n"),
        (["fold"], "n3\nn1\nn2\nn1\n", "n[3,1-2,1]\n"),
        (["count", "n[1-10000],n1", "m[01-10]"], "", "10011\n"),
    ],
)
def test_formats_of_nodelists(arguments: list[str], stdin: str, expected: str) -> None:
    done = nodes(*arguments, stdin=stdin)
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


@pytest.mark.parametrize("verb", ["expand", "fold", "count"])
def test_invalid_nodelist_is_one_line_and_exit_code_2(verb: str) -> None:
    done = nodes(verb, "a,n[3-1]")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("tf4slurm: The range '3-1' is reversed")
    assert done.stderr.count("\n") == 1
    assert "It has no node" in nodes(verb).stderr
