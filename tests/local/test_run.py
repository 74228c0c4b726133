"""`tf4slurm run` on this host, with real processes: how jobs run and end."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.disk import fill, small_disk
from tests.jobs import CHILD, NAMES, ROLES, TF4SLURM, Job, know_secret
from tests.processes import marked_processes, wait_until, wait_until_gone
from tf4slurm.agent.child_log import ChildLog
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import StatusFile
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.system.output import LineWriter


def agent_of(child: int) -> psutil.Process:
    parent = psutil.Process(child).parent()
    assert parent is not None
    return parent


def read_status(job: Job) -> StatusFile:
    return RunDirectory(job.run_directory).read(StatusFile) or StatusFile()


def test_job_ends_when_its_chief_exits(job: Job) -> None:
    job.start(*ROLES)
    children = {name: job.wait_for_child(name) for name in NAMES}
    clusters = [child["config"]["cluster"] for child in children.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {role: len(addresses) for role, addresses in clusters[0].items()} == {"chief": 1, "ps": 1, "worker": 2}
    job.end_child("chief-0")
    assert job.wait() == 0
    assert job.result["exit_code"] == 0
    assert {task["task"]: task["state"] for task in job.result["tasks"]} == {
        "chief/0": "terminated",
        "ps/0": "terminated",
        "worker/0": "terminated",
        "worker/1": "terminated",
    }
    assert "COMPLETED" in job.stderr


def test_output_goes_to_log_files_and_with_task_names_to_terminal(job: Job) -> None:
    job.start(*ROLES)
    ports = {name: job.wait_for_child(name)["config"]["cluster"] for name in NAMES}
    port = ports["worker-0"]["worker"][0].rpartition(":")[2]
    job.end_child("chief-0")
    job.wait()
    assert f"worker/0 | worker-0 listens on {port}\n" in job.stdout
    assert (job.run_directory / "logs" / "worker-0.1.log").read_text() == f"worker-0 listens on {port}\n"


def test_labels_are_in_job_json(job: Job) -> None:
    job.start("--ps", "0", "--workers", "0", "--label", "lr=0.1", "--label", "text=two\nlines", command=("true",))
    assert job.wait() == 0
    content = json.loads((job.run_directory / "job.json").read_text())
    assert content["labels"] == {"lr": "0.1", "text": "two\nlines"}


def test_run_directory_is_private_and_contains_no_secret(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = know_secret(monkeypatch, tmp_path)
    job.start(*ROLES)
    children = [job.wait_for_child(name) for name in NAMES]
    assert not (job.run_directory / "control.json").exists()
    assert stat.S_IMODE(job.run_directory.stat().st_mode) == 0o700
    assert not any(secret in child["environ"].values() for child in children)
    assert not any(secret in process.command for process in marked_processes(os.environ["TF4SLURM_TEST_MARK"]))
    job.end_child("chief-0")
    job.wait()
    files = [path for path in job.run_directory.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {path.name for path in files} >= {"job.json", "events.jsonl", "result.json", "chief-0.1.log"}
    assert not any(secret in path.read_text() for path in files)


@pytest.mark.parametrize(("ended", "code"), [("chief-0", 3), ("ps-0", 4)])
def test_exit_code_is_that_of_the_failed_task(job: Job, ended: str, code: int) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    job.end_child(ended, code)
    assert job.wait() == code
    assert job.stderr.count("Root cause:") == 1
    assert f"{ended.replace('-', '/')} on {socket.gethostname()} exited with code {code}." in job.stderr
    assert f"{ended} listens on" in job.stderr.partition("The last lines of")[2]


def test_killed_ps_ends_job_with_137(job: Job) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    os.kill(job.wait_for_child("ps-0")["pid"], signal.SIGKILL)
    assert job.wait(40) == 137  # not after the heartbeat timeout
    assert "Root cause: SIGKILL: another process killed it (ps/0)" in job.stderr
    assert "memory ran out" not in job.stderr
    assert job.stderr.count("Root cause:") == 1
    assert "was killed by signal 9 (SIGKILL)" in job.stderr


def test_killed_worker_is_restarted_at_its_address(job: Job) -> None:
    job.start(*ROLES)
    first = job.wait_for_child("worker-1")
    os.kill(first["pid"], signal.SIGKILL)
    second = job.wait_for_child("worker-1", number=2)
    assert second["pid"] != first["pid"]
    assert second["config"] == first["config"]
    job.end_child("chief-0")
    assert job.wait() == 0
    assert next(task for task in job.result["tasks"] if task["task"] == "worker/1")["starts"] == 2


def test_worker_that_exits_with_0_before_its_chief_is_not_restarted(job: Job) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    job.end_child("worker-0")
    job.wait_for_event("exited", "worker/0")
    job.end_child("chief-0")
    assert job.wait() == 0
    (worker,) = [task for task in job.result["tasks"] if task["task"] == "worker/0"]
    assert (worker["starts"], worker["returncode"]) == (1, 0)


def test_worker_that_signals_completion_and_exits_at_once_is_not_restarted(job: Job) -> None:
    """Its delayed agent receives the connection and the completion signal only after the exit."""
    code = """
import json, os, pathlib, sys, time
import tf4slurm.shutdown
role, directory = os.environ["TF4SLURM_TASK"].split("/")[0], pathlib.Path(sys.argv[1])
(directory / f"{role}-draft").write_text(json.dumps({"pid": os.getpid()}))
(directory / f"{role}-draft").replace(directory / f"{role}-0.1")
while not (directory / f"{role}-end").exists():
    time.sleep(0.02)
if role == "worker":
    tf4slurm.shutdown.signal_done()
"""
    job.start("--ps", "1", "--workers", "1", command=(sys.executable, "-c", code, str(job.children)))
    worker = psutil.Process(job.wait_for_child("worker-0")["pid"])
    agent = agent_of(worker.pid)
    agent.suspend()
    (job.children / "worker-end").touch()
    assert wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE, 60)
    agent.resume()
    job.wait_for_event("exited", "worker/0")
    (job.children / "chief-end").touch()
    assert job.wait() == 0
    assert "restarting" not in [event["kind"] for event in job.events]


def test_worker_that_always_fails_ends_job(job: Job) -> None:
    job.start(*ROLES, "--max-worker-restarts", "2")
    job.end_child("worker-0", 9)
    assert job.wait() == 9
    assert job.wait_for_child("worker-0", number=3)
    assert next(task for task in job.result["tasks"] if task["task"] == "worker/0")["starts"] == 3


def test_job_without_chief_waits_for_all_workers(job: Job) -> None:
    job.start(*ROLES, "--no-chief")
    assert "chief" not in job.wait_for_child("worker-0")["config"]["cluster"]
    job.end_child("worker-0")
    job.wait_for_event("exited", "worker/0")
    assert job.process is not None
    assert job.process.poll() is None
    job.end_child("worker-1")
    assert job.wait() == 0


def test_evaluator_is_outside_the_cluster_and_job_waits_for_it(job: Job) -> None:
    job.start("--ps", "1", "--workers", "1", "--evaluators", "1", command=("sh", "-c", 'test -n "$TF_CONFIG"'))
    assert job.wait() == 0
    assert [task["returncode"] for task in job.result["tasks"] if task["task"] == "evaluator/0"] == [0]


def test_data_service_runs_in_the_given_python_and_reports_missing_tensorflow(job: Job, tmp_path: Path) -> None:
    python = tmp_path / "python-without-packages"
    wait = f"while [ ! -e {shlex.quote(str(job.children))}/chief-0.1 ]; do sleep 0.05; done"  # its failures end the job
    python.write_text(f'#!/bin/sh\n{wait}\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    job.start("--ps", "0", "--workers", "0", "--data-workers", "1", "--data-python", str(python))
    services = json.loads(job.wait_for_child("chief-0")["environ"]["TF4SLURM_SERVICES"])
    assert {role: len(addresses) for role, addresses in services.items()} == {"data-dispatcher": 1, "data-worker": 1}
    assert job.wait() == 1
    assert "The data service needs TensorFlow, which " in job.stderr
    assert "--data-python" in job.stderr
    assert len([event for event in job.events if event["kind"] == "restarting"]) >= 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_to_launcher_ends_job(job: Job, number: signal.Signals, code: int) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    assert job.process is not None
    job.process.send_signal(number)
    assert job.wait() == code
    assert number.name in job.stderr


def test_signal_to_one_agent_ends_job(job: Job) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    agent_of(job.wait_for_child("worker-1")["pid"]).terminate()
    assert job.wait() == 143


def test_killed_launcher_leaves_no_process(job: Job, process_mark: str) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "10")
    for name in NAMES:
        job.wait_for_child(name)
    assert job.process is not None
    job.process.kill()
    job.process.wait()
    assert wait_until_gone(process_mark, timeout_seconds=10 + 30) == []


def has_agents(launcher_id: int) -> bool:
    return len(psutil.Process(launcher_id).children()) >= len(NAMES)  # then it starts the preloader


def test_launcher_killed_while_its_agents_register_leaves_no_process(job: Job, process_mark: str) -> None:
    for delay in range(8):  # hits the time before they have registered at least once
        job.start(*ROLES, "--heartbeat-timeout", "2")
        assert job.process is not None
        assert wait_until(functools.partial(has_agents, job.process.pid), 60, 0.001)
        time.sleep(0.02 * delay)
        job.process.kill()
        job.process.wait()
        assert wait_until_gone(process_mark, timeout_seconds=2 + 30) == []


def test_job_whose_launcher_was_killed_is_lost_with_the_time_and_the_exit_codes(job: Job, process_mark: str) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "15")
    for name in NAMES:
        job.wait_for_child(name)
    assert wait_until(lambda: read_status(job).phase == "importing", 60)
    assert job.process is not None
    job.process.kill()
    job.process.wait()
    job.end_child("worker-0", 3)
    job.end_child("chief-0", 0)
    assert wait_until_gone(process_mark, timeout_seconds=60) == []

    def run_verb(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([TF4SLURM, *arguments, job.run_directory], capture_output=True, text=True, timeout=60)

    (status,) = json.loads(run_verb("status", "--json").stdout)
    assert (status["state"], status["exit_code"]) == ("LOST", 1)
    assert {task["task"]: task["state"] for task in status["tasks"]} == {
        "chief/0": "exited 0",
        "ps/0": "ended",
        "worker/0": "exited 3",
        "worker/1": "ended",
    }
    reason = status["reason"]
    assert re.search(r"Last recorded state, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: importing", reason)
    assert "chief/0 exited with code 0, worker/0 exited with code 3" in reason
    waited = run_verb("wait")
    assert (waited.returncode, reason in waited.stderr) == (1, True)
    page = Path(run_verb("report").stdout.strip()).read_text()
    assert ">LOST</p>" in page
    assert "worker/0 exited with code 3" in page
    assert "launcher has written nothing" not in page


@pytest.mark.long
def test_killed_launcher_leaves_no_process_after_15_seconds_by_default(job: Job, process_mark: str) -> None:
    job.start(*ROLES, "--heartbeat-timeout", f"{JobSpec.heartbeat_timeout_seconds:g}")
    for name in NAMES:
        job.wait_for_child(name)
    assert job.process is not None
    job.process.kill()
    job.process.wait()
    assert wait_until_gone(process_mark, timeout_seconds=15) == []


@pytest.mark.parametrize("victim", ["chief-0", "ps-0", "worker-0"])
def test_killed_agent_ends_job_and_its_child(job: Job, victim: str, process_mark: str) -> None:
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    agent_of(job.wait_for_child(victim)["pid"]).kill()
    assert job.wait(40) == 7  # not after the heartbeat timeout
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_stopped_agent_is_lost_after_heartbeat_timeout(job: Job, process_mark: str) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "4", "--heartbeat-interval", "0.5")
    for name in NAMES:
        job.wait_for_child(name)
    agent_of(job.wait_for_child("ps-0")["pid"]).suspend()
    assert job.wait() == 7
    assert "it sent no heartbeat for 4 s" in job.stderr
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_launcher_that_is_stopped_and_continued_loses_no_task(job: Job) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "24", "--heartbeat-interval", "0.5")
    for name in NAMES:
        job.wait_for_child(name)
    assert job.process is not None
    launcher = psutil.Process(job.process.pid)
    launcher.suspend()
    stopped = time.monotonic()
    wait_until(lambda: time.monotonic() - stopped > 12, timeout_seconds=60)
    launcher.resume()
    job.end_child("chief-0")
    assert job.wait() == 0


def test_job_stopped_as_a_whole_continues(job: Job) -> None:
    job.start(*ROLES, "--heartbeat-timeout", "15", "--heartbeat-interval", "0.5")
    for name in NAMES:
        job.wait_for_child(name)
    assert job.process is not None
    launcher = psutil.Process(job.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        process.suspend()
    stopped = time.monotonic()
    wait_until(lambda: time.monotonic() - stopped > 17, timeout_seconds=60)
    for process in reversed(processes):
        process.resume()
    resumed = time.monotonic()
    wait_until(lambda: time.monotonic() - resumed > 1, timeout_seconds=60)
    job.end_child("chief-0")
    assert job.wait() == 0, job.stderr


def test_child_that_ignores_sigterm_is_killed(job: Job) -> None:
    ignorant = "trap '' TERM; case $TF_CONFIG in *'\"chief\", \"index\"'*) exit 0;; esac; while :; do sleep 0.1; done"
    job.start("--ps", "1", "--workers", "1", command=("sh", "-c", ignorant))
    assert job.wait() == 0


def test_leftover_processes_of_a_child_are_killed(job: Job, process_mark: str) -> None:
    daemon = "setsid sleep 1000 & setsid setsid sleep 1001 & exit 0"
    job.start("--ps", "1", "--workers", "1", command=("sh", "-c", daemon))
    assert job.wait() == 0
    assert wait_until_gone(process_mark, timeout_seconds=30) == []


def test_scripts_that_open_no_server_complete_with_a_warning_in_summary_report_and_result(job: Job) -> None:
    job.start(*ROLES, command=(sys.executable, "-c", "print('trained')"))
    assert job.wait() == 0
    (warning,) = job.result["warnings"]
    assert warning.startswith("None of the 4 tasks in the cluster spec has started a TensorFlow server")
    assert f"WARNING: {warning}\n" in job.stderr.partition("COMPLETED in")[2]
    assert warning in html.unescape((job.run_directory / "report.html").read_text())
    shown = subprocess.run([TF4SLURM, "status", job.run_directory], capture_output=True, text=True, timeout=60)
    assert f"\n  WARNING: {warning}\n" in shown.stdout


def test_scripts_that_open_no_required_server_fail(job: Job) -> None:
    job.start(*ROLES, "--require-servers", command=("true",))
    assert job.wait() == 6
    assert "has started a TensorFlow server" in job.stderr.partition("Root cause:")[2]
    assert "The scripts ran, but not as one cluster" in (job.run_directory / "report.html").read_text()


OPEN_SERVERS = "TensorFlow's servers listen on all interfaces of this host"


def test_servers_of_an_isolated_job_are_not_reached_from_outside(job: Job) -> None:
    job.start(*ROLES, "--isolated")
    process = job.process
    assert process is not None
    assert wait_until(lambda: (job.children / "chief-0.1").exists() or process.poll() is not None, 60), job.stderr
    if process.poll() == 3:
        pytest.skip("no user namespaces here")
    child = job.wait_for_child("ps-0")
    port = int(child["config"]["cluster"]["ps"][0].rpartition(":")[2])
    assert os.readlink(f"/proc/{child['pid']}/ns/net") != os.readlink("/proc/self/ns/net")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    job.end_child("chief-0")
    assert job.wait() == 0
    assert OPEN_SERVERS not in job.stderr


@pytest.mark.parametrize(("workers", "times"), [("1", 1), ("0", 0)])
def test_local_job_of_several_tasks_warns_that_its_servers_are_open_to_others(
    job: Job, workers: str, times: int
) -> None:
    job.start("--ps", "0", "--workers", workers, command=("true",))
    assert job.wait() == 0
    assert job.stderr.count(OPEN_SERVERS) == times


def test_isolated_job_on_an_interface_that_its_network_lacks_is_refused_before_it_starts(tmp_path: Path) -> None:
    command = (TF4SLURM, "run", "--workers", "1", "--isolated", "--interface", "eth0", "--", "true")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    if "does not let this user create a network namespace" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 3
    assert "Found: lo" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to forbid itself namespaces")
def test_isolated_without_user_namespaces_is_an_error_with_advice(tmp_path: Path) -> None:
    forbid = (
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"',
    )
    command = (TF4SLURM, "run", "--workers", "1", "--isolated", "--", "true")
    done = subprocess.run([*forbid, "sh", *command], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 3
    assert "does not let this user create a network namespace" in done.stderr


def test_two_simultaneous_jobs_are_independent(tmp_path: Path) -> None:
    jobs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs.append(Job(tmp_path / name))
        jobs[-1].start(*ROLES)
    clusters = [job.wait_for_child("chief-0")["config"]["cluster"] for job in jobs]
    addresses = [{a for role in cluster.values() for a in role} for cluster in clusters]
    assert not addresses[0] & addresses[1]
    jobs[0].end_child("chief-0", 5)
    assert jobs[0].wait() == 5
    assert jobs[1].process is not None
    assert jobs[1].process.poll() is None
    jobs[1].end_child("chief-0")
    assert jobs[1].wait() == 0


def test_ports_come_from_the_requested_range(job: Job) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        first = min(taken.getsockname()[1], 65500)
        job.start(*ROLES, "--ports", f"{first}-{first + 12}")
        cluster = job.wait_for_child("ps-0")["config"]["cluster"]
        job.end_child("chief-0")
        assert job.wait() == 0
    ports = {int(a.rpartition(":")[2]) for role in cluster.values() for a in role}
    assert ports <= set(range(first + 1, first + 13))


def test_children_see_gpus_only_if_their_role_uses_them(job: Job) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    try:
        job.start(*ROLES)
        seen = {name: job.wait_for_child(name)["environ"]["CUDA_VISIBLE_DEVICES"] for name in NAMES}
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    job.end_child("chief-0")
    assert job.wait() == 0
    assert seen == {"chief-0": "-1", "ps-0": "-1", "worker-0": "2,3", "worker-1": "2,3"}


def test_no_proxy_covers_the_hosts_of_the_cluster(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_grpc_proxy", "example.org")  # gRPC reads this instead of no_proxy
    job.start(*ROLES)
    environ = job.wait_for_child("ps-0")["environ"]
    job.end_child("chief-0")
    assert job.wait() == 0
    assert "127.0.0.1" in environ["no_proxy"].split(",")
    assert environ["no_grpc_proxy"] == "example.org,127.0.0.1"


def test_early_ctrl_c_ends_job(tmp_path: Path) -> None:
    """At any moment after the run directory exists, Ctrl-C ends the job, and the exit code shows it."""
    for number in range(12):
        directory = tmp_path / str(number)
        directory.mkdir()
        job = Job(directory)
        job.start(*ROLES)
        assert job.process is not None
        assert wait_until((directory / "runs").exists, 60, poll_seconds=0.001)
        wait_until(lambda: False, timeout_seconds=number * 0.01)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.stderr
        assert "Traceback" not in job.stderr


def test_nohup_keeps_job_when_its_terminal_closes(job: Job) -> None:
    job.start(*ROLES, prefix=("nohup",))
    children = [job.wait_for_child(name)["pid"] for name in NAMES]
    assert job.process is not None
    for process_id in (*children, *(agent_of(child).pid for child in children), job.process.pid):
        os.kill(process_id, signal.SIGHUP)
    job.end_child("chief-0")
    assert job.wait() == 0


def test_children_are_killed_by_a_broken_pipe_as_in_a_shell(job: Job) -> None:
    job.start("--ps", "0", "--workers", "0", command=("bash", "-c", "while :; do echo y; done 2>/dev/null | head -1"))
    assert job.wait() == 0


def test_root_cause_is_shown_after_a_burst_of_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("from tf4slurm.system import output; output._CLOSE_SECONDS = 60\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # a busy machine may delay the terminal
    script = "import sys; print('x\\n' * 60000, end=''); sys.exit(3)"
    command = [TF4SLURM, "run", "--workers", "0", "--ps", "0", "--", sys.executable, "-c", script]
    shown = subprocess.run(
        ["script", "-qec", shlex.join(command), "/dev/null"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert shown.returncode == 3
    assert shown.stdout.count("Root cause:") == 1


LATE = """
import asyncio
from tf4slurm.system.child_process import Child
start = Child.start
async def start_late(*arguments, **options):
    child = await start(*arguments, **options)
    await asyncio.sleep(0.5)
    return child
Child.start = start_late
"""


@pytest.mark.parametrize("child_is_registered", ["at once", "late"])
def test_orphans_are_reaped(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child_is_registered: str
) -> None:
    if child_is_registered == "late":  # a delayed agent, whose orphans have already exited
        (tmp_path / "sitecustomize.py").write_text(LATE)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    orphans = 'for i in 1 2 3 4 5 6 7 8; do (sleep 0.05 &) ; done; exec "$@"'
    command = ("bash", "-c", orphans, "bash", sys.executable, str(CHILD), str(job.children))
    job.start("--ps", "0", "--workers", "0", command=command)
    agent = agent_of(job.wait_for_child("chief-0")["pid"])
    assert wait_until(lambda: len(agent.children()) == 1, 60)
    job.end_child("chief-0")
    assert job.wait() == 0


def test_closed_standard_streams_are_tolerated(tmp_path: Path) -> None:
    line = f"{shlex.join([TF4SLURM, 'run', '--workers', '1', '--', 'true'])} >&- 2>&-; echo $?"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert shown.stdout == "0\n"


def test_placeholders_are_filled_in_and_ps_that_never_exits_is_terminated(job: Job) -> None:
    flags = ("--ps={ps_hosts}", "--workers={worker_hosts}", "--job={job_name}", "--type={task_type}", "{task_index}")
    serving = shlex.quote(str(job.directory / "serving"))
    shell = f'echo "$@"; if [ "$3" = --job=ps ]; then touch {serving}; exec sleep 1000; fi'
    shell += f"; until [ -e {serving} ]; do sleep 0.05; done"
    command = ("sh", "-c", shell, "sh", *flags, "{chief_hosts}", "{other} {}")
    job.start("--no-chief", "--ps", "1", "--workers", "2", command=command)
    assert job.wait() == 0
    ps, *workers = (task["address"] for task in job.result["tasks"])
    hosts = f"--ps={ps} --workers={','.join(workers)}"
    assert sorted(job.stdout.splitlines()) == [
        f"ps/0 | {hosts} --job=ps --type=ps 0  {{other}} {{}}",
        f"worker/0 | {hosts} --job=worker --type=worker 0  {{other}} {{}}",
        f"worker/1 | {hosts} --job=worker --type=worker 1  {{other}} {{}}",
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_result_on_full_disk_has_exit_code_and_reason_and_user_is_warned(job: Job) -> None:
    with small_disk(job.directory / "runs"):
        job.start("--ps", "1", "--workers", "1")
        job.wait_for_child("chief-0")
        wait_until(lambda: "status.json" in os.listdir(next((job.directory / "runs").glob("*-*"))), 60)
        fill(job.directory / "runs")
        assert wait_until(lambda: "is not recorded" in job.stderr, 60)
        fill(job.directory / "runs")  # the space freed by the last status.json
        job.end_child("chief-0")
        assert job.wait() == 0
        run = next((job.directory / "runs").glob("*-*"))
        assert f"'{run}/result.json' cannot be written: No space left on device." in job.stderr
        assert "It has the state, the exit code and the reason alone." in job.stderr
        for verb in (("status", "--json"), ("wait",), ("report", "-o", "-")):
            done = subprocess.run([TF4SLURM, *verb, run], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert "COMPLETED" in done.stdout + done.stderr or ">COMPLETED</p>" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_status_is_written_again_once_a_full_disk_has_space(job: Job) -> None:
    with small_disk(job.directory / "runs"):
        job.start("--ps", "0", "--workers", "0")
        job.wait_for_child("chief-0")
        fill(job.directory / "runs")
        assert wait_until(lambda: "is not recorded" in job.stderr, 60)
        (job.directory / "runs" / "filling").unlink()
        freed_at = time.time()
        run = RunDirectory(next((job.directory / "runs").glob("*-*")))
        assert wait_until(lambda: ((run.read(StatusFile) or StatusFile()).time or 0) > freed_at, 60)
        job.end_child("chief-0")
        assert job.wait() == 0
        assert (run.read(StatusFile) or StatusFile()).phase == "ended"


def test_log_files_are_closed_when_the_child_exits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
    job.start(*ROLES)
    for name in NAMES:
        job.wait_for_child(name)
    os.kill(job.wait_for_child("worker-1")["pid"], signal.SIGKILL)
    job.wait_for_child("worker-1", number=2)
    job.end_child("chief-0")
    assert job.wait() == 0
    assert "unclosed file" not in job.stdout + job.stderr


def test_log_file_that_cannot_be_closed_is_reported(tmp_path: Path) -> None:
    shown: list[str] = []

    class Terminal:
        def write(self, text: str) -> None:
            shown.append(text)

        def flush(self) -> None:
            pass

    writer = LineWriter(Terminal())
    log = ChildLog(tmp_path / "logs" / "worker-0.1.log", "worker/0", writer)
    log.write(b"one line\n")
    assert log._file is not None
    os.close(log._file.fileno())  # closing it then fails, as on NFS without space
    log.write(b"")
    writer.close()
    assert "worker/0 | [tf4slurm: the log file may be incomplete: [Errno 9] Bad file descriptor]" in "".join(shown)
    assert (tmp_path / "logs" / "worker-0.1.log").read_text() == "one line\n"


@pytest.mark.parametrize(("given", "expected"), [({}, "4"), ({"TF_NUM_INTEROP_THREADS": "2"}, "2")])
def test_task_that_is_bound_to_one_cpu_has_enough_threads(
    job: Job, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    job.start(*ROLES, prefix=("taskset", "-c", str(min(os.sched_getaffinity(0)))))
    assert job.wait_for_child("worker-0")["environ"]["TF_NUM_INTEROP_THREADS"] == expected
    job.end_child("chief-0")
    assert job.wait() == 0
