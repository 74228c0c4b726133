"""`JobSpec`: values derived from its options, and the values that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from tf4slurm.agent.rendezvous import spec_from_environ, spec_to_environ
from tf4slurm.errors import OptionError
from tf4slurm.spec.job_spec import JobSpec, StopSignal
from tf4slurm.system.exec_child import STOP_SIGNALS


def test_spec_survives_arguments_and_json() -> None:
    default = JobSpec(("true",), workers=2)
    assert JobSpec(default.command, **json.loads(json.dumps(default.to_json()))) == default
    spec = JobSpec(("python", "train.py"), workers=2, ports=(4000, 4001), runs_directory=Path("/runs"), chief=False)
    assert JobSpec(spec.command, **json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.to_arguments() == [
        *("--workers", "2", "--no-chief", "--name", "train", "--runs-directory", "/runs", "--ports", "4000-4001")
    ]


@pytest.mark.parametrize("ports", [40000, "40000", [40000], (40000,)])
def test_ports_may_be_a_number_a_text_or_a_list(ports: Any) -> None:
    assert JobSpec(("true",), workers=1, ports=ports).ports == (40000,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": "two"}, "--workers: 'two' is not an integer."),
        ({"ports": ["a"]}, "--ports: 'a' is not a range of ports"),
        ({"ports": (70000,)}, "--ports: '70000' is not a range of ports"),
        ({"name": "a/b"}, "--name 'a/b' has a slash"),
        ({"workers": 1.5}, "--workers: 1.5 is not an integer."),
        ({"chief": "perhaps"}, "--chief: 'perhaps' is not true or false."),
        ({"start_timeout_seconds": float("inf")}, "--start-timeout: inf is not a finite number."),
        ({"srun": ["label", 3]}, "--srun: ['label', 3] is not a list of texts."),
    ],
)
def test_invalid_value_is_refused_with_its_option(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        JobSpec(("true",), **values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("command", "named", "python"),
    [
        (("python", "train.py"), None, "python"),
        (("/opt/tf/bin/python3.11", "train.py"), None, "/opt/tf/bin/python3.11"),
        (("python", "train.py"), "/opt/tf/bin/python3", "/opt/tf/bin/python3"),
        (("bash", "train.sh"), "python3", "python3"),
        (("bash", "train.sh"), None, ""),
        (("python-wrapper", "train.py"), None, ""),
    ],
)
def test_data_service_python_is_as_given_or_of_the_command(
    command: tuple[str, ...], named: str | None, python: str
) -> None:
    assert JobSpec(command, workers=1, data_python=named).data_service_python == python


@pytest.mark.parametrize(
    ("ports", "control_port", "expected"),
    [((), None, ()), ((4000, 4001), None, (4001, 4000)), ((4000, 4001), 5000, (5000,)), ((), 5000, (5000,))],
)
def test_control_service_tries_control_port_or_the_ports_from_the_last(
    ports: tuple[int, ...], control_port: int | None, expected: tuple[int, ...]
) -> None:
    spec = JobSpec(("true",), workers=1, ports=ports, control_port=control_port)
    assert spec.service_ports == expected


def test_many_ports_are_short_in_the_environment_of_the_agents() -> None:
    spec = JobSpec(("true",), workers=1, ports=tuple(range(20_000, 65_536)))
    environ = spec_to_environ(spec, Path("runs"))
    assert max(map(len, environ.values())) < 4_000
    assert spec_from_environ(spec.command, environ)[0] == spec
    assert spec.to_json()["ports"] == "20000-65535"


def test_stop_signals_of_options_and_processes_are_the_same() -> None:
    assert get_args(StopSignal) == tuple(number.name for number in STOP_SIGNALS)


@pytest.mark.parametrize(
    ("num_tasks", "spec", "seconds"),
    [
        (1, JobSpec(), 1),
        (100, JobSpec(), 1),
        (250, JobSpec(), 2.5),
        (1_000, JobSpec(), 4),
        (100_000, JobSpec(), 4),
        (100_000, JobSpec(heartbeat_timeout_seconds=60), 24),
        (1_000, JobSpec(heartbeat_timeout_seconds=60), 10),
        (1_000, JobSpec(heartbeat_timeout_seconds=2), 1),
        (1_000, JobSpec(heartbeat_interval_seconds=7), 7),
        (4, JobSpec(heartbeat_interval_seconds=0.05), 0.05),
    ],
)
def test_heartbeat_interval_grows_with_the_tasks_up_to_half_the_timeout(
    num_tasks: int, spec: JobSpec, seconds: float
) -> None:
    assert spec.heartbeat_interval_of(num_tasks) == seconds
