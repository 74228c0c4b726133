"""The options of a job, through click as a user gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tf4slurm.agent import agent
from tf4slurm.cli.options import STOP_SIGNALS, job_options, make_plan
from tf4slurm.control.limits import Limits
from tf4slurm.errors import PlacementError
from tf4slurm.launch.plan import LaunchPlan


def invoke(*arguments: str, available: int | None = None) -> tuple[Result, list[LaunchPlan]]:
    """Give these arguments to a command with the options of a job; return click's result and the plan."""
    plans: list[LaunchPlan] = []

    @click.command()
    @job_options
    def command(**options: Any) -> None:
        plans.append(make_plan(available, **options))

    return CliRunner().invoke(command, arguments), plans


def plan_of(*arguments: str, available: int | None = None) -> LaunchPlan:
    result, plans = invoke(*arguments, available=available)
    assert result.exit_code == 0, result.output
    (plan,) = plans
    return plan


def test_the_defaults() -> None:
    assert plan_of("--workers", "2", "--", "python", "train.py") == LaunchPlan(
        counts={"chief": 1, "ps": 1, "worker": 2, "evaluator": 0},
        command=("python", "train.py"),
        name="train",
        runs_directory=Path("runs"),
        limits=Limits(),
        interface=None,
        ports=(),
    )


def test_the_stop_signals_are_the_agents() -> None:
    assert tuple(number.name for number in agent.STOP_SIGNALS) == STOP_SIGNALS


def test_every_option() -> None:
    options = [
        *("--ps", "2", "--workers", "1", "--evaluators", "1", "--no-chief", "--name", "digits"),
        *("--runs-directory", "/scratch/runs", "--interface", "ib0", "--ports", "40000-40002,40010"),
        *(
            "--start-timeout",
            "60",
            "--heartbeat-timeout",
            "5",
            "--heartbeat-interval",
            "0.5",
            "--max-worker-restarts",
            "0",
        ),
        *("--placement", "spread"),
    ]
    assert plan_of(*options, "--", "./train", "--ps", "x") == LaunchPlan(
        counts={"chief": 0, "ps": 2, "worker": 1, "evaluator": 1},
        command=("./train", "--ps", "x"),
        name="digits",
        runs_directory=Path("/scratch/runs"),
        limits=Limits(
            start_timeout_seconds=60, heartbeat_timeout_seconds=5, heartbeat_interval_seconds=0.5, max_worker_restarts=0
        ),
        interface="ib0",
        ports=(40000, 40001, 40002, 40010),
        placement="spread",
    )


def test_a_data_service() -> None:
    plan = plan_of("--data-workers", "2", "--data-python", "/opt/tf/bin/python3", "--", "./train", available=6)
    assert {role: count for role, count in plan.counts.items() if count} == {
        "chief": 1,
        "ps": 1,
        "worker": 1,
        "data-dispatcher": 1,
        "data-worker": 2,
    }
    assert plan.python == "/opt/tf/bin/python3"
    assert plan_of("--workers", "1", "--data-python", "x", "--", "python", "train.py").data_python is None


@pytest.mark.parametrize(("available", "workers"), [(7, 5), (3, 1)])
def test_without_a_count_the_workers_are_the_tasks_that_are_left(available: int, workers: int) -> None:
    plan = plan_of("--", "x", available=available)
    assert plan.num_tasks == available
    assert plan.counts["worker"] == workers


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "train.py"), "train"),
        (("python", "-u", "src/my train.py", "--x.py"), "my_train"),
        (("python", "-m", "trainer"), "python"),
        (("./run.sh",), "run"),
        (("bash", "scripts/go.sh", "a.py"), "go"),
        (("/opt/bin/program", "--flag"), "program"),
    ],
)
def test_a_job_is_named_after_its_script(command: tuple[str, ...], name: str) -> None:
    assert plan_of("--workers", "1", "--", *command).name == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), 'There is no command. Give it after "--", such as: -- python train.py'),
        (("--workers", "1"), "There is no command."),
        (("--workers", "1", "--"), "There is no command."),
        (("--workers", "-1", "--", "x"), "-1 is not in the range x>=0"),
        (("--workers", "two", "--", "x"), "'two' is not a valid integer"),
        (("--start-timeout", "0", "--workers", "1", "--", "x"), "0.0 is not in the range x>0"),
        (("--heartbeat-timeout", "-1", "--workers", "1", "--", "x"), "-1.0 is not in the range x>0"),
        (
            ("--heartbeat-interval", "10", "--workers", "1", "--", "x"),
            "--heartbeat-interval 10 is not shorter than --heartbeat-timeout 10: every task",
        ),
        (
            ("--heartbeat-interval", "2", "--heartbeat-timeout", "1", "--workers", "1", "--", "x"),
            "--heartbeat-interval 2 is not shorter than",
        ),
        (("--no-chief", "--workers", "0", "--", "x"), "Nobody would lead: --no-chief needs at least one worker."),
        (("--ports", "40010-40000", "--workers", "1", "--", "x"), "'40010-40000' is not a range of ports"),
        (("--ports", "http", "--workers", "1", "--", "x"), "'http' is not a range of ports"),
        (("--data-workers", "1", "--workers", "1", "--", "bash", "x"), "'bash' is not one. Name it with --data-python"),
        (("--wokers", "1", "--", "x"), "No such option"),
        (("--heartbeat-interval", "nan", "--workers", "1", "--", "x"), "nan"),
        (("--start-timeout", "nan", "--workers", "1", "--", "x"), "nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_meant_is_a_usage_error(arguments: tuple[str, ...], words: str) -> None:
    result, plans = invoke(*arguments)
    assert plans == []
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "available", "words"),
    [
        (("--", "x"), None, "The number of workers is not known"),
        (("--", "x"), 2, "1 chief + 1 ps, and Slurm gives 2 tasks. Give --workers N."),
        (("--workers", "3", "--", "x"), 4, "need 5 tasks, but Slurm gives 4"),
    ],
)
def test_counts_that_do_not_fit_are_a_pre_flight_error(
    arguments: tuple[str, ...], available: int | None, words: str
) -> None:
    result, _ = invoke(*arguments, available=available)
    assert isinstance(result.exception, PlacementError)
    assert words in str(result.exception)
