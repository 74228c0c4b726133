"""SlurmCluster on a real Slurm: a notebook on the login host, its ps and workers on other hosts."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.jobs import TF4SLURM
from tests.notebook import SCALE, Notebook, kernel
from tests.processes import marked_processes, wait_until, wait_until_gone
from tests.slurm.lab import SlurmLab
from tests.tensorflow.test_local_cluster import RESUMED_CELL
from tests.tensorflow.test_notebook_faults import Session
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.spec.job_spec import JobSpec

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")
pytestmark = pytest.mark.timeout(300)

_SECONDS = 60
TRAIN = """
import time
import tensorflow as tf
import tf4slurm
from tf4slurm.tensorflow import parameter_server_strategy, run_steps

with tf4slurm.SlurmCluster(ps=1, workers=2, nodes=3, time="5m") as cluster:
    cluster.wait_until_ready()
    ready = time.monotonic()
    strategy, coordinator = parameter_server_strategy()
    with strategy.scope():
        total = tf.Variable(0.0)

    def step_fn():
        return total.assign_add(1.0)

    run_steps(coordinator, step_fn, 1)
    print("first step after", time.monotonic() - ready)
    run_steps(coordinator, step_fn, 20)
    print("total", float(total), "on", total.device)
    status = cluster.status()
    print("nodes", len({task.node for task in status.tasks}), status.tasks[-1].task, status.tasks[-1].node)
    print("state", status.state, "html", "worker/1" in cluster._repr_html_())
    cluster.logs("ps/0")
print("end", cluster.status().state, cluster.status().exit_code)
"""
START = 'import tf4slurm\ncluster = tf4slurm.SlurmCluster(ps=1, workers=1, nodes=2, time="5m").start()'
CELL = """
import tensorflow as tf
from tf4slurm.tensorflow import parameter_server_strategy, run_steps
strategy, coordinator = parameter_server_strategy()
with strategy.scope():
    total = tf.Variable(0.0)

def step_fn():
    return total.assign_add(1.0)

def train(steps):
    return run_steps(coordinator, step_fn, steps)
"""


@pytest.fixture
def notebook(lab: SlurmLab, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook on the login host, without settings."""
    with kernel_on(lab, tmp_path) as found:
        yield found


def kernel_on(lab: SlurmLab, directory: Path) -> AbstractContextManager[Notebook]:
    prefix, environ = lab.on_login_host()
    return kernel(directory, prefix, {**environ, "XDG_CONFIG_HOME": str(directory / "config")})


def run_script(lab: SlurmLab, directory: Path, code: str) -> str:
    """Run a Python program on the login host. Return what it printed, also its error messages."""
    environ = {"XDG_CONFIG_HOME": str(directory / "config")}
    done = lab.run(sys.executable, "-c", code, cwd=directory, env=environ, timeout_seconds=200, check=False)
    return done.stdout + done.stderr


def run_directory(notebook: Notebook) -> RunDirectory:
    return RunDirectory(Path(notebook.run("print(cluster.run_directory.path)").strip()))


def test_script_on_the_login_host_trains_and_frees_the_allocation(lab: SlurmLab, tmp_path: Path) -> None:
    output = run_script(lab, tmp_path, TRAIN)
    assert "total 21.0 on /job:ps/replica:0/task:0" in output, output
    assert "nodes 4 chief/0 ctl" in output
    assert "state RUNNING html True" in output
    assert "end COMPLETED 0" in output
    match = re.search(r"first step after (\S+)", output)
    assert match is not None
    print(match[0])
    assert [line for line in lab.queue() if not line.endswith("COMPLETING")] == []
    assert lab.job_state(next((tmp_path / "runs").glob("*.sh")).stem.split("-")[-1])[0] in ("COMPLETED", "COMPLETING")


@pytest.mark.long
def test_cells_share_a_cluster_that_interruptions_leave_running(
    lab: SlurmLab, notebook: Notebook, tmp_path: Path, process_mark: str
) -> None:
    notebook.run(START)
    notebook.run(CELL)
    assert notebook.run("print(train(10).step, float(total))") == "10 10.0\n"
    assert notebook.interrupt("open('trains', 'w').close(); train(10**9)", tmp_path / "trains") == "KeyboardInterrupt"
    assert notebook.run("print(train(10).steps, cluster.status().state)") == "10 RUNNING\n"
    error = notebook.fail("tf4slurm.SlurmCluster().start()")
    assert "is the chief of notebook-" in error
    assert len(lab.queue()) == 1
    notebook.run("cluster.close()")
    assert notebook.run("print(cluster.status().state)") == "COMPLETED\n"
    error = notebook.fail("tf4slurm.SlurmCluster().start()")
    assert "can connect to one cluster only" in error
    lab.wait_idle(5)
    agents = [process for process in marked_processes(process_mark) if process.host != "ctl"]
    assert agents == []


@pytest.mark.long
def test_killed_kernel_frees_the_allocation(lab: SlurmLab, tmp_path: Path, process_mark: str) -> None:
    with kernel_on(lab, tmp_path) as notebook:
        notebook.run(START)
        directory = run_directory(notebook)
        os.killpg(int(notebook.run("import os; print(os.getpid())")), signal.SIGKILL)
        killed = time.monotonic()
        assert not wait_until_gone(process_mark, JobSpec.heartbeat_timeout_seconds)
        print(f"tasks ended after {time.monotonic() - killed:.1f} s")
        lab.wait_idle(JobSpec.heartbeat_timeout_seconds)
        print(f"allocation freed after {time.monotonic() - killed:.1f} s")
    result = directory.read(ResultFile)
    assert result is not None
    assert (result.state, result.exit_code, result.cause) == ("FAILED", 7, "chief/0")
    assert "ended without closing the cluster" in result.reason


@pytest.mark.long
def test_restarted_kernel_attaches_to_the_job_in_its_allocation(
    lab: SlurmLab, tmp_path: Path, process_mark: str
) -> None:
    with kernel_on(lab, tmp_path) as notebook:
        notebook.run(START)
        notebook.run(CELL)
        assert notebook.run("print(train(10).steps)") == "10\n"
        (job_id,) = lab.queue()
        (attach,) = re.findall(r"tf4slurm\.SlurmCluster\.attach\('\S+'\)", notebook.run("cluster.restart()"))
        notebook.restart(now=False)
        notebook.run(f"import tf4slurm\ncluster = {attach}")
        notebook.run(CELL)
        assert notebook.run("print(train(10).steps, float(total))") == "10 10.0\n"
        assert lab.queue() == [job_id], "the allocation is the same"
        notebook.run("cluster.close()")
        assert notebook.run("print(cluster.status().state)") == "COMPLETED\n"
        lab.wait_idle(_SECONDS)
        assert "has ended (COMPLETED)" in notebook.fail(attach)
    assert not wait_until_gone(process_mark, 30)


@pytest.mark.long
def test_training_saves_before_the_time_limit_and_the_next_cluster_resumes(
    lab: SlurmLab, tmp_path: Path, process_mark: str
) -> None:
    cluster = 'tf4slurm.SlurmCluster(ps=1, workers=1, nodes=2, time="2m", signal="USR1@60")'
    start = f"import tf4slurm\ncluster = {cluster}.start()"
    with kernel_on(lab, tmp_path) as notebook:
        notebook.run(start)
        notebook.run(RESUMED_CELL)
        begun = time.monotonic()
        directory = run_directory(notebook)
        saved = int(notebook.run("print(run_steps(coordinator, step_fn, 10**9, checkpoints=checkpoints).step)"))
        print(f"the cell returned after {time.monotonic() - begun:.1f} s, at step {saved}")
        assert "Its ps and workers end in at most 25 s: save now." in notebook.standard_error
        assert wait_until(lambda: directory.read(ResultFile) is not None, _SECONDS)
        result = directory.read(ResultFile)
        assert result is not None
        assert (result.state, result.exit_code) == ("STOPPED", 138)
        assert "chief/0 had not closed its cluster" in result.reason
        lab.wait_idle(_SECONDS)
        notebook.restart(now=False)
        notebook.run(start)
        notebook.run(RESUMED_CELL)
        assert int(notebook.run("print(restored)")) == saved > 0
        assert notebook.run("print(train(restored + 10))") == "True\n"
        notebook.run("cluster.close()")
    assert not wait_until_gone(process_mark, 30)


@pytest.mark.long
def test_spare_takes_the_place_of_a_worker_whose_host_is_lost(lab: SlurmLab, tmp_path: Path, process_mark: str) -> None:
    with kernel_on(lab, tmp_path) as notebook:
        notebook.run(START.replace("workers=1, nodes=2", "workers=2, spares=1, nodes=4"))
        notebook.run(CELL)
        notebook.run("print(train(10).steps)")
        node = notebook.run(
            "print(next(each.node for each in cluster.status().tasks if each.task == 'worker/1'))"
        ).strip()
        try:
            lab.crash(node)
            notebook.run(
                "import time\n"
                "deadline = time.monotonic() + 120\n"
                "while not train(50).steps_by_worker[1] or time.monotonic() < deadline - 100:\n"
                "    assert time.monotonic() < deadline, cluster.status()"
            )
            moved = notebook.run(
                "print(next(each.node for each in cluster.status().tasks if each.task == 'worker/1'))"
            ).strip()
            assert moved != node
            notebook.run("cluster.close()")
            assert notebook.run("print(cluster.status().state, cluster.status().exit_code)") == "COMPLETED 0\n"
        finally:
            lab.boot(node)
            lab.wait_idle(90)
    assert not wait_until_gone(process_mark, 30)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_faults_leave_no_hang_no_process_and_no_job(
    lab: SlurmLab, tmp_path: Path, process_mark: str, seed: int
) -> None:
    cluster = 'tf4slurm.SlurmCluster(ps=1, workers=2, nodes=3, time="30m")'
    with kernel_on(lab, tmp_path) as notebook:
        Session(notebook, tmp_path, random.Random(seed), process_mark, cluster).suffer(25)
        notebook.run("cluster.close()")
        lab.wait_idle(_SECONDS)
    assert not wait_until_gone(process_mark, 30)


@pytest.fixture
def busy(lab: SlurmLab) -> str:
    """The id of a job that has all nodes."""
    job_id = lab.run("sbatch", "--parsable", "-N4", "--exclusive", "-t5", "-o/dev/null", "--wrap", "sleep 1000").stdout
    assert wait_until(lambda: lab.job_state(job_id.strip())[0] == "RUNNING", _SECONDS)
    return job_id.strip()


@pytest.mark.long
def test_pending_cluster_is_cancelled_by_an_interrupt_or_starts(lab: SlurmLab, busy: str, notebook: Notebook) -> None:
    _, error = notebook.interrupt_when(START, lambda: len(lab.queue()) == 2)
    assert error.startswith("KeyboardInterrupt")
    assert lab.queue() == [f"{busy} wrap RUNNING"]

    def release(text: str) -> None:
        if "Resources" in text:
            lab.run("scancel", busy)

    no_widgets = "import sys; sys.modules['ipywidgets'] = None\n"
    printed = notebook.run(no_widgets + START, on_output=release)
    assert re.search(r"notebook-\d+ PENDING: Resources: the job is next and waits for free nodes\.", printed)
    assert notebook.run("print(cluster.status().state)") == "RUNNING\n"
    notebook.run("cluster.close()")


@pytest.mark.long
def test_interrupt_while_the_tasks_start_cancels_the_job(lab: SlurmLab, notebook: Notebook, tmp_path: Path) -> None:
    code = START.replace("nodes=2", 'prologue="touch begun; sleep 1000"')
    assert notebook.interrupt(code, tmp_path / "begun") == "KeyboardInterrupt"
    assert [line for line in lab.queue() if not line.endswith(" COMPLETING")] == []


def test_worker_that_scale_adds_trains_and_leaves(lab: SlurmLab, tmp_path: Path) -> None:
    cluster = 'tf4slurm.SlurmCluster(ps=1, workers=1, nodes=2, time="5m", partition="low")'
    output = run_script(lab, tmp_path, SCALE.format(cluster=cluster))
    assert "grown 2 worker/1 True\nshrunk True\nworkers=0: notebook-" in output, output
    assert "end COMPLETED" in output
    assert wait_until(lambda: lab.queue() == [], _SECONDS)
    scripts = [line for path in tmp_path.rglob("worker-*.out") for line in path.read_text().splitlines()]
    assert any("this worker has ended" in line for line in scripts), scripts


@pytest.mark.parametrize("step", [(), ("srun", "--ntasks=1", "--nodes=1")], ids=["salloc", "srun"])
def test_cluster_here_uses_the_allocation_of_the_notebook(lab: SlurmLab, tmp_path: Path, step: tuple[str, ...]) -> None:
    code = TRAIN.replace('nodes=3, time="5m"', "here=True").replace('nodes", len', 'hosts", len')
    script = tmp_path / "train.py"
    script.write_text(code + 'print("queue", len(__import__("subprocess").getoutput("squeue -h").splitlines()))\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    command = ("salloc", "-Q", "-N2", "-n3", "-t5", *step, sys.executable, str(script))
    done = lab.run(*command, cwd=tmp_path, env=environ, timeout_seconds=200, check=False)
    output = done.stdout + done.stderr
    assert "total 21.0 on /job:ps/replica:0/task:0" in output, output
    hosts = r"hosts 2 chief/0 (?!ctl)" if step else "hosts 3 chief/0 ctl"
    assert re.search(hosts, output), output
    assert "end COMPLETED 0\nqueue 1\n" in output, "the allocation is the notebook's"


FAILURES = """
import tf4slurm
for options in ({"partition": "nope"}, {"prologue": "echo the module is missing; exit 7"}):
    try:
        tf4slurm.SlurmCluster(ps=1, workers=1, **options).start()
    except tf4slurm.errors.Tf4SlurmError as error:
        print("error", type(error).__name__, error)
"""


def test_job_that_does_not_start_is_an_error_with_the_reason(lab: SlurmLab, tmp_path: Path) -> None:
    output = run_script(lab, tmp_path, FAILURES)
    assert "error RefusedError sbatch exited with code 1:\nsbatch: error: invalid partition specified: nope" in output
    assert "error RendezvousError The cluster could not be started:\nnotebook-" in output
    assert "is FAILED: Slurm's queue shows FAILED (NonZeroExitCode)" in output
    assert "    the module is missing" in output
    assert [line for line in lab.queue() if not line.endswith("COMPLETING")] == []


@pytest.fixture(scope="module")
def filtered_lab(slurm: None) -> Iterator[SlurmLab]:
    """A lab whose Slurm uses ports that a packet filter can let through."""
    if shutil.which("iptables") is None:
        pytest.fail("the tests of the packet filter need iptables: apt-get install iptables", pytrace=False)
    with SlurmLab(["wall-1", "wall-2"], extra_conf="SrunPortRange=60001-60400") as lab:
        yield lab


@pytest.mark.parametrize(
    ("is_notebook_filtered", "words"),
    [
        (True, r"RendezvousError chief/0 on ctl does not answer at 10\.78\.0\.254:\d+ within 5 s\. worker/0 on wall-2"),
        (
            False,
            r"RendezvousConnectionError ctl does not reach the launcher of notebook-\d+ at "
            r"10\.78\.0\.1:\d+ and 172\.29\.0\.1:\d+ within 5 s\.",
        ),
    ],
    ids=["to the notebook", "from the notebook"],
)
def test_firewall_is_named_with_the_addresses_and_the_way_out(
    filtered_lab: SlurmLab, tmp_path: Path, words: str, *, is_notebook_filtered: bool
) -> None:
    """A packet filter drops new connections between the login host and the nodes, but for those of Slurm."""
    lab = filtered_lab
    ports = ("-m", "multiport", "!", "--dports", "6817:6818,60001:60400")
    rule = ("-p", "tcp", "--syn", "!", "-i", "lo", *ports, "-j", "DROP")
    others = ("!", "-s", "10.78.0.0/30")  # the nodes reach each other
    if is_notebook_filtered:
        lab.run("iptables", "-A", "INPUT", *rule)
    for node in () if is_notebook_filtered else lab.nodes:
        lab.on(node, "iptables", "-A", "INPUT", *others, *rule)
    try:
        options = 'ps=1, workers=1, nodes=2, ports="61000-61099"'  # any free port may be one of Slurm's
        code = f"import tf4slurm\ntry:\n    tf4slurm.SlurmCluster({options}).start()\n"
        code += "except tf4slurm.errors.RendezvousError as error:\n    print(type(error).__name__, error)\n"
        output = run_script(lab, tmp_path, code)
        found = check_notebook(lab, tmp_path)
    finally:
        lab.run("iptables", "-F", "INPUT")
        for node in lab.nodes:
            lab.on(node, "iptables", "-F", "INPUT")
    assert re.search(words, output), output
    assert 'start the notebook in an allocation: "srun --pty jupyter lab' in output
    reaches, does_not_reach = ("ctl", "wall-1") if is_notebook_filtered else ("wall-1", "ctl")
    (ok,) = [text for level, text, _ in found if level == "ok"]
    assert re.fullmatch(rf"{reaches} reaches {does_not_reach} at 10\.78\.0\.\d+", ok), found
    ((text, advice),) = [(text, advice) for level, text, advice in found if level == "fail"]
    assert text.startswith(f"{does_not_reach} does not reach {reaches} at 10.78.0."), found
    assert '"srun --pty jupyter lab' in advice
    lab.wait_idle(20)


def check_notebook(lab: SlurmLab, directory: Path) -> list[tuple[str, str, str]]:
    """Return level, text and advice of each finding of `tf4slurm doctor --notebook` about the notebook's network."""
    command = (TF4SLURM, "doctor", "--notebook", "--quick", "--json")
    done = lab.run(*command, cwd=directory, timeout_seconds=200, check=False)
    found = json.loads(done.stdout)["findings"]
    return [(each["level"], each["text"], each["advice"]) for each in found if each["topic"] == "notebook"]


def test_doctor_checks_both_ways_between_a_node_and_the_notebook(lab: SlurmLab, tmp_path: Path) -> None:
    both_ok = check_notebook(lab, tmp_path)
    assert [level for level, _, _ in both_ok] == ["ok", "ok"], both_ok
    assert lab.queue() == [] or wait_until(lambda: lab.queue() == [], _SECONDS)


@pytest.mark.long
def test_doctor_does_not_wait_for_a_busy_node(lab: SlurmLab, busy: str, tmp_path: Path) -> None:
    ((level, text, _),) = check_notebook(lab, tmp_path)
    assert level == "fail"
    assert "srun: error: Unable to allocate resources: Requested nodes are busy" in text
    lab.run("scancel", busy)
