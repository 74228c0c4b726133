"""Exit codes as in a shell, and their descriptions."""

from __future__ import annotations

import pytest

from tf4slurm.control.records import Outcome
from tf4slurm.errors import describe_end, exit_code_of


@pytest.mark.parametrize(("exit_code", "is_success"), [(0, True), (1, False), (137, False)])
def test_only_exit_code_0_is_success(exit_code: int, is_success: bool) -> None:
    assert Outcome(exit_code, "reason").is_success is is_success


@pytest.mark.parametrize(
    ("returncode", "exit_code", "description"),
    [
        (0, 0, "exited with code 0"),
        (3, 3, "exited with code 3"),
        (255, 255, "exited with code 255"),
        (-9, 137, "was killed by signal 9 (SIGKILL)"),
        (-15, 143, "was killed by signal 15 (SIGTERM)"),
        (-11, 139, "was killed by signal 11 (SIGSEGV)"),
        (-50, 178, "was killed by signal 50 (unknown)"),
    ],
)
def test_return_code_has_an_exit_code_and_a_description(returncode: int, exit_code: int, description: str) -> None:
    assert exit_code_of(returncode) == exit_code
    assert describe_end(returncode) == description
