"""SlurmClusterResolver on recorded and handwritten environments, compared with TensorFlow's class."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest

from tests.captures import CAPTURES, Capture, capture_of
from tests.servers import free_ports
from tests.unit.test_slurm_captures import may_refuse
from tf4slurm.errors import LayoutError, PlacementError, SlurmEnvironmentError, Tf4SlurmError
from tf4slurm.slurm.environ import SlurmStep

tf = pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")
from tf4slurm import SlurmClusterResolver  # noqa: E402

TensorFlows = tf.distribute.cluster_resolver.SlurmClusterResolver
NOWHERE = {"PATH": "/nowhere"}  # without sattach, only the environment is used


@contextlib.contextmanager
def environment(environ: Mapping[str, str]) -> Iterator[None]:
    with mock.patch.dict(os.environ, {**environ, **NOWHERE}, clear=True):
        yield


def by_hand(nodelist: str, tasks_per_node: str, count: int, rank: int = 0, **variables: str) -> dict[str, str]:
    """Return only the variables that TensorFlow's class reads."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        **variables,
    }


def spec_of(resolver: Any) -> dict[str, list[str]]:
    spec: dict[str, list[str]] = resolver.cluster_spec().as_dict()
    return spec


def true_hosts(spec: Mapping[str, list[str]], capture: Capture) -> bool:
    addresses = [address for name in sorted(spec) for address in spec[name]]
    return tuple(address.rpartition(":")[0] for address in addresses) == capture.nodes_by_rank


# Recorded steps


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_default_cluster_spec_is_correct_or_refused(capture: Capture) -> None:
    specs = []
    for rank, environ in enumerate(capture.environs):
        with environment(environ):
            if may_refuse(capture, SlurmStep.from_environ(environ)):
                with pytest.raises(LayoutError):
                    SlurmClusterResolver()
                continue
            resolver = SlurmClusterResolver()
            specs.append(spec_of(resolver))
            assert (resolver.task_type, resolver.task_id) == resolver.get_task_info() == ("worker", rank)
    assert all(true_hosts(spec, capture) and len(set(spec["worker"])) == len(spec["worker"]) for spec in specs)
    assert all(spec == specs[0] for spec in specs)


def test_cluster_spec_equals_tensorflows_where_that_is_correct() -> None:
    is_right = []
    for capture in CAPTURES:
        count = len(capture.environs)
        jobs = {"worker": count} if count == 1 else {"worker": count - 1, "ps": 1}
        for environ in capture.environs:
            most = max(SlurmStep.from_environ(environ).tasks_per_node)
            arguments = (jobs, 1337, most, 1, None, False)
            with environment(environ):
                theirs = TensorFlows(*arguments)
                expected = spec_of(theirs)
                is_right.append(true_hosts(expected, capture))
                if not is_right[-1] or may_refuse(capture, SlurmStep.from_environ(environ)):
                    continue
                ours = SlurmClusterResolver(*arguments)
                assert list(spec_of(ours).items()) == list(expected.items())
                assert ours.get_task_info() == theirs.get_task_info()
                assert ours.master() == theirs.master()
                assert ours.num_accelerators() == theirs.num_accelerators()
    assert 0 < sum(is_right) < len(is_right)


@pytest.mark.parametrize(
    ("name", "jobs", "expected"),
    [
        ("gres-gpu2", None, ["0", "0", "1", "0,1"]),  # three tasks on one node of two, one on the other
        ("gres-gpu2", {"ps": 1, "worker": 3}, ["-1", "0", "1", "0,1"]),
        ("gpu-two-jobs-second", None, ["2", "3"]),  # 0 and 1 are another job's
        ("gpus-total3", None, ["0", "1", "0"]),
        ("gpus-per-task1", None, ["0", "1", "2", "0"]),
        ("gpu-bind-map", None, ["3", "2", "1", "0"]),
        ("ntasks-per-gpu", None, ["0", "1", "0", "1"]),
        ("gpu-two-steps-worker", None, ["1,2,3"]),
    ],
)
def test_gpus_are_those_that_slurm_granted(name: str, jobs: dict[str, int] | None, expected: list[str]) -> None:
    seen = []
    for environ in capture_of(name).environs:
        with environment(environ):
            resolver = SlurmClusterResolver(jobs)
            resolver.cluster_spec()
            resolver.cluster_spec()  # the GPUs are divided only once
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
            assert os.environ["ROCR_VISIBLE_DEVICES"] == seen[-1]
            assert resolver.num_accelerators() == {"GPU": len(seen[-1].replace("-1", "").replace(",", ""))}
            SlurmClusterResolver(jobs).cluster_spec()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == seen[-1]
    assert seen == expected


def test_hidden_gpus_stay_hidden() -> None:
    for environ in capture_of("gres-gpu2").environs:
        with environment({**environ, "CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}):
            SlurmClusterResolver({"ps": 1, "worker": 3}, gpus_per_task=1).cluster_spec()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_environment_is_unchanged_without_auto_set_gpu(capture: Capture) -> None:
    environ = capture.environs[0]
    with environment(environ):
        before = dict(os.environ)
        with contextlib.suppress(LayoutError):
            SlurmClusterResolver(auto_set_gpu=False).cluster_spec()
        assert dict(os.environ) == before


def test_environment_is_unchanged_in_a_step_without_gpus() -> None:
    environ = capture_of("even-2x3").environs[0]
    with environment(environ):
        resolver = SlurmClusterResolver({"ps": 2, "worker": 4})
        resolver.cluster_spec()
        assert resolver.num_accelerators() == {"GPU": 0}
        assert dict(os.environ) == {**environ, **NOWHERE}


# The examples of TensorFlow's documentation, and the cases of its tests


def test_basic_example_of_tensorflow() -> None:
    """2 nodes with 2 tasks and 4 GPUs each."""
    gpus = []
    for rank in range(4):
        with environment(by_hand("t02n13,t02n41", "2(x2)", 4, rank, CUDA_VISIBLE_DEVICES="0,1,2,3")):
            assert spec_of(SlurmClusterResolver()) == {
                "worker": ["t02n13:8888", "t02n13:8889", "t02n41:8888", "t02n41:8889"]
            }
            gpus.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert gpus == ["0,1", "2,3", "0,1", "2,3"]


@pytest.mark.parametrize("more", [{}, {"tasks_per_node": 2, "gpus_per_node": 2}])
def test_advanced_example_of_tensorflow(more: dict[str, Any]) -> None:
    infos = []
    for rank in range(4):
        with environment(by_hand("t02n13,t02n41", "2(x2)", 4, rank, CUDA_VISIBLE_DEVICES="0,1,2,3")):
            jobs = {"ps": 1, "worker": 3}
            resolver = SlurmClusterResolver(jobs, port_base=1337, gpus_per_task=1, auto_set_gpu=False, **more)
            assert spec_of(resolver) == {
                "ps": ["t02n13:1337"],
                "worker": ["t02n13:1338", "t02n41:1337", "t02n41:1338"],
            }
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
            assert resolver.num_accelerators() == {"GPU": 1}
            infos.append(resolver.get_task_info())
    assert infos == [("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]


@pytest.mark.parametrize(("per_node", "per_task"), [(2, 1), (4, 2), (4, None), (5, None), (8, 3)])
@pytest.mark.parametrize("rank", range(5))
def test_gpus_not_granted_by_slurm_are_numbered_as_in_tensorflow(
    rank: int, per_node: int, per_task: int | None
) -> None:
    environ = by_hand("n[1-3]", "2(x2),1", 5, rank, CUDA_VISIBLE_DEVICES="")
    arguments = ({"ps": 1, "worker": 4}, 8888, per_node, per_task)
    answers = []
    for kind in (TensorFlows, SlurmClusterResolver):
        with environment(environ):
            resolver = kind(*arguments)
            answers.append((spec_of(resolver), os.environ["CUDA_VISIBLE_DEVICES"], resolver.num_accelerators()))
    assert answers[0] == answers[1]


def test_tasks_share_gpus_if_there_are_too_few() -> None:
    shown = []
    for rank in range(4):
        with environment(by_hand("n1", "4", 4, rank)):
            SlurmClusterResolver(gpus_per_node=2).cluster_spec()
            shown.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert shown == ["0", "0", "1", "1"]


def test_zero_gpus_can_be_requested() -> None:
    with environment(by_hand("n[1-2]", "1(x2)", 2)):
        resolver = SlurmClusterResolver(gpus_per_node=0, gpus_per_task=0)
        assert spec_of(resolver) == {"worker": ["n1:8888", "n2:8888"]}
        assert resolver.num_accelerators() == {"GPU": 0}


def test_arguments_are_those_of_tensorflow() -> None:
    theirs = list(inspect.signature(TensorFlows).parameters.values())
    ours = list(inspect.signature(SlurmClusterResolver).parameters.values())
    assert [(one.name, one.default) for one in ours[:7]] == [(one.name, one.default) for one in theirs]
    assert [one.name for one in ours[7:]] == ["interface", "infiniband"]
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in ours[7:])
    assert {name for name in dir(TensorFlows) if not name.startswith("__")} <= set(dir(SlurmClusterResolver))


def test_master_and_settable_attributes() -> None:
    with environment(by_hand("n[1-3]", "1(x3)", 3)):
        resolver = SlurmClusterResolver({"ps": 1, "worker": 2})
        assert isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver)
        assert (resolver.environment, resolver.rpc_layer) == ("", "grpc")
        assert resolver.master() == "grpc://n1:8888"
        resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "ab"
        assert resolver.master() == "ab://n3:8888"
        assert resolver.master("ps", 0, rpc_layer="test") == "test://n1:8888"
        resolver.rpc_layer = None
        assert resolver.master("worker", 0) == "n2:8888"
        resolver.task_type = None
        assert resolver.master() == ""
        union = tf.distribute.cluster_resolver.UnionResolver(SlurmClusterResolver({"ps": 1, "worker": 2}))
        assert union.task_type == "ps"


# Refusals


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"jobs": {"worker": 4}}, PlacementError, "have 4 tasks, but there are 3"),
        ({"tasks_per_node": {"n1": 2, "n2": 2}}, PlacementError, "have 3 tasks, but there are 4"),
        ({"gpus_per_node": 2, "gpus_per_task": 2}, PlacementError, "need 4 on the fullest node"),
    ],
)
def test_arguments_that_do_not_match_the_step_are_refused(
    arguments: dict[str, Any], kind: type[Tf4SlurmError], words: str
) -> None:
    with environment(by_hand("n[1-2]", "2,1", 3)), pytest.raises(kind, match=words):
        SlurmClusterResolver(**arguments)


def test_missing_variable_is_named_outside_of_a_step() -> None:
    with environment({}), pytest.raises(SlurmEnvironmentError, match="SLURM_PROCID is not set"):
        SlurmClusterResolver()


def test_tasks_per_node_that_contradicts_slurm_is_refused() -> None:
    capture = capture_of("gres-gpu2")  # three tasks on gpu-09, one on gpu-10
    message = r"Slurm placed \{'gpu-09': 3, 'gpu-10': 1\} .* but \{'gpu-09': 2, 'gpu-10': 2\} was given\. Omit it\."
    with environment(capture.environs[0]), pytest.raises(PlacementError, match=message):
        SlurmClusterResolver(tasks_per_node=2)
    for counts in ({"gpu-09": 3, "gpu-10": 1}, {"gpu-10": 1, "gpu-09": 3}):
        with environment(capture.environs[0]):
            assert true_hosts(spec_of(SlurmClusterResolver(tasks_per_node=counts)), capture)


# Subclasses


class FromElsewhere:
    """The extension points, to be mixed into either class; the hosts are unordered, as in a set."""

    rank = 0
    hosts: tuple[str, ...] = ("b", "a", "c")

    def _resolve_own_rank(self) -> int:
        return self.rank

    def _resolve_num_tasks(self) -> int:
        return 2 * len(self.hosts)

    def _resolve_hostlist(self) -> list[str]:
        return list(self.hosts)

    def _resolve_task_configuration(self) -> dict[str, int]:
        return dict.fromkeys(self.hosts, 2)


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("arguments", [{}, {"tasks_per_node": 2}, {"jobs": {"ps": 2, "worker": 4}}])
def test_subclass_with_its_own_ranks_gets_tensorflows_cluster_spec(rank: int, arguments: dict[str, Any]) -> None:
    answers = []
    for base in (TensorFlows, SlurmClusterResolver):
        kind = type("Resolver", (FromElsewhere, base), {"rank": rank})
        with environment({}):
            resolver = kind(gpus_per_node=4, **arguments)
            answers.append((spec_of(resolver), resolver.get_task_info(), os.environ["CUDA_VISIBLE_DEVICES"]))
    assert answers[0] == answers[1]


def test_subclass_whose_ranks_contradict_its_host_is_refused() -> None:
    hosts = ("0-first", socket.gethostname())
    kind = type("Resolver", (FromElsewhere, SlurmClusterResolver), {"hosts": hosts})
    with environment({}), pytest.raises(LayoutError, match="the cluster spec puts it on '0-first'"):
        kind()


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("name", ["nonlex-9-10", "uneven-n7-cyclic", "cyclic-4n10-c3"])
def test_subclass_may_rename_the_nodes(name: str, turn: int) -> None:
    class Fast(SlurmClusterResolver):
        def _resolve_task_configuration(self) -> dict[str, int]:
            found = super()._resolve_task_configuration()
            return {f"{host}-ib": found[host] for host in list(found)[::turn]}

    capture = capture_of(name)
    with environment(capture.environs[0]):
        spec = spec_of(Fast())
    assert [address.rpartition("-ib:")[0] for address in spec["worker"]] == list(capture.nodes_by_rank)


@pytest.mark.parametrize(
    ("names", "is_listed"),
    [
        (["10.0.0.1", "10.0.0.2"], True),
        (["10.0.0.9", "10.0.0.10"], False),  # TensorFlow would reverse them
        (["10.0.0.1"], False),
        (["r1-n9-ib", "10.0.0.2"], False),
    ],
)
def test_renamed_nodes_without_a_common_pattern_need_every_order(names: list[str], is_listed: bool) -> None:
    class Numbers(SlurmClusterResolver):
        def _resolve_task_configuration(self) -> dict[str, int]:
            return dict(zip(names, (3, 1) if len(names) > 1 else (4,), strict=True))

    capture = capture_of("nonlex-9-10")
    assert capture.nodes_by_rank == ("r1-n9", "r1-n9", "r1-n9", "r1-n10")
    with environment(capture.environs[0]):
        if is_listed:
            addresses = spec_of(Numbers())["worker"]
            assert [address.rpartition(":")[0] for address in addresses] == [names[0]] * 3 + [names[1]]
        else:
            with pytest.raises(LayoutError, match="are not the nodes"):
                Numbers()


# Under an agent, and with a network


@pytest.mark.parametrize("jobs", [None, {"worker": 1, "ps": 1}])
def test_cluster_spec_under_an_agent_is_the_launchers(jobs: dict[str, int] | None) -> None:
    cluster = {"ps": ["10.1.0.4:4001"], "worker": ["10.1.0.5:4002"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    environ = {"TF4SLURM_TASK": "worker/0", "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "3"}
    with environment(environ):
        resolver = SlurmClusterResolver(jobs)
        assert spec_of(resolver) == cluster
        assert resolver.get_task_info() == ("worker", 0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        with pytest.raises(PlacementError, match="was launched with"):
            SlurmClusterResolver({"worker": 2})


def test_interface_gives_all_tasks_the_same_addresses_and_ports(tmp_path: Any) -> None:
    environ = {
        **by_hand("n1", "1", 1),
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": "n1",
    }
    with pytest.MonkeyPatch.context() as patch, environment(environ):
        patch.chdir(tmp_path)
        resolver = SlurmClusterResolver(interface="lo", port_base=21337)
        assert spec_of(resolver) == {"worker": ["127.0.0.1:21337"]}
        assert os.environ["TF_GRPC_REUSE_PORT"] == "true"


# With real training

PROGRAM = """
import sys
import tensorflow as tf
from tf4slurm import SlurmClusterResolver

resolver = SlurmClusterResolver({"chief": 1, "ps": 1, "worker": 1}, port_base=int(sys.argv[1]))
if resolver.task_type != "chief":
    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    total = tf.Variable(0.0)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
for _ in range(3):
    coordinator.schedule(tf.function(lambda: total.assign_add(2.0)))
coordinator.join()
print("total", float(total), total.device)
"""


@pytest.mark.long
def test_parameter_server_strategy_trains_with_the_resolver() -> None:
    """Start local processes in the faked environment of a step of three tasks."""
    port = free_ports(3)
    processes = []
    for rank in range(3):
        fake = {"SLURM_GTIDS": "0,1,2", "SLURM_LOCALID": str(rank), "SLURMD_NODENAME": "localhost"}
        step = {**by_hand("localhost", "3", 3, rank), **fake, "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
        command = [sys.executable, "-c", PROGRAM, str(port)]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(
            subprocess.Popen(command, env={**os.environ, **step, **quiet}, stdout=pipe, stderr=subprocess.DEVNULL)
        )
    try:
        output, _ = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert output.decode().strip() == "total 6.0 /job:ps/replica:0/task:0/device:CPU:0"
