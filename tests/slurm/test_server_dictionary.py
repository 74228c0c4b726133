"""get_server_dictionary() on the lab: scripts under plain srun get the same cluster spec, on every layout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.lab import SlurmLab

ROLES = ["ps", "worker", "worker", "worker"]
SCRIPT = """
import json, os, socket, sys
{imports}
answer = {call}
own = answer[0][answer[1]][answer[2]]
listener = socket.create_server(("", int(own.rpartition(":")[2])), reuse_port=True)  # as TensorFlow's server does
print(json.dumps([int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"], *answer]))
"""


OTHER_SERVER = """
import json, os, socket, sys
from tf4slurm import *
answer = {call}
own = answer[0][answer[1]][answer[2]]
server = socket.socket()
for option in {options}:
    server.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
server.bind(("", int(own.rpartition(":")[2])))
server.listen()
print(json.dumps([int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"], *answer]))
"""


def run(
    lab: SlurmLab, directory: Path, call: str, *options: str, imports: str = "from tf4slurm import *", **environ: str
) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"
    script.write_text(SCRIPT.format(imports=imports, call=call))
    return lab.run("srun", "-Q", *options, sys.executable, script, env=environ, cwd=directory, check=False)


def answers(result: subprocess.CompletedProcess[str]) -> list[list[Any]]:
    """Return [rank, node, cluster, task type, index] of each task, in rank order; all must have the same cluster."""
    assert result.returncode == 0, result.stderr
    found = sorted(json.loads(line) for line in result.stdout.splitlines())
    assert all(answer[2] == found[0][2] for answer in found)
    return found


def check_addresses(lab: SlurmLab, found: list[list[Any]], network: str = "10.78.0.") -> None:
    """Check that each task's address belongs to the node it runs on, and that no two are equal."""
    numbers = {node: number for number, node in enumerate(lab.nodes, 1)}
    for _, node, cluster, task_type, index in found:
        assert cluster[task_type][index].rpartition(":")[0] == f"{network}{numbers[node]}"
    addresses = [address for role in found[0][2].values() for address in role]
    assert len(set(addresses)) == len(addresses) == len(found)


@pytest.mark.parametrize(
    "options",
    [
        ("-N4", "-n8", "-m", "block"),
        ("-N4", "-n8", "-m", "cyclic"),
        ("-N4", "-n8", "-m", "plane=2"),
        ("-N3", "-n7", "-m", "block"),
        ("-w", "r1-n9,r1-n9,r1-n2,gpu-09", "-n4", "-m", "arbitrary"),
    ],
)
def test_cluster_spec_is_correct_on_every_layout(tmp_path: Path, lab: SlurmLab, options: tuple[str, ...]) -> None:
    count = int(next(option for option in options if option.startswith("-n"))[2:])
    roles = ["ps"] + ["worker"] * (count - 1)
    found = answers(run(lab, tmp_path, f"get_server_dictionary({roles})", *options))
    check_addresses(lab, found)
    assert [answer[3] for answer in found] == roles


def test_cluster_spec_is_correct_over_the_components_of_a_heterogeneous_step(tmp_path: Path, lab: SlurmLab) -> None:
    script = tmp_path / "script.py"
    call = f"get_server_dictionary({['ps', 'ps', 'worker', 'worker', 'worker']})"
    script.write_text(SCRIPT.format(imports="from tf4slurm import *", call=call))
    one = ("-N1", "-n2", "-w", "r1-n10", sys.executable, script)
    other = ("-N2", "-n3", "-m", "cyclic", "-w", "gpu-09,r1-n2", sys.executable, script)
    result = lab.run("srun", "-Q", *one, ":", *other, cwd=tmp_path, check=False)
    found = answers(result)
    check_addresses(lab, found)
    assert [answer[1] for answer in found if answer[3] == "ps"] == ["r1-n10", "r1-n10"]


@pytest.mark.parametrize(
    ("hold_ports", "options", "is_possible"),
    [
        ("auto", ["SO_REUSEADDR"], True),  # TensorFlow 1.15
        ("always", ["SO_REUSEADDR"], False),
        ("never", [], True),
    ],
)
def test_server_without_reuse_port_gets_the_held_port(
    tmp_path: Path, lab: SlurmLab, hold_ports: str, options: list[str], is_possible: bool
) -> None:
    script = tmp_path / "script.py"
    call = f"get_server_dictionary({ROLES}, hold_ports={hold_ports!r})"
    script.write_text(OTHER_SERVER.format(call=call, options=options))
    result = lab.run("srun", "-Q", "-N4", "-n4", sys.executable, script, cwd=tmp_path, check=False)
    if is_possible:
        check_addresses(lab, answers(result))
    else:
        assert result.returncode == 1
        assert "Address already in use" in result.stderr


def test_infiniband_interface_gives_the_addresses_of_its_network(tmp_path: Path, lab: SlurmLab) -> None:
    found = answers(run(lab, tmp_path, f"get_server_dictionary({ROLES}, infiniband=True)", "-N4", "-n4"))
    check_addresses(lab, found, network="172.29.0.")


@pytest.mark.long
def test_interface_missing_on_all_hosts_is_an_error_in_every_task(tmp_path: Path, lab: SlurmLab) -> None:
    result = run(lab, tmp_path, f"get_server_dictionary({ROLES}, interface='ib7')", "-N4", "-n4")
    assert result.returncode == 1
    assert result.stderr.count("Interface 'ib7' does not exist on node") >= 4, result.stderr
    assert "TimeoutExpired" not in result.stderr


def test_counts_of_roles_may_be_spread_over_nodes(tmp_path: Path, lab: SlurmLab) -> None:
    call = "get_server_dictionary({'ps': 4, 'worker': 4}, placement='spread')"
    found = answers(run(lab, tmp_path, call, "-N4", "-n8"))
    check_addresses(lab, found)
    assert sorted(answer[1] for answer in found if answer[3] == "ps") == sorted(lab.nodes)
    assert [path.name for path in tmp_path.glob("runs/step-*/*")] == ["logs"]


@pytest.mark.parametrize("ports", ["range(20000, 65536)", "range(20000, 60000, 2)"])
def test_many_ports_are_accepted_or_refused_in_words(tmp_path: Path, lab: SlurmLab, ports: str) -> None:
    result = run(lab, tmp_path, f"get_server_dictionary({ROLES}, ports={ports})", "-N4", "-n4")
    if "2)" in ports:
        assert "20,000 single ports and ranges are too many" in result.stderr
    else:
        check_addresses(lab, answers(result))


def test_task_that_does_not_register_is_named(tmp_path: Path, lab: SlurmLab) -> None:
    imports = "from tf4slurm import *\nif os.environ['SLURM_PROCID'] == '2': sys.exit(0)"
    result = run(lab, tmp_path, f"get_server_dictionary({ROLES}, timeout_seconds=10)", "-N4", "-n4", imports=imports)
    assert result.returncode == 1
    assert result.stderr.count("RendezvousTimeoutError: ") == 3
    assert "worker/1 (rank 2) did not register" in result.stderr


def test_unknown_role_is_named(tmp_path: Path, lab: SlurmLab) -> None:
    result = run(lab, tmp_path, "get_server_dictionary({'ps': 1, 'trainer': 1})", "-N2", "-n2")
    assert "'trainer' is not a role here" in result.stderr


def test_number_of_roles_must_equal_number_of_tasks(tmp_path: Path, lab: SlurmLab) -> None:
    result = run(lab, tmp_path, "get_server_dictionary(['ps', 'worker'])", "-N3", "-n3")
    assert "2 roles were given, but the step has 3 tasks" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "tfserver", "network"),
    [
        (str(ROLES), None, "10.78.0."),
        (f"{ROLES}, InfiniBand=True", None, "172.29.0."),
        (f"TensorFlowServerTasks={ROLES}, InfinyBand=True", None, "172.29.0."),
        (f"ListOfTFTasks={ROLES}", "172.29.0.3\n172.29.0.1\n172.29.0.4\n172.29.0.2", "172.29.0."),
    ],
)
def test_old_name_gives_the_correct_order(
    tmp_path: Path, lab: SlurmLab, arguments: str, tfserver: str | None, network: str
) -> None:
    environ = {"TFSERVER": tfserver} if tfserver else {}
    imports = "import tf4slurm.ServerDictionary"
    call = f"tf4slurm.ServerDictionary.GetServerDictionary({arguments})"
    result = run(lab, tmp_path, call, "-N4", "-n4", imports=imports, **environ)
    found = answers(result)
    check_addresses(lab, found, network)
    assert result.stderr.count("DeprecationWarning") == 4


def test_tasks_bypass_a_proxy(tmp_path: Path, lab: SlurmLab) -> None:
    call = f"(*get_server_dictionary({ROLES}), os.environ['no_proxy'])"
    found = answers(run(lab, tmp_path, call, "-N4", "-n4", http_proxy="http://10.78.0.99:3128", no_proxy="localhost"))
    hosts = {address.rpartition(":")[0] for role in found[0][2].values() for address in role}
    assert {frozenset(answer[5].split(",")) for answer in found} == {frozenset({"localhost", *hosts})}


def test_cluster_spec_under_an_agent_is_the_launchers(tmp_path: Path, lab: SlurmLab) -> None:
    script = tmp_path / "script.py"
    stay = """
import pathlib, time
pathlib.Path(f"printed-{os.environ['SLURM_PROCID']}").touch()
while len(list(pathlib.Path().glob("printed-*"))) < 4:  # the ps is ended once the workers are
    time.sleep(0.05)
"""
    script.write_text(SCRIPT.format(imports="from tf4slurm import *", call=f"get_server_dictionary({ROLES})") + stay)
    tf4slurm = str(Path(sys.executable).with_name("tf4slurm"))
    command = (tf4slurm, "run", "--no-chief", "--ps", "1", "--workers", "3", "--", sys.executable, str(script))
    result = lab.run("salloc", "-Q", "-N4", "-n4", *command, cwd=tmp_path)
    lines = [line.partition(" | ")[2] for line in result.stdout.splitlines() if " | [" in line]
    assert len(lines) == 4
    check_addresses(lab, sorted(json.loads(line) for line in lines))


def test_cluster_spec_without_rendezvous_is_computed_from_the_environment(tmp_path: Path, lab: SlurmLab) -> None:
    call = f"get_server_dictionary({['ps'] + ['worker'] * 7}, interface='{{{{host}}}}-ib', exchange=False)".replace(
        "{{host}}", "{host}"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os\nfrom tf4slurm import *\n"
        f"print(json.dumps([int(os.environ['SLURM_PROCID']), os.environ['SLURMD_NODENAME'], *{call}]))\n"
    )
    result = lab.run("srun", "-Q", "-N4", "-n8", "-m", "cyclic", sys.executable, script, cwd=tmp_path)
    found = answers(result)
    for _, node, cluster, task_type, index in found:
        assert cluster[task_type][index].rpartition(":")[0] == f"{node}-ib"
    addresses = [address for role in found[0][2].values() for address in role]
    assert len(set(addresses)) == 8


def test_env_prints_the_cluster_spec_of_a_task(tmp_path: Path, lab: SlurmLab) -> None:
    tf4slurm = str(Path(sys.executable).with_name("tf4slurm"))
    command = ("srun", "-Q", "-N2", "-n3", "-w", "r1-n9,r1-n10", "-m", "cyclic", "--gres=gpu:1")
    shown = lab.run(*command, "bash", "-c", '"$0" env --json --interface ib0 > $SLURM_PROCID', tf4slurm, cwd=tmp_path)
    assert shown.returncode == 0
    descriptions = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    for rank, seen in enumerate(descriptions):
        assert seen["step"]["rank"] == rank
        assert seen["nodes_by_rank"] == ["r1-n9", "r1-n10", "r1-n9"]
        assert seen["nodes_by_rank"][rank] == seen["step"]["node"]
        assert seen["address"] == {"r1-n9": "172.29.0.2", "r1-n10": "172.29.0.3"}[seen["step"]["node"]]
        assert seen["warnings"] == []
    line = '"$0" env --json --tasks ps,worker,worker > $SLURM_PROCID'
    lab.run(*command, "bash", "-c", line, tf4slurm, cwd=tmp_path)
    configs = [json.loads((tmp_path / str(rank)).read_text())["tf_config"] for rank in range(3)]
    assert [config["task"] for config in configs] == [
        {"type": "ps", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert [address.partition(":")[0] for address in configs[0]["cluster"]["worker"]] == ["r1-n10", "r1-n9"]
    assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
    text = lab.run("srun", "-Q", "-N1", "-n2", "-w", "r1-n9", tf4slurm, "env", cwd=tmp_path).stdout
    assert re.search(r"^Nodes\n +r1-n9 +ranks? 0-1$", text, re.MULTILINE), text


def test_node_names_that_are_no_host_names_are_supported(tmp_path: Path, slurm: None) -> None:
    """Node names do not resolve, and host names differ from them."""
    with SlurmLab(host_suffix=".lab.example", resolve_names=False) as lab:
        found = answers(run(lab, tmp_path, f"get_server_dictionary({ROLES})", "-N4", "-n4"))
        check_addresses(lab, found)


OUTLIVES = """
import atexit, os, time
atexit.register(lambda: print(time.monotonic() - ended, flush=True))  # the last to be called
from tf4slurm import get_server_dictionary
get_server_dictionary(["ps", "worker"])
time.sleep(3 * int(os.environ["SLURM_PROCID"]))
ended = time.monotonic()
"""


def test_rank_0_waits_for_a_task_whose_script_outlives_its_own(tmp_path: Path, lab: SlurmLab) -> None:
    script = tmp_path / "script.py"
    script.write_text(OUTLIVES)
    result = lab.run("srun", "-Q", "-N2", "-n2", sys.executable, str(script), cwd=tmp_path)
    seconds = list(map(float, result.stdout.split()))
    assert len(seconds) == 2
    assert max(seconds) < 12  # from the end of a script to the exit of its process; a missing task would cost 15 s
    assert result.stderr == ""


def test_two_simultaneous_steps_have_separate_cluster_specs(tmp_path: Path, lab: SlurmLab) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(imports="from tf4slurm import *", call=f"get_server_dictionary({ROLES})"))
    step = f"srun -Q --overlap -N4 -n4 {sys.executable} {script}"
    result = lab.run("salloc", "-Q", "-N4", "-n4", "bash", "-c", f"{step} >one & {step} >two; wait", cwd=tmp_path)
    assert result.returncode == 0
    addresses_of_steps = []
    for name in ("one", "two"):
        found = sorted(json.loads(line) for line in (tmp_path / name).read_text().splitlines())
        check_addresses(lab, found)
        addresses_of_steps.append({address for role in found[0][2].values() for address in role})
    assert not addresses_of_steps[0] & addresses_of_steps[1]
