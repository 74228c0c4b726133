"""The options of a job, given on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tf4slurm.cli.options import given, job_options
from tf4slurm.errors import OptionError, PlacementError
from tf4slurm.spec.job_spec import JobSpec


def spec_of(*arguments: str, available: int | None = None) -> JobSpec:
    """Return the job that a verb with the options of `run` makes of these arguments."""
    specs: list[JobSpec] = []

    @click.command()
    @job_options("run")
    def command(**options: Any) -> None:
        specs.append(JobSpec(**given(options)).for_tasks(available))

    CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    (spec,) = specs
    return spec


def test_defaults() -> None:
    spec = spec_of("--workers", "2", "--", "python", "train.py")
    assert spec == JobSpec(("python", "train.py"), workers=2)
    assert spec.counts == {"chief": 1, "ps": 1, "worker": 2, "evaluator": 0}


def test_every_option() -> None:
    options = [
        *("--ps", "2", "--workers", "1", "--evaluators", "1", "--no-chief", "--name", "digits"),
        *("--runs-directory", "/scratch/runs", "--interface", "ib0", "--ports", "40000-40002,40010"),
        *("--start-timeout", "60", "--heartbeat-timeout", "5", "--heartbeat-interval", "0.5"),
        *("--max-worker-restarts", "0", "--placement", "spread", "--stop-signal", "SIGUSR1", "--require-servers"),
        *("--kill-wait", "9", "--srun", "label", "--srun", "cpu-bind=cores", "--requeue", "3"),
    ]
    assert spec_of(*options, "--", "./train", "--ps", "x") == JobSpec(
        ("./train", "--ps", "x"),
        ps=2,
        workers=1,
        evaluators=1,
        chief=False,
        name="digits",
        runs_directory=Path("/scratch/runs"),
        interface="ib0",
        ports=(40000, 40001, 40002, 40010),
        start_timeout_seconds=60,
        heartbeat_timeout_seconds=5,
        heartbeat_interval_seconds=0.5,
        max_worker_restarts=0,
        placement="spread",
        stop_signal="SIGUSR1",
        require_servers=True,
        srun=("label", "cpu-bind=cores"),
        requeue=3,
        kill_wait_seconds=9,
    )


def test_data_service() -> None:
    spec = spec_of("--data-workers", "2", "--data-python", "/opt/tf/bin/python3", "--", "./train", available=6)
    assert {role: count for role, count in spec.counts.items() if count} == {
        "chief": 1,
        "ps": 1,
        "worker": 1,
        "data-dispatcher": 1,
        "data-worker": 2,
    }
    assert spec.data_service_python == "/opt/tf/bin/python3"


@pytest.mark.parametrize(("available", "workers"), [(7, 5), (3, 1)])
def test_workers_default_to_the_remaining_tasks(available: int, workers: int) -> None:
    spec = spec_of("--", "x", available=available)
    assert (spec.num_tasks, spec.workers) == (available, workers)


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
def test_name_defaults_to_the_script(command: tuple[str, ...], name: str) -> None:
    assert spec_of("--workers", "1", "--", *command).name == name


@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        ((), "command", "There is no command."),
        (("--workers", "1"), "command", 'There is no command. Give it after "--", such as: -- python train.py'),
        (("--workers", "1", "--"), "command", "There is no command."),
        (("--workers", "-1", "--", "x"), "workers", "--workers: -1 is less than 0."),
        (("--workers", "two", "--", "x"), "workers", "--workers: 'two' is not an integer."),
        (("--start-timeout", "0", "--", "x"), "start-timeout", "--start-timeout: 0.0 is not greater than 0."),
        (("--heartbeat-timeout", "-1", "--", "x"), "heartbeat-timeout", "-1.0 is not greater than 0."),
        (
            ("--heartbeat-interval", "10", "--", "x"),
            "heartbeat-interval",
            "--heartbeat-interval 10 is not shorter than --heartbeat-timeout 10: every task",
        ),
        (("--no-chief", "--workers", "0", "--", "x"), "workers", "--no-chief needs at least one worker"),
        (("--ports", "40010-40000", "--", "x"), "ports", "'40010-40000' is not a range of ports"),
        (("--ports", "http", "--", "x"), "ports", "'http' is not a range of ports"),
        (("--control-port", "70000", "--", "x"), "control-port", "70000 is greater than 65535."),
        (("--stop-signal", "SIGKILL", "--", "x"), "stop-signal", "'SIGKILL' is not one of SIGTERM, SIGINT"),
        (("--data-workers", "1", "--", "bash", "x"), "data-python", "'bash' is not one. Name it with --data-python"),
        (("--start-timeout", "nan", "--", "x"), "start-timeout", "is not a time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_option_is_refused(arguments: tuple[str, ...], option: str, words: str) -> None:
    with pytest.raises((OptionError, PlacementError)) as caught:
        spec_of(*arguments)
    assert words in str(caught.value)
    if isinstance(caught.value, OptionError):
        assert (caught.value.option, caught.value.exit_code) == (option, 2)


def test_values_complete_by_choices_and_interfaces() -> None:
    command = click.Command("run", params=job_options("run")(lambda: None).__click_params__)  # type: ignore[attr-defined]
    context = click.Context(command)
    for name, start, expected in (("stop_signal", "SIGU", ["SIGUSR1", "SIGUSR2"]), ("interface", "lo", ["lo"])):
        (parameter,) = (each for each in command.params if each.name == name)
        assert [item.value for item in parameter.shell_complete(context, start)] == expected


def test_unknown_option_is_refused() -> None:
    with pytest.raises(click.NoSuchOption):
        spec_of("--wokers", "1", "--", "x")


@pytest.mark.parametrize(
    ("arguments", "available", "words"),
    [
        (("--", "x"), None, "The number of workers is not known"),
        (("--", "x"), 2, "1 chief + 1 ps, and Slurm gives 2 tasks. Give --workers N."),
        (("--workers", "3", "--", "x"), 4, "need 5 tasks, but Slurm gives 4"),
    ],
)
def test_counts_that_do_not_fit_slurm_are_refused(
    arguments: tuple[str, ...], available: int | None, words: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        spec_of(*arguments, available=available)
    assert words in str(caught.value)
