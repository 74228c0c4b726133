"""`tf4slurm run` and `tf4slurm task` on four hosts of a real Slurm."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import CHILD, TF4SLURM, Job
from tests.processes import marked_processes, read_process, wait_until, wait_until_gone
from tests.slurm.lab import SlurmLab

ROLES = ("--ps", "1", "--workers", "2")
NAMES = ("chief-0", "ps-0", "worker-0", "worker-1")
SALLOC = ("salloc", "-Q", "-N4", "-n4")


def make_job(directory: Path, lab: SlurmLab) -> Job:
    return Job(
        directory, lambda command, **options: lab.popen(*command, stdout=options["stdout"], stderr=options["stderr"])
    )


@pytest.fixture
def job(tmp_path: Path, lab: SlurmLab) -> Iterator[Job]:
    with make_job(tmp_path, lab) as job:
        yield job


def submit(lab: SlurmLab, directory: Path, *lines: str, options: tuple[str, ...] = ("-N4", "-n4")) -> str:
    """Submit a batch script of these lines; return the job's id."""
    script = directory / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return lab.run("sbatch", "--parsable", *options, "-o", directory / "slurm.out", script).stdout.strip()


def children_by_host(job: Job) -> dict[str, str]:
    return {name: job.wait_for_child(name)["host"] for name in NAMES}


def test_salloc_runs_one_task_per_host(job: Job, lab: SlurmLab) -> None:
    job.start(*ROLES, prefix=SALLOC)
    hosts = children_by_host(job)
    assert sorted(hosts.values()) == sorted(lab.nodes)
    cluster = job.wait_for_child("chief-0")["config"]["cluster"]
    for name, host in hosts.items():
        role, _, index = name.partition("-")
        address = cluster[role][int(index)].rpartition(":")[0]
        assert address in lab.on(host, "ip", "-4", "addr", "show", "eth0").stdout
    job.end_child("chief-0")
    assert job.wait() == 0


def test_many_ports_fit_into_the_environment_of_the_agents(job: Job) -> None:
    job.start("--ps", "0", "--workers", "0", "--ports", "20000-39999", prefix=("salloc", "-Q", "-n1"))
    (addresses,) = job.wait_for_child("chief-0")["config"]["cluster"].values()
    assert 20000 <= int(addresses[0].rpartition(":")[2]) < 40000
    job.end_child("chief-0")
    assert job.wait() == 0


def test_interface_option_selects_the_network(job: Job, lab: SlurmLab) -> None:
    job.start(*ROLES, "--interface", "ib0", prefix=SALLOC)
    cluster = job.wait_for_child("worker-1")["config"]["cluster"]
    job.end_child("chief-0")
    assert job.wait() == 0
    addresses = [address for role in cluster.values() for address in role]
    assert all(address.startswith("172.29.0.") for address in addresses)


def test_interface_missing_on_one_node_ends_job_and_is_named(job: Job, lab: SlurmLab) -> None:
    lab.on("r1-n9", "ip", "link", "set", "ib0", "down")
    try:
        job.start(*ROLES, "--interface", "ib0", prefix=SALLOC)
        assert job.wait() == 3
    finally:
        lab.on("r1-n9", "ip", "link", "set", "ib0", "up")
    assert "r1-n9" in job.stderr.partition("Root cause:")[2]
    assert "eth0" in job.stderr.partition("Found:")[2]
    assert list(job.children.iterdir()) == []


def test_batch_job_completes_with_exit_code_of_chief(tmp_path: Path, lab: SlurmLab) -> None:
    for code, state in ((0, "COMPLETED"), (3, "FAILED")):
        directory = tmp_path / str(code)
        directory.mkdir()
        job = make_job(directory, lab)
        job.end_child("chief-0", code)
        runs = directory / "runs"
        command = [TF4SLURM, "run", "--runs-directory", str(runs), *ROLES, "--", sys.executable, str(CHILD)]
        job_id = submit(lab, directory, f"exec {shlex.join([*command, str(job.children)])}")
        assert lab.wait_for_job(job_id) == (state, f"{code}:0")
        assert job.result["exit_code"] == code
        assert job.run_directory.name == f"child-{job_id}"


def test_killed_ps_ends_job_on_all_hosts(job: Job) -> None:
    job.start(*ROLES, prefix=SALLOC)
    children_by_host(job)
    kill_child("ps-0")
    assert job.wait(40) == 137  # not after the heartbeat timeout
    assert job.stderr.count("Root cause:") == 1


def test_killed_worker_is_restarted_in_place(job: Job) -> None:
    job.start(*ROLES, prefix=SALLOC)
    children_by_host(job)
    kill_child("worker-0")
    again = job.wait_for_child("worker-0", number=2)
    assert again["host"] == job.wait_for_child("worker-0")["host"]
    job.end_child("chief-0")
    assert job.wait() == 0


def kill_child(name: str) -> None:
    os.kill(child_id(name), signal.SIGKILL)


def child_id(name: str) -> int:
    """Return the process id of a test child on this host, which differs from the id on its lab host."""
    task = f"TF4SLURM_TASK={name.replace('-', '/')}".encode()
    (found,) = [
        process.pid
        for process in marked_processes(os.environ["TF4SLURM_TEST_MARK"])
        if task in read_process(process.pid, "environ").split(b"\0") and "child.py" in process.command
    ]
    return found


def test_killed_launcher_leaves_no_process_on_any_host(job: Job, process_mark: str) -> None:
    job.start(*ROLES, prefix=SALLOC)
    children_by_host(job)
    (launcher,) = [
        p for p in marked_processes(process_mark) if "tf4slurm run" in p.command and "salloc" not in p.command
    ]
    os.kill(launcher.pid, signal.SIGKILL)
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_task_on_disconnected_host_is_lost_and_its_agent_ends_its_child(
    job: Job, lab: SlurmLab, process_mark: str
) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "3", "--heartbeat-interval", "0.5", prefix=SALLOC)
    host = children_by_host(job)["ps-0"]
    lab.partition(host)
    try:
        assert job.wait() == 7
        assert "it sent no heartbeat for 3 s" in job.stderr
        assert wait_until_gone(process_mark, timeout_seconds=30) == []
    finally:
        lab.heal(host)
        lab.wait_idle()


def test_unreachable_node_is_found_before_the_children_start(job: Job, lab: SlurmLab) -> None:
    """The hosts reach the launcher, but not each other on the requested network."""
    lab.on("gpu-09", "ip", "addr", "del", "172.29.0.4/16", "dev", "ib0")
    lab.on("gpu-09", "ip", "addr", "add", "192.0.2.4/24", "dev", "ib0")
    try:
        job.start(*ROLES, "--interface", "ib0", "--start-timeout", "20", prefix=SALLOC)
        assert job.wait() == 6
    finally:
        lab.on("gpu-09", "ip", "addr", "del", "192.0.2.4/24", "dev", "ib0")
        lab.on("gpu-09", "ip", "addr", "add", "172.29.0.4/16", "dev", "ib0")
    assert list(job.children.iterdir()) == []
    assert "gpu-09" in job.stderr.partition("Root cause:")[2]


def test_task_that_never_registers_is_named(job: Job) -> None:
    """One host has no Python, so its agent cannot start."""
    broken = 'if [ "$SLURMD_NODENAME" = r1-n10 ]; then exec sleep 1000; fi; exec "$@"'
    wrapper = job.directory / "bin" / "srun"
    wrapper.parent.mkdir()
    wrapper.write_text(
        "#!/bin/bash\n"
        "# srun as it is, but the agents start through a shell that never starts one of them\n"
        'options=(); while [[ "$1" == --* ]]; do options+=("$1"); shift; done\n'
        f'exec /usr/bin/srun "${{options[@]}}" bash -c {shlex.quote(broken)} bash "$@"\n'
    )
    wrapper.chmod(0o755)
    job.start(*ROLES, "--start-timeout", "4", prefix=("env", f"PATH={wrapper.parent}:{os.environ['PATH']}", *SALLOC))
    assert job.wait() == 6
    assert "did not register" in job.stderr
    assert "(rank " in job.stderr.partition("Root cause:")[2]
    assert list(job.children.iterdir()) == []


def test_two_jobs_on_the_same_hosts_are_independent(tmp_path: Path, lab: SlurmLab) -> None:
    jobs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs.append(make_job(tmp_path / name, lab))
        jobs[-1].start(*ROLES, prefix=SALLOC)
    clusters = [job.wait_for_child("chief-0")["config"]["cluster"] for job in jobs]
    addresses = [{a for role in cluster.values() for a in role} for cluster in clusters]
    assert not addresses[0] & addresses[1]
    jobs[0].end_child("chief-0", 5)
    assert jobs[0].wait() == 5
    assert jobs[1].process is not None
    assert jobs[1].process.poll() is None
    jobs[1].end_child("chief-0")
    assert jobs[1].wait() == 0


def test_two_jobs_in_one_allocation(tmp_path: Path, lab: SlurmLab) -> None:
    for directory in (tmp_path / "1", tmp_path / "2"):
        directory.mkdir()
    first, second = make_job(tmp_path / "1", lab), make_job(tmp_path / "2", lab)
    lines = []
    for job, code in ((first, 4), (second, 0)):
        job.end_child("chief-0", code)
        command = [
            TF4SLURM,
            "run",
            "--runs-directory",
            str(tmp_path / "runs"),
            *ROLES,
            "--",
            sys.executable,
            str(CHILD),
        ]
        lines.append(f"{shlex.join([*command, str(job.children)])} &")
    job_id = submit(lab, tmp_path, *lines, "wait %1; echo first $?; wait %2; echo second $?")
    assert lab.wait_for_job(job_id) == ("COMPLETED", "0:0")
    output = (tmp_path / "slurm.out").read_text()
    assert "first 4" in output
    assert "second 0" in output


@pytest.mark.parametrize("code", [0, 3])
def test_tasks_form_a_cluster_without_a_launcher(job: Job, lab: SlurmLab, code: int) -> None:
    runs = str(job.directory / "runs")
    command = [TF4SLURM, "task", "--runs-directory", runs, "--ps", "1", "--", sys.executable, str(CHILD)]
    step = lab.popen("srun", "-Q", "-N4", "-n4", *command, str(job.children), stdout=subprocess.DEVNULL)
    assert sorted(children_by_host(job).values()) == sorted(lab.nodes)
    job.end_child("chief-0", code)
    assert step.wait(60) == code
    assert job.result["exit_code"] == code


def test_several_tasks_per_host(job: Job, lab: SlurmLab) -> None:
    job.start("--ps", "3", "--workers", "8", prefix=("salloc", "-Q", "-N4", "--ntasks-per-node=3"))
    cluster = job.wait_for_child("worker-7")["config"]["cluster"]
    addresses = [address for role in cluster.values() for address in role]
    assert len(set(addresses)) == 12
    assert len({address.rpartition(":")[0] for address in addresses}) == 4
    job.end_child("chief-0")
    assert job.wait() == 0


def test_roles_that_do_not_fit_are_refused_before_srun(job: Job) -> None:
    job.start("--ps", "2", "--workers", "9", prefix=SALLOC)
    assert job.wait() == 2
    assert "12 tasks, but Slurm gives 4" in job.stderr


def test_refusal_of_srun_is_shown_verbatim(job: Job) -> None:
    job.start(*ROLES, prefix=("env", "SLURM_JOB_ID=999999", "SLURM_NTASKS=4"))
    assert job.wait() == 3
    assert "srun: error:" in job.stderr.partition("Root cause:")[2]


def test_scancel_ends_everything(tmp_path: Path, lab: SlurmLab, process_mark: str) -> None:
    job = make_job(tmp_path, lab)
    command = [TF4SLURM, "run", "--runs-directory", str(tmp_path / "runs"), *ROLES, "--", sys.executable, str(CHILD)]
    job_id = submit(lab, tmp_path, f"exec {shlex.join([*command, str(job.children)])}")
    children_by_host(job)
    lab.run("scancel", job_id)
    assert wait_until((job.run_directory / "result.json").exists, 60)
    assert job.result["exit_code"] == 143
    assert lab.wait_for_job(job_id)[0] == "CANCELLED"
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


@pytest.mark.parametrize("shell", [("srun", "-N1", "-n1"), ("srun", "-N1", "-n1", "-c1", "-m", "block", "--pty")])
def test_job_in_a_shell_in_a_step_has_the_tasks_of_the_allocation(
    job: Job, lab: SlurmLab, shell: tuple[str, ...]
) -> None:
    """`srun --pty bash` is itself a step, which has one task and holds the CPUs."""
    job.start(*ROLES, prefix=(*SALLOC, *shell))
    assert sorted(children_by_host(job).values()) == sorted(lab.nodes)
    found = job.wait_for_child("worker-1")["environ"]
    assert found["SLURM_STEP_NUM_TASKS"] == "4"
    job.end_child("chief-0")
    assert job.wait() == 0


def test_spread_puts_each_ps_on_its_own_node(job: Job, lab: SlurmLab) -> None:
    job.start("--ps", "4", "--workers", "3", "--placement", "spread", prefix=("salloc", "-Q", "-N4", "-n8"))
    hosts = [job.wait_for_child(f"ps-{index}")["host"] for index in range(4)]
    assert sorted(hosts) == sorted(lab.nodes)
    job.end_child("chief-0")
    assert job.wait() == 0


def test_files_in_the_users_directory_do_not_replace_standard_modules(job: Job) -> None:
    directory = job.directory / "cwd"
    directory.mkdir()
    for name in ("json.py", "queue.py", "grpc.py"):
        (directory / name).write_text("raise SystemExit('not the real one')\n")
    job.start(*ROLES, prefix=("env", "-C", str(directory), *SALLOC))
    children_by_host(job)
    job.end_child("chief-0")
    assert job.wait() == 0


LEAVES_PROCESSES = """
sleep 1001 & setsid sleep 1002 & (setsid setsid sleep 1003 &)
sh -c "trap '' TERM HUP INT; sleep 1004; sleep 1005" &
exec "$@"
"""
"""A grandchild, one in another session, a daemon, and one that ignores signals."""


def left_behind(mark: str, host: str) -> list[str]:
    return [str(p) for p in marked_processes(mark) if p.host == host and p.command.startswith(("sleep", "sh "))]


def wait_for_leftovers(mark: str, host: str) -> None:
    assert wait_until(lambda: len(left_behind(mark, host)) >= 5, 60), left_behind(mark, host)


@pytest.mark.parametrize("target", ["agent", "guard"])
def test_killed_agent_or_guard_leaves_no_process_of_its_script_before_the_step_ends(
    job: Job, process_mark: str, target: str
) -> None:
    command = ("bash", "-c", LEAVES_PROCESSES, "bash", sys.executable, str(CHILD), str(job.children))
    job.start(*ROLES, prefix=SALLOC, command=command)
    host = children_by_host(job)["worker-1"]
    wait_for_leftovers(process_mark, host)
    agent = psutil.Process(child_id("worker-1")).parent()
    assert agent is not None
    (launcher,) = [p for p in marked_processes(process_mark) if p.command.split()[1:3] == [TF4SLURM, "run"]]
    os.kill(launcher.pid, signal.SIGSTOP)  # the step continues
    try:
        (agent if target == "agent" else psutil.Process(agent.ppid())).kill()
        assert wait_until(lambda: not left_behind(process_mark, host), 30), left_behind(process_mark, host)
    finally:
        os.kill(launcher.pid, signal.SIGCONT)
    assert job.wait() == 7
    assert f"worker/1 on {host} is lost" in job.stderr.partition("Root cause:")[2]


@pytest.mark.parametrize("target", ["chief-0", "worker-1"])
def test_killed_agent_of_a_task_without_a_launcher_leaves_no_process(
    job: Job, lab: SlurmLab, process_mark: str, target: str
) -> None:
    options = (
        "--runs-directory",
        str(job.directory / "runs"),
        "--ps",
        "1",
        "--heartbeat-timeout",
        "10",
        "--heartbeat-interval",
        "0.5",
    )
    command = (TF4SLURM, "task", *options, "--", "bash", "-c", LEAVES_PROCESSES, "bash", sys.executable, str(CHILD))
    step = lab.popen("srun", "-Q", "-N4", "-n4", *command, str(job.children), stdout=subprocess.DEVNULL)
    host = children_by_host(job)[target]
    wait_for_leftovers(process_mark, host)
    os.kill(psutil.Process(child_id(target)).ppid(), signal.SIGKILL)
    assert wait_until(lambda: not left_behind(process_mark, host), 30), left_behind(process_mark, host)
    assert step.wait(30) == 7
    assert job.result["exit_code"] == 7
    assert job.result["cause"] == target.replace("-", "/")  # for rank 0, another task writes the result
    assert not (job.run_directory / "control.json").exists()


def test_failed_evaluator_without_a_launcher_does_not_change_the_exit_code(job: Job, lab: SlurmLab) -> None:
    roles = ("--ps", "1", "--workers", "1", "--evaluators", "1", "--max-worker-restarts", "0")
    options = ("--runs-directory", str(job.directory / "runs"), *roles)
    command = (TF4SLURM, "task", *options, "--", sys.executable, str(CHILD), str(job.children))
    step = lab.popen("srun", "-Q", "-N4", "-n4", *command, stdout=subprocess.DEVNULL)
    job.wait_for_child("chief-0")
    job.wait_for_event("not_restarted", "evaluator/0")  # it fails: child.py looks for its port in the cluster spec
    job.end_child("chief-0")
    assert step.wait(60) == job.result["exit_code"] == 0


@pytest.mark.parametrize("stopped", ["chief-0", "worker-1"])
def test_stopped_task_without_a_launcher_does_not_delay_srun(job: Job, lab: SlurmLab, stopped: str) -> None:
    options = (
        "--runs-directory",
        str(job.directory / "runs"),
        "--ps",
        "1",
        "--heartbeat-timeout",
        "10",
        "--heartbeat-interval",
        "0.5",
    )
    command = [TF4SLURM, "task", *options, "--", sys.executable, str(CHILD), str(job.children)]
    step = lab.popen("srun", "-Q", "-N4", "-n4", *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children_by_host(job)
    os.kill(psutil.Process(child_id(stopped)).ppid(), signal.SIGSTOP)
    assert step.wait(60) != 0


@pytest.mark.parametrize(
    ("requested", "options", "expected"),
    [
        ("--gres=gpu:2", (), {"worker-0": "0", "worker-1": "1", "ps-0": "-1", "chief-0": "-1"}),
        ("--gres=gpu:4", (), {"worker-0": "0,1", "worker-1": "2,3", "ps-0": "-1", "chief-0": "-1"}),
        ("--gres=gpu:4", ("--gpus-per-worker", "1"), {"worker-0": "0", "worker-1": "1"}),
        ("--gres=gpu:1", (), {"worker-0": "0", "worker-1": "0"}),
    ],
)
def test_workers_share_the_gpus_that_slurm_granted(
    job: Job, requested: str, options: tuple[str, ...], expected: dict[str, str]
) -> None:
    job.start(*ROLES, *options, prefix=("salloc", "-Q", "-N2", "--ntasks-per-node=2", requested))
    seen = {name: job.wait_for_child(name) for name in NAMES}
    job.end_child("chief-0")
    assert job.wait() == 0
    assert seen["worker-0"]["host"] == seen["worker-1"]["host"]
    devices = {name: child["environ"]["CUDA_VISIBLE_DEVICES"] for name, child in seen.items()}
    assert devices.items() >= expected.items()


def test_too_many_gpus_end_job_with_the_reason(job: Job) -> None:
    job.start(*ROLES, "--gpus-per-worker", "2", prefix=("salloc", "-Q", "-N2", "--ntasks-per-node=2", "--gres=gpu:2"))
    assert job.wait() == 2
    assert "2 GPUs for each of 2 tasks are 4" in job.stderr.partition("Root cause:")[2]


def test_ps_run_on_their_own_component(job: Job, lab: SlurmLab) -> None:
    roles = ("--no-chief", "--ps", "1", "--workers", "2", "--placement", "ps,worker,worker")
    runs = ("--runs-directory", str(job.directory / "runs"))
    task = [TF4SLURM, "task", *runs, *roles, "--", sys.executable, str(CHILD), str(job.children)]
    components = ("-N1", "-n1", "-w", "r1-n10", *task, ":", "-N2", "-n2", "-w", "gpu-09,r1-n2", *task)
    step = lab.popen("srun", "-Q", *components, stdout=subprocess.DEVNULL)
    hosts = {name: job.wait_for_child(name)["host"] for name in ("ps-0", "worker-0", "worker-1")}
    assert hosts["ps-0"] == "r1-n10"
    assert {hosts["worker-0"], hosts["worker-1"]} == {"gpu-09", "r1-n2"}
    for name in ("worker-0", "worker-1"):
        job.end_child(name)
    assert step.wait(60) == 0


def test_heterogeneous_allocation_gets_one_step_over_its_components(job: Job) -> None:
    roles = ("--ps", "1", "--workers", "1", "--placement", "ps,chief,worker")
    job.start(*roles, prefix=("salloc", "-Q", "-N1", "-n1", "-w", "r1-n10", ":", "-N2", "-n2", "-w", "gpu-09,r1-n2"))
    hosts = {name: job.wait_for_child(name)["host"] for name in ("ps-0", "chief-0", "worker-0")}
    job.end_child("chief-0")
    assert job.wait() == 0
    assert hosts["ps-0"] == "r1-n10"
    assert {hosts["chief-0"], hosts["worker-0"]} == {"gpu-09", "r1-n2"}


def test_components_without_a_number_of_tasks_are_refused(job: Job) -> None:
    job.start(*ROLES, prefix=("salloc", "-Q", "-N1", ":", "-N2"))
    assert job.wait() == 3
    assert "Give each component --ntasks" in job.stderr
