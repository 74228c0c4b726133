"""The sources of a process's cluster spec, and the properties of ServerDictionary."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.processes import wait_until
from tf4slurm.cluster import Task
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.script_client import tf4slurm_sidecar
from tf4slurm.server_dictionary import ServerDictionary, current_server_dictionary, set_current_server_dictionary
from tf4slurm.system.proc import is_stopped

CLUSTER = {"worker": ["h:3", "h:4"], "ps": ["h:1"], "chief": ["h:2"]}


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_argument_overrides_kept_cluster_which_overrides_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert current_server_dictionary() == (CLUSTER, "ps", 0)
    set_current_server_dictionary(ServerDictionary(CLUSTER, "worker", 1))
    assert current_server_dictionary() == (CLUSTER, "worker", 1)
    assert current_server_dictionary(({"ps": ("a:1",)}, "ps", 0)) == ({"ps": ["a:1"]}, "ps", 0)


def test_given_cluster_that_is_no_tuple_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a tuple \(cluster, task_type, task_index\)"):
        current_server_dictionary({"ps": ["a:1"], "worker": ["b:1"], "chief": ["c:1"]})  # type: ignore[arg-type]


def test_process_without_a_cluster_is_an_error() -> None:
    with pytest.raises(SlurmEnvironmentError, match="get_server_dictionary") as caught:
        current_server_dictionary()
    assert caught.value.variable == "TF_CONFIG"


def test_all_tasks_but_the_ps_train_and_the_first_is_chief() -> None:
    tasks = (Task("chief", 0), Task("worker", 0), Task("worker", 1))
    assert ServerDictionary(CLUSTER, "ps", 0).training_tasks == tasks
    assert [ServerDictionary(CLUSTER, *task).is_chief for task in tasks] == [True, False, False]
    assert not ServerDictionary(CLUSTER, "ps", 0).is_chief
    assert ServerDictionary({"ps": ["h:1"], "worker": ["h:2"]}, "worker", 0).is_chief


@pytest.fixture
def stopped_sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setattr(tf4slurm_sidecar, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(tf4slurm_sidecar, "_POLL_SECONDS", 0.1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sidecar:
        os.kill(sidecar.pid, signal.SIGSTOP)
        assert wait_until(functools.partial(is_stopped, sidecar.pid), 60)
        yield sidecar
        sidecar.kill()


def test_sidecar_that_is_stopped_before_it_answers_is_not_awaited(stopped_sidecar: subprocess.Popen[str]) -> None:
    assert tf4slurm_sidecar.read_line(stopped_sidecar, 300) == ""


def test_stopped_sidecar_is_killed_at_the_end_of_the_script(stopped_sidecar: subprocess.Popen[str]) -> None:
    tf4slurm_sidecar.end_script_sidecar(stopped_sidecar, os.getpid(), runs_service=False)
    assert stopped_sidecar.returncode == -signal.SIGKILL
