"""The values of a cluster; TF_CONFIG, cluster specs and placeholders made from them."""

from __future__ import annotations

import json
import logging

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.cli.submit import script
from tf4slurm.cluster import Address, Cluster, Member, Task, fill_in, format_tasks
from tf4slurm.errors import OptionError

MEMBERS = (
    Member(0, Task("worker", 1), "n2", Address("10.0.0.2", 4001)),
    Member(1, Task("worker", 0), "n1", Address("10.0.0.1", 4001)),
    Member(2, Task("ps", 0), "n2", Address("fd00::2", 4002)),
    Member(3, Task("evaluator", 0), "n1", Address("10.0.0.1", 4003)),
    Member(4, Task("chief", 0), "n1", Address("10.0.0.1", 4004)),
    Member(5, Task("data-worker", 1), "n1", Address("10.0.0.1", 4005)),
    Member(6, Task("data-worker", 0), "n2", Address("10.0.0.2", 4005)),
    Member(7, Task("data-dispatcher", 0), "n1", Address("10.0.0.1", 4006)),
)
SPEC = {"chief": ["10.0.0.1:4004"], "ps": ["[fd00::2]:4002"], "worker": ["10.0.0.1:4001", "10.0.0.2:4001"]}
HOSTS = {"chief": ["c:1"], "ps": ["a:1", "[::1]:2"], "worker": ["b:3"]}
FLAGS = ("--ps={ps_hosts}", "--workers={worker_hosts}", "--job={task_type}", "--index={task_index}")


def test_task_is_written_with_a_slash() -> None:
    assert str(Task("worker", 3)) == "worker/3"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.1.0.4:40123", Address("10.1.0.4", 40123)),
        ("n003.site.org:1", Address("n003.site.org", 1)),
        ("[fd00::2]:65535", Address("fd00::2", 65535)),
    ],
)
def test_address_is_parsed_and_formatted(text: str, address: Address) -> None:
    assert Address.from_text(text) == address
    assert str(address) == text


@given(host=st.ip_addresses().map(str), port=st.integers(1, 65535))
def test_address_survives_the_round_trip(host: str, port: int) -> None:
    assert Address.from_text(str(Address(host, port))) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":4001", "[]:4001", "host:0", "host:65536", "host:-1", "h:4x"])
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match='expected "host:port" with a port from 1 to 65535') as caught:
        Address.from_text(text)
    assert repr(text) in str(caught.value)


def test_nodes_are_listed_once_in_rank_order() -> None:
    assert Cluster(MEMBERS).nodes == ("n2", "n1")


@pytest.mark.parametrize(("members", "has_chief"), [(MEMBERS, True), (MEMBERS[:4], False)])
def test_has_chief(members: tuple[Member, ...], has_chief: bool) -> None:
    assert Cluster(members).has_chief is has_chief


def test_cluster_spec_is_in_index_order_without_evaluator_and_data_service() -> None:
    assert Cluster(MEMBERS).to_dictionary() == SPEC


def test_data_service_is_beside_the_cluster_spec() -> None:
    assert Cluster(MEMBERS).to_services() == {
        "data-dispatcher": ["10.0.0.1:4006"],
        "data-worker": ["10.0.0.2:4005", "10.0.0.1:4005"],
    }
    assert Cluster(MEMBERS[:5]).to_services() == {}


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: str(member.task))
def test_tf_config_has_the_cluster_spec_and_the_task(member: Member) -> None:
    config = json.loads(Cluster(MEMBERS).to_tf_config(member.task))
    assert config == {"cluster": SPEC, "task": {"type": member.task.task_type, "index": member.task.task_index}}


@pytest.mark.parametrize(
    ("count", "text"), [(1, "worker/0"), (2, "worker/0 and worker/1"), (3, "worker/0, worker/1 and worker/2")]
)
def test_tasks_are_joined_in_a_sentence(count: int, text: str) -> None:
    assert format_tasks(Task("worker", index) for index in range(count)) == text


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{ps_hosts}", "a:1,[::1]:2"),
        ("--to={job_name}/{task_index}", "--to=ps/1"),
        ("{{task_type}}", "{ps}"),
        ("{worker_hosts}{chief_hosts}", "b:3c:1"),
        ("{PS_HOSTS} { ps_hosts } {ps_hosts", "{PS_HOSTS} { ps_hosts } {ps_hosts"),
        ('{"a": {}, "b": "{name}"} ${x}', '{"a": {}, "b": "{name}"} ${x}'),
    ],
)
def test_only_exact_placeholders_are_filled_in(word: str, filled: str) -> None:
    assert fill_in((word,), HOSTS, Task("ps", 1)) == (filled,)


def test_filled_in_value_is_not_expanded_again() -> None:
    assert fill_in(("{ps_hosts}",), {"ps": ["{task_index}:1"]}, Task("ps", 0)) == ("{task_index}:1",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "2"), "give --no-chief, else add {chief_hosts}"),
        (("--single",), "--single has no cluster to fill in"),
    ],
)
def test_placeholders_without_chief_or_cluster_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(script, [*arguments, "--", "python", "train.py", *FLAGS], obj={})
    assert isinstance(done.exception, OptionError) or done.exit_code == 2
    assert message in " ".join([str(done.exception), *done.output.split()])


def test_script_has_the_command_of_one_task() -> None:
    arguments = ["--no-chief", "--ps", "1", "--workers", "2", "--", "python", "train.py", *FLAGS]
    text = CliRunner().invoke(script, arguments, obj={}).output
    assert (
        "# Each task gets its own values; worker/0 runs:\n"
        "#   python train.py --ps=HOST:PORT --workers=HOST:PORT,HOST:PORT --job=worker --index=0\n"
    ) in text
    assert "'--ps={ps_hosts}'" in text.splitlines()[-1]


def test_misspelled_placeholder_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CliRunner().invoke(script, ["--workers", "2", "--", "python", "x.py", "{ps_host}", "{name}"], obj={})
    assert [record.getMessage() for record in caplog.records] == [
        "{ps_host} in the command is not a placeholder; did you mean {ps_hosts}?"
    ]
