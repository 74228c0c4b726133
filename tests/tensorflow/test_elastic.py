"""Workers that join, leave, fail and move during a training, with real TensorFlow processes on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

from tf4slurm.cluster import Address  # noqa: E402
from tf4slurm.tensorflow.elastic import let_workers_change  # noqa: E402
from tf4slurm.tensorflow.elastic_connections import shut_down_connections  # noqa: E402

ROOT = Path(__file__).parents[2]
EVENTS = 25


def run(*arguments: object, limit_seconds: int = 120) -> str:
    """Run a scenario of elastic_training.py in another process, which checks it; return the output."""
    command = [sys.executable, "-m", "tests.tensorflow.elastic_training", *map(str, arguments)]
    environ = os.environ | {"LIMIT_SECONDS": str(limit_seconds)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=limit_seconds + 20)
    assert (done.returncode, "passed" in done.stdout) == (0, True), f"{done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout


def test_training_goes_on_during_random_changes() -> None:
    assert run("random_changes", 1, 8)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 10))
def test_training_goes_on_during_many_random_changes(seed: int) -> None:
    assert run("random_changes", seed, EVENTS, limit_seconds=150)


@pytest.mark.parametrize("losses", [0, 2])
def test_training_without_changes_uses_tensorflows_own_handler(losses: int) -> None:
    assert run("tensorflow_works_alone", losses)


def test_one_of_several_lost_workers_returns() -> None:
    assert run("lost_workers_return")


def test_worker_whose_first_closure_fails_is_left_out() -> None:
    assert run("unusable_worker_is_left_out")


def test_request_that_was_not_parsed_is_sent_again() -> None:
    assert run("unparsed_request_is_sent_again")


def test_training_goes_on_while_an_iterator_is_deleted() -> None:
    assert run("training_goes_on_while_an_iterator_is_deleted")


def test_stopped_worker_leaves() -> None:
    assert run("stopped_worker_leaves")


@pytest.mark.long
def test_stopped_workers_move_and_return() -> None:
    assert run("stopped_workers_move_and_return", limit_seconds=150)


def test_result_of_a_moved_worker_is_computed_again() -> None:
    assert run("results_of_a_moved_worker")


def test_newcomer_has_datasets_and_tables() -> None:
    assert run("resources_on_newcomers")


def test_newcomer_trains_shards() -> None:
    assert run("shards_for_newcomers")


@pytest.mark.keras
def test_newcomer_takes_part_in_fit() -> None:
    assert run("keras_for_newcomers")


def test_functions_are_traced_during_updates() -> None:
    assert run("functions_are_traced_during_updates")


def test_newcomer_trains_within_seconds() -> None:
    output = run("first_step_of_a_newcomer")
    assert output.count("first steps") == 3
    print(output)


@pytest.mark.parametrize("version", ["2.15.1", "2.22.0", "3.0.0"])
def test_other_version_of_tensorflow_reports_reason(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "__version__", version)
    sent: dict[str, str] = {}

    class FakeChannel:
        def send(self, **changes: str) -> None:
            sent.update(changes)

    let_workers_change(None, {}, FakeChannel())  # type: ignore[arg-type]
    reason = f"TensorFlow {version} is not one of the versions whose workers can change: 2.16 to 2.21"
    assert sent == {"workers_error": reason}


def test_connections_to_an_address_are_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        address = Address("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(address) as shut, socket.create_connection(other.getsockname()) as kept:
            descriptors = os.listdir("/proc/self/fd")
            shut_down_connections([address])
            assert os.listdir("/proc/self/fd") == descriptors
            assert shut.recv(1) == b""
            kept.send(b"a")
            assert other.accept()[0].recv(1) == b"a"
