"""Slurm as sites configure it: on each variant of the lab the main job trains, the map is right, and jobs end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import CHILD, NAMES, ROLES, TF4SLURM, Job
from tests.processes import child_of, wait_until, wait_until_gone
from tests.slurm.lab import LabError, SlurmLab
from tests.slurm.test_layouts import LayoutRunner
from tests.slurm.test_run import make_job

ROOT = Path(__file__).parents[2]
SHOW_GRANTS = Path(__file__).with_name("show_grants.py")
WRAPPERS = Path(__file__).with_name("wrappers")
SLOW = Path(__file__).with_name("slow_prolog.sh")
CPUS = os.cpu_count() or 1

AUTH_SLURM = "auth/slurm in place of MUNGE"
LIMITS = "limits of a QOS, and MaxArraySize"
LIMIT = "MaxTRESPerJob=cpu=8 flags=DenyOnLimit"

SITES: dict[str, dict[str, Any]] = {
    "task/affinity and task/cgroup with all limits": {
        "cpus": CPUS,  # real ones, because tasks are bound to them
        "proctrack": "cgroup",
        "constrain": True,
        "extra_conf": "TaskPlugin=task/affinity,task/cgroup",
    },
    "MpiDefault=pmi2": {"extra_conf": "MpiDefault=pmi2"},
    "MpiDefault=pmix": {"extra_conf": "MpiDefault=pmix"},
    "LaunchParameters=use_interactive_step": {"extra_conf": "LaunchParameters=use_interactive_step"},
    "PrologFlags=Alloc,Contain,X11": {"proctrack": "cgroup", "extra_conf": "PrologFlags=Alloc,Contain,X11"},
    "configless": {"configless": True, "extra_conf": "SlurmctldParameters=enable_configless"},
    "SelectType=select/linear": {"extra_conf": "SelectType=select/linear\nSelectTypeParameters=CR_Memory"},
    "OverSubscribe=EXCLUSIVE": {"extra_conf": "PartitionName=debug Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE"},
    "slow Prolog and TaskProlog": {"extra_conf": f"PrologFlags=Alloc\nProlog={SLOW}\nTaskProlog={SLOW}"},
    "hosts with other names than their nodes": {"host_suffix": ".lab.example", "resolve_names": False},
    "IPv6 only": {"ip_version": 6, "extra_conf": "CommunicationParameters=EnableIPv6,DisableIPv4"},
    AUTH_SLURM: {"extra_conf": "AuthType=auth/slurm\nCredType=auth/slurm\nAuthInfo=cred_expire=10"},
    LIMITS: {
        "accounting": True,
        "extra_conf": "AccountingStorageEnforce=associations,limits,qos\nMaxArraySize=2",
    },
    "srun wrapped by a script": {"programs": WRAPPERS},
}
WITHOUT_GPUS = ("SelectType=select/linear",)  # there srun itself refuses them
IN_EACH_RUN = ("task/affinity and task/cgroup with all limits", "configless")


def site_id(name: str) -> str:
    """Return the name of a site in the names of its tests."""
    return name.replace(" ", "-")


def parameters() -> Iterator[Any]:
    for name in SITES:
        yield pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.long, id=site_id(name))


@pytest.fixture(scope="module", params=parameters())
def site(request: pytest.FixtureRequest, slurm: None) -> Iterator[SlurmLab]:
    name = request.param
    if name == AUTH_SLURM and not [*Path("/usr/lib").glob("*/slurm-wlm/auth_slurm.so")]:
        pytest.skip("This Slurm has no auth/slurm: it came with 23.11.")
    if name == LIMITS:
        request.getfixturevalue("accounting")
    with SlurmLab(**SITES[name]) as lab:
        if name == "MpiDefault=pmix":
            listed = lab.run("srun", "--mpi=list")
            if "pmix" not in listed.stdout + listed.stderr:  # on standard error until Slurm 22.05
                pytest.skip("This Slurm has no PMIx, or its library is not installed.")
        if name == LIMITS:
            for command in ("add account lab", "add user root account=lab", f"modify qos normal set {LIMIT}"):
                lab.run("sacctmgr", "-i", *command.split())
        yield lab


@pytest.fixture
def job(site: SlurmLab, tmp_path: Path) -> Iterator[Job]:
    with make_job(tmp_path, site) as job:
        yield job
    site.cancel_all()


@pytest.mark.keras
@pytest.mark.timeout(300)
def test_main_job_trains(site: SlurmLab, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorflow") is None:  # without importing it here
        pytest.skip("pip install tensorflow-cpu, or tf4slurm[cpu]")
    train = (sys.executable, str(ROOT / "TUTORIALS" / "train_digits.py"), "--epochs", "1")
    command = (TF4SLURM, "run", "--runs-directory", str(tmp_path / "runs"), *ROLES, "--", *train)
    done = site.run(
        "salloc", "-Q", "-N4", "-n4", "--mem=4000", *command, cwd=tmp_path, timeout_seconds=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"accuracy: 0\.\d+", done.stdout), done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "line",
    [
        "srun -l -N3 -n5 -m cyclic TASK",
        "salloc -Q -N4 -n8 --ntasks-per-node=2 srun -l --overlap -N2 -n3 -r1 -m block TASK",
        "srun -l -n4 -m arbitrary -w r1-n10,gpu-09,r1-n10,r1-n2 TASK",
    ],
)
def test_each_task_knows_the_node_of_each_rank(site: SlurmLab, tmp_path: Path, line: str) -> None:
    try:
        (step,) = LayoutRunner(tmp_path).run(site, line)
    except LabError as error:
        if "can not load PMIx library" in str(error):
            pytest.skip("srun itself cannot use PMIx here: its library is not installed.")
        raise
    step.check(is_in_environ=None)


@pytest.mark.timeout(300)
def test_cluster_spec_has_the_addresses_of_the_hosts(site: SlurmLab, job: Job) -> None:
    job.start(*ROLES, prefix=("salloc", "-Q", "-N4", "-n4"))
    children = {name: job.wait_for_child(name, timeout_seconds=120) for name in NAMES}
    job.end_child("chief-0")
    assert job.wait(60) == 0, job.stderr
    assert len({child["host"] for child in children.values()}) == 4
    for name, child in children.items():
        role, _, index = name.partition("-")
        address = child["config"]["cluster"][role][int(index)].rpartition(":")[0].strip("[]")
        node = child["environ"]["SLURMD_NODENAME"]
        assert f" {address}/" in site.on(node, "ip", "-o", "addr", "show", "eth0").stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [("-N4", "-n4"), ("-N2", "--ntasks-per-node=2")], ids=" ".join)
def test_tasks_have_what_slurm_granted(
    site: SlurmLab, tmp_path: Path, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """CPUs, memory limits and GPU devices on each node are those of tasks that srun starts itself."""
    has_gpus = request.node.callspec.params["site"] not in WITHOUT_GPUS
    allocate = ("salloc", "-Q", *options, "--mem=500", *(("--gres=gpu:2",) if has_gpus else ()))
    granted = {}
    for name, start in {
        "srun": ("srun", "-Q", "--mpi=none"),
        "tf4slurm": (TF4SLURM, "run", "--runs-directory", str(tmp_path / "runs"), "--ps", "0", "--no-chief", "--"),
    }.items():
        directory = tmp_path / name
        directory.mkdir()
        show = (sys.executable, str(SHOW_GRANTS), str(directory), str(site.directory / "dev"))
        site.wait_idle()  # so that both get the same nodes
        site.run(*allocate, *start, *show, timeout_seconds=120)
        grants = [json.loads(path.read_text()) for path in directory.glob("[0-9].json")]
        assert len(grants) == 4
        granted[name] = sorted(grants, key=lambda grant: (grant["node"], grant["cpus"]))
    ours = [grant.pop("gpus") for grant in granted["tf4slurm"]]
    theirs = [grant.pop("gpus") for grant in granted["srun"]]
    assert granted["tf4slurm"] == granted["srun"]
    if has_gpus:
        assert set(theirs) == {"0,1"}
        assert sorted(ours) == (["0", "0", "1", "1"] if "-N2" in options else ["0,1"] * 4)
    else:
        assert set(theirs) == {None}


@pytest.mark.timeout(300)
def test_job_ends_with_the_exit_code_of_the_task_that_failed(site: SlurmLab, job: Job, process_mark: str) -> None:
    job.start(*ROLES, prefix=("salloc", "-Q", "-N4", "-n4"))
    for name in NAMES:
        job.wait_for_child(name, timeout_seconds=120)
    os.kill(child_of("ps/0"), 9)
    assert job.wait(60) == 137
    assert job.stderr.count("Root cause:") == 1
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.timeout(300)
def test_cancelled_batch_job_ends_on_all_hosts(site: SlurmLab, job: Job, process_mark: str) -> None:
    command = (TF4SLURM, "run", "--runs-directory", str(job.directory / "runs"), *ROLES, "--")
    script = job.directory / "job.sh"
    script.write_text(f"#!/bin/bash\nexec {shlex.join([*command, sys.executable, str(CHILD), str(job.children)])}\n")
    output = job.directory / "slurm.out"
    job_id = site.run("sbatch", "--parsable", "-N4", "-n4", "-o", output, script).stdout.strip()
    for name in NAMES:
        job.wait_for_child(name, timeout_seconds=120)
    site.run("scancel", job_id)
    assert site.wait_for_job(job_id)[0] == "CANCELLED"
    assert wait_until((job.run_directory / "result.json").exists, 60)
    assert job.result["exit_code"] == 143
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.parametrize("site", [pytest.param(LIMITS, marks=pytest.mark.long, id=site_id(LIMITS))], indirect=True)
def test_job_beyond_the_limits_of_the_site_is_refused(site: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = (
        TF4SLURM,
        "submit",
        "-N",
        "4",
        "--cpus-per-task",
        "3",
        "--workers",
        "2",
        "--",
        sys.executable,
        "train.py",
    )
    done = site.run(*command, cwd=tmp_path, check=False)
    assert done.returncode == 4
    assert "sbatch: error: " in done.stderr
    assert "policy" in done.stderr
