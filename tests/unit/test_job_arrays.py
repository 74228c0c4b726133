"""Job arrays and heterogeneous jobs in the verbs, with fakes of Slurm's programs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from tests.fake_slurm import FakeSlurm
from tf4slurm import api
from tf4slurm.cli.jobs import list_, resume, wait
from tf4slurm.cli.jobs import status as status_verb
from tf4slurm.cli.main import cli
from tf4slurm.errors import JobStateError, LaunchError, WaitTimeoutError
from tf4slurm.jobs import cancellation
from tf4slurm.jobs.registry import find_job, register_cancelled
from tf4slurm.jobs.schema import JobFile, Process, ResultFile, StatusFile
from tf4slurm.jobs.status import FORGOTTEN, JobStatus
from tf4slurm.jobs.status_reader import StatusReader
from tf4slurm.slurm.job_id import JobId

NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
SCRIPT = "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --array=0-5%2\nexec train\n"


@pytest.fixture
def slurm(fake_slurm: FakeSlurm) -> FakeSlurm:
    return fake_slurm


def states(status: JobStatus) -> list[str]:
    return [each.state for each in status.elements]


@pytest.mark.parametrize(
    ("results", "queue", "state", "exit_code", "elements"),
    [
        ({}, {0: "PENDING", 1: "PENDING"}, "PENDING", None, ["PENDING", "PENDING"]),
        ({0: ("COMPLETED", 0)}, {1: "PENDING"}, "PENDING", None, ["COMPLETED", "PENDING"]),
        ({0: ("FAILED", 7), 1: None}, {1: "RUNNING"}, "RUNNING", None, ["FAILED", "RUNNING"]),
        ({1: None}, {0: "PENDING", 1: "RUNNING"}, "RUNNING", None, ["PENDING", "RUNNING"]),
        ({0: ("COMPLETED", 0), 1: ("COMPLETED", 0)}, {}, "COMPLETED", 0, ["COMPLETED", "COMPLETED"]),
        ({0: ("STOPPED", 130), 1: ("FAILED", 7)}, {}, "FAILED", 7, ["STOPPED", "FAILED"]),
        ({0: ("STOPPED", 130), 1: ("COMPLETED", 0)}, {}, "STOPPED", 130, ["STOPPED", "COMPLETED"]),
        ({0: ("COMPLETED", 0)}, {1: "CANCELLED"}, "STOPPED", 1, ["COMPLETED", "STOPPED"]),
        ({0: ("FAILED", 7)}, {}, "FAILED", 7, ["FAILED", FORGOTTEN]),  # how element 1 ended is unknown
        ({0: ("COMPLETED", 0)}, {}, FORGOTTEN, None, ["COMPLETED", FORGOTTEN]),
        ({}, {}, FORGOTTEN, None, [FORGOTTEN, FORGOTTEN]),
        ({0: ("FAILED", 7)}, {0: "RUNNING", 1: "PENDING"}, "PENDING", None, ["FAILED", "PENDING"]),
        ({0: ("REQUEUED", 75)}, {0: "PENDING", 1: "PENDING"}, "PENDING", None, ["PENDING", "PENDING"]),
        ({0: ("REQUEUED", 75), 1: ("FAILED", 7)}, {0: "RUNNING"}, "RUNNING", None, ["RUNNING", "FAILED"]),
    ],
)
def test_state_of_an_array_is_combined_from_its_elements(
    slurm: FakeSlurm,
    results: dict[int, tuple[str, int] | None],
    queue: dict[int, str],
    state: str,
    exit_code: int | None,
    elements: list[str],
) -> None:
    slurm.register("19", range(2))
    for index, result in results.items():
        slurm.run(f"train-19_{index}", *(result or ()))
    slurm.set_queue(**{f"j19_{index}": word for index, word in queue.items()})
    status = api.status("19")
    assert (status.state, status.exit_code, states(status)) == (state, exit_code, elements)
    assert status.can_change == (exit_code is None and FORGOTTEN not in elements)
    assert [each.labels for each in status.elements] == [{"lr": "0.0"}, {"lr": "0.1"}]


def test_elements_that_only_slurm_knows_belong_to_the_array(slurm: FakeSlurm) -> None:
    slurm.register("19", [1])
    slurm.register("20")  # by an older version
    slurm.set_queue(j19_1="RUNNING", j19_7="PENDING", j20_3="RUNNING", j20_4="PENDING")
    assert [each.job_id for each in api.status("19").elements] == ["19_1", "19_7"]
    assert [each.name for each in api.status("20").elements] == ["train-20_3", "train-20_4"]
    assert api.status("19_[1]").elements == ()


def test_ended_elements_without_result_have_the_end_that_slurm_knows(slurm: FakeSlurm) -> None:
    """Slurm is asked once for all of them."""
    slurm.register("19", range(5))
    slurm.set_queue(j19_0="FAILED", j19_1="CANCELLED", j19_2="COMPLETED", j19_3="TIMEOUT", j19_4="FAILED")
    slurm.set_jobs(
        *(
            f"JobId={30 + index} ArrayJobId=19 ArrayTaskId={index} ExitCode={codes}\n"
            for index, codes in enumerate(("3:0", "0:15", "0:0", "0:0", "0:9"))
        )
    )
    reader = StatusReader([find_job("19", os.environ)])
    for _ in range(2):
        (status,) = reader.read()
        assert [(each.state, each.exit_code) for each in status.elements] == [
            ("FAILED", 3),
            ("STOPPED", 143),
            ("COMPLETED", 0),
            ("STOPPED", 1),
            ("FAILED", 137),
        ]
    assert (len(slurm.calls("sacct")), len(slurm.calls("scontrol")), len(slurm.calls("squeue"))) == (1, 1, 1)
    slurm.fake("sacct", "for i in 0 1 2 3; do echo \"19_$i|FAILED|$i:0\"; done; echo '19_4|RUNNING|0:0'")
    slurm.set_queue()
    status = api.status("19")
    assert [each.exit_code for each in status.elements] == [1, 1, 2, 3, 137]  # that of element 4 was seen before
    assert (states(status)[4], status.exit_code) == ("FAILED", 1)


def test_element_cancelled_while_pending_is_stopped_after_slurm_has_forgotten_it(slurm: FakeSlurm) -> None:
    job = slurm.register("19", range(4))
    slurm.run("train-19_2")  # it started before the cancellation, and was killed
    register_cancelled(job, JobId(19, (1, 2)), os.environ)
    assert states(api.status("19")) == [FORGOTTEN, "STOPPED", FORGOTTEN, FORGOTTEN]
    plain = slurm.register("17")
    register_cancelled(plain, JobId(17), os.environ)
    assert api.status("17").state == "STOPPED"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_in_the_place_of_a_pending_elements_is_not_read(slurm: FakeSlurm) -> None:
    slurm.register("19", range(2))
    slurm.set_queue(j19_0="PENDING", j19_1="RUNNING")
    for index in range(2):
        os.chown(slurm.run(f"train-19_{index}", "COMPLETED").path, 65534, 65534)
    assert states(api.status("19")) == ["PENDING", "RUNNING"]


@pytest.mark.parametrize(
    ("queue", "state"),
    [
        ({"j22p0": "RUNNING", "j22p1": "RUNNING"}, "RUNNING"),
        ({"j22p0": "RUNNING", "j22p1": "FAILED"}, "RUNNING"),
        ({"j22p0": "CANCELLED", "j22p1": "RUNNING"}, "RUNNING"),
        ({"j22p0": "PENDING", "j22p1": "PENDING"}, "PENDING"),
        ({"j22p1": "COMPLETING"}, "COMPLETING"),
        ({"j22p0": "FAILED", "j22p1": "CANCELLED"}, "FAILED"),
        ({}, FORGOTTEN),
    ],
)
def test_state_of_a_heterogeneous_job(slurm: FakeSlurm, queue: dict[str, str], state: str) -> None:
    slurm.register("22")
    slurm.set_queue(**queue)
    slurm.set_jobs(
        "JobId=22 HetJobId=22 HetJobOffset=0 ExitCode=3:0\n", "JobId=23 HetJobId=22 HetJobOffset=1 ExitCode=4:0"
    )
    status = api.status("22")
    assert (status.state, status.exit_code, status.elements) == (state, 3 if state == "FAILED" else None, ())
    assert api.status("22+1").job_id == "22"


def test_without_an_answer_of_slurm_elements_are_unknown_unless_their_files_show_more(slurm: FakeSlurm) -> None:
    slurm.register("19", range(4))
    slurm.run("train-19_0", "COMPLETED")
    slurm.run("train-19_1")
    slurm.run("train-19_2", age=1000)
    slurm.fake("squeue", NO_ANSWER)
    status = api.status("19")
    assert states(status) == ["COMPLETED", "RUNNING", "UNKNOWN", "UNKNOWN"]
    assert (status.exit_code, status.can_change) == (None, True)
    assert "Unable to contact slurm controller" in status.warnings[0]
    assert not slurm.calls("sacct"), "it would be asked in vain"
    verbs: tuple[Callable[[str], JobStatus], ...] = (api.cancel, api.resume)
    for verb, text in itertools.product(verbs, ("19", "19_3")):
        with pytest.raises(JobStateError, match="It is unknown whether train-19_"):
            verb(text)
    assert not slurm.calls("scancel") + slurm.calls("sbatch")


def test_ended_element_is_read_again_only_after_an_answer_of_slurm(slurm: FakeSlurm) -> None:
    """But a new run directory, of a requeued element, is seen at once."""
    slurm.register("19", range(2))
    first = slurm.run("train-19_0", "REQUEUED", 75)
    slurm.run("train-19_1", "COMPLETED")
    reader = StatusReader([find_job("19", os.environ)])
    assert states(reader.read()[0]) == ["REQUEUED", "COMPLETED"]
    first.write_result(ResultFile("FAILED", 7))
    assert states(reader.read()[0])[0] == "REQUEUED"
    slurm.run("train-19_0", "COMPLETED")
    assert states(reader.read()[0])[0] == "COMPLETED"


@pytest.mark.parametrize("answer", ["forgotten", "unknown"])
@pytest.mark.parametrize("text", ["19", "19_1", "19_[0-1]", "17"])
@pytest.mark.parametrize("grace", [None, 0])
def test_cancel_of_what_may_have_ended_is_refused(
    slurm: FakeSlurm, text: str, answer: str, grace: float | None
) -> None:
    slurm.register("19", range(2))
    slurm.register("17")
    slurm.run("train-19_0", "COMPLETED")
    if answer == "unknown":
        slurm.fake("squeue", NO_ANSWER)
    with pytest.raises(JobStateError) as caught:
        api.cancel(text, grace_period_seconds=grace)
    name = "train-17" if text == "17" else "train-19_1"
    assert str(caught.value).startswith(f"It is unknown whether {name} still runs, so nothing was changed. ")
    assert ("Unable to contact slurm controller" in str(caught.value)) == (answer == "unknown")
    assert not slurm.calls("scancel")


def test_cancel_ends_pending_elements_before_it_asks_running_ones(slurm: FakeSlurm) -> None:
    slurm.register("19", range(6))
    slurm.run("train-19_0")
    slurm.run("train-19_5", "COMPLETED")
    slurm.set_queue(j19_0="RUNNING", j19_1="RUNNING", j19_2="PENDING", j19_4="PENDING")
    result = slurm.runs / "train-19_0" / "result.json"
    stop = json.dumps({"state": "STOPPED", "exit_code": 130})
    ended = f"sed -i s/PENDING/CANCELLED/ {slurm.directory}/queue"
    killed = f"sed -i '/19_1/s/RUNNING/CANCELLED/' {slurm.directory}/queue"
    slurm.fake("scancel", f"case $* in *signal*) echo '{stop}' > {result};; *19_1) {killed};; *) {ended};; esac")
    sentences: list[str] = []
    status = api.cancel("19", on_progress=sentences.append)
    assert slurm.calls("scancel") == ["19_[2,4]", "--verbose --signal=INT --batch 19_0", "19_1"]
    assert states(status) == ["STOPPED", "STOPPED", "STOPPED", FORGOTTEN, "STOPPED", "COMPLETED"]
    assert sentences[0] == "train-19: 2 pending elements cancelled."
    assert sentences[1].startswith("1 element of train-19 is asked to save and stop")
    assert sentences[2].startswith("train-19: nothing runs any more. 6 elements: 1 COMPLETED, 4 STOPPED, 1 FORGOTTEN.")
    assert find_job("19", os.environ).cancelled == "19_[2,4]"


@pytest.mark.parametrize("has_ended", [True, False])
def test_cancel_asks_all_running_elements_although_one_request_fails(slurm: FakeSlurm, has_ended: bool) -> None:
    """The request for an element that ends in the meantime fails."""
    slurm.register("19", range(2))
    first, second = (slurm.run(f"train-19_{index}") for index in range(2))
    slurm.set_queue(j19_0="RUNNING", j19_1="RUNNING")
    stop = json.dumps({"state": "STOPPED", "exit_code": 130})
    end = f"echo '{stop}' > {first.path}/result.json;" if has_ended else ""
    fail = f"{end} echo 'scancel: error: Kill job error on job id 19_0' >&2; exit 1"
    slurm.fake("scancel", f"case $* in *19_0) {fail};; *) echo '{stop}' > {second.path}/result.json;; esac")
    if has_ended:
        assert states(api.cancel("19")) == ["STOPPED", "STOPPED"]
    else:
        with pytest.raises(LaunchError, match="Kill job error on job id 19_0"):
            api.cancel("19")
    assert [call.split()[-1] for call in slurm.calls("scancel")] == ["19_0", "19_1"], "nothing was killed"


def test_end_that_slurm_forgets_later_is_kept(slurm: FakeSlurm) -> None:
    slurm.register("19", range(2))
    slurm.register("17")
    slurm.set_queue(j19_0="FAILED", j19_1="RUNNING", j17="CANCELLED")
    reader = StatusReader([find_job("19", os.environ), find_job("17", os.environ)], ask_seconds=0.0)
    assert [states(reader.read()[0])[0], reader.read()[1].state] == ["FAILED", "STOPPED"]
    slurm.set_queue()
    array, job = reader.read()
    assert [*states(array), job.state] == ["FAILED", FORGOTTEN, "STOPPED"]


def test_array_submitted_by_hand_may_go_on_while_slurm_does_not_answer(slurm: FakeSlurm) -> None:
    """Its pending elements are known to Slurm only."""
    slurm.register("19_0")
    slurm.run("train-19_0", "FAILED", 7)
    slurm.set_queue(j19_0="FAILED", j19_1="PENDING")
    assert states(api.status("19")) == ["FAILED", "PENDING"]
    slurm.fake("squeue", NO_ANSWER)
    status = api.status("19")
    assert (status.can_change, status.exit_code) == (True, None)
    with pytest.raises(JobStateError, match="It is unknown whether"):
        api.resume("19")
    assert not slurm.calls("sbatch")


@pytest.mark.parametrize("text", ["19_1", "19_[1-1]", "19_[1-2]"])
def test_cancel_of_some_elements_leaves_the_others(slurm: FakeSlurm, text: str) -> None:
    """Also if the array was submitted without tf4slurm."""
    for index in range(3):
        slurm.register(f"19_{index}")
    slurm.set_queue(j19_0="RUNNING", j19_1="RUNNING", j19_2="PENDING", j19_3="PENDING")
    api.cancel(text)
    named = {word for call in slurm.calls("scancel") for word in call.split()}
    assert named == ({"19_1", "19_2"} if text == "19_[1-2]" else {"19_1"})


def test_job_that_is_requeued_while_it_is_asked_to_stop_is_cancelled(slurm: FakeSlurm) -> None:
    slurm.register("17")
    slurm.run("train-17")
    slurm.set_queue(j17="RUNNING")
    slurm.fake("scancel", f"case $* in *signal*) sed -i s/RUNNING/PENDING/ {slurm.directory}/queue;; esac")
    slurm.set_jobs("JobId=17 BatchFlag=1 JobState=RUNNING Partition=p")
    slurm.run("train-17", "REQUEUED", 75)
    sentences: list[str] = []
    api.cancel("17", on_progress=sentences.append)
    assert slurm.calls("scancel") == ["--verbose --signal=INT --batch 17", "17"]
    assert sentences[-1] == "train-17 did not stop in time and was killed."


def test_controller_that_fails_during_a_cancellation_is_no_end_of_the_job(slurm: FakeSlurm) -> None:
    slurm.register("17")
    slurm.run("train-17", age=1000)
    slurm.set_queue(j17="RUNNING")
    slurm.set_jobs("JobId=17 BatchFlag=1 JobState=RUNNING Partition=p")
    slurm.fake("scancel", f"printf '#!/bin/sh\\nexit 1\\n' > {slurm.directory}/squeue")
    sentences: list[str] = []
    with pytest.raises(JobStateError, match="unknown whether train-17 still runs, because Slurm does not answer"):
        api.cancel("17", on_progress=sentences.append)
    assert len(slurm.calls("scancel")) == 1
    assert len(sentences) == 1


def test_cancellation_continues_after_a_query_without_an_answer(slurm: FakeSlurm) -> None:
    slurm.register("17")
    run = slurm.run("train-17", age=1000)
    slurm.set_queue(j17="RUNNING")
    slurm.set_jobs("JobId=17 BatchFlag=1 JobState=RUNNING Partition=p")
    answer = f"cat {slurm.directory}/queue"
    result = f'echo \'{{"state": "STOPPED", "exit_code": 130}}\' > {run.path}/result.json'
    slurm.fake("scancel", f"touch {slurm.directory}/asked")
    fails = f"[ -e {slurm.directory}/asked ] && {{ rm {slurm.directory}/asked; exit 1; }}"
    slurm.fake("squeue", f"{fails}; [ $(grep -c squeue {slurm.directory}/calls) = 4 ] && {result}; {answer}")
    sentences: list[str] = []
    status = api.cancel("17", grace_period_seconds=20, on_progress=sentences.append)
    assert (status.state, sentences[-1]) == ("STOPPED", "train-17 has ended: STOPPED, exit code 130.")
    assert len(slurm.calls("scancel")) == 1


def test_elements_that_save_keep_their_time_and_the_others_are_asked(slurm: FakeSlurm) -> None:
    """An element that saves already gets no signal, which could reach its scripts."""
    slurm.register("19", range(3))
    runs = [slurm.run(f"train-19_{index}") for index in range(3)]
    runs[0].write(StatusFile(time=time.time(), phase="stopping", grace_seconds_left=17.2))
    runs[1].write(StatusFile(time=time.time(), phase="terminating"))
    slurm.set_queue(j19_0="RUNNING", j19_1="COMPLETING", j19_2="RUNNING")
    slurm.set_jobs("JobId=19 BatchFlag=1 JobState=RUNNING Partition=p")
    stop = json.dumps({"state": "STOPPED", "exit_code": 130})
    slurm.fake("scancel", f"for run in {slurm.runs}/train-19_*; do echo '{stop}' > $run/result.json; done")
    sentences: list[str] = []
    status = api.cancel("19", grace_period_seconds=0.1, on_progress=sentences.append)
    assert slurm.calls("scancel") == ["--verbose --signal=INT --batch 19_2"]
    assert sentences == [
        "1 element of train-19 is asked to save and stop; at most 0.1 s are left.",
        "2 elements of train-19 save already, or end: at most 17 s are left. To skip them: tf4slurm cancel --now 19",
        "train-19 has ended: STOPPED, exit code 130.",
    ]
    assert states(status) == ["STOPPED"] * 3


def test_element_that_got_a_request_meanwhile_is_not_asked_again(slurm: FakeSlurm) -> None:
    """The state of the elements was read before the first request."""
    slurm.register("19", range(2))
    runs = [slurm.run(f"train-19_{index}") for index in range(2)]
    draft = slurm.runs / "stopping.json"
    draft.write_text(
        json.dumps({"schema_version": 1, "time": time.time(), "phase": "stopping", "grace_seconds_left": 9})
    )
    slurm.set_queue(j19_0="RUNNING", j19_1="RUNNING")
    slurm.set_jobs("JobId=19 BatchFlag=1 JobState=RUNNING Partition=p")
    stop = json.dumps({"state": "STOPPED", "exit_code": 130})
    slurm.fake("scancel", f"echo '{stop}' > {runs[0].path}/result.json; mv {draft} {runs[1].path}/status.json")
    sentences: list[str] = []

    def note(text: str) -> None:
        sentences.append(text)
        if "saves already" in text:
            runs[1].write_result(ResultFile("STOPPED", 130))

    api.cancel("19", on_progress=note)
    assert slurm.calls("scancel") == ["--verbose --signal=INT --batch 19_0"]
    assert "1 element of train-19 saves already, or ends: at most 9 s are left." in sentences[1]


def test_job_that_runs_again_is_asked_although_an_old_status_has_its_end(slurm: FakeSlurm) -> None:
    slurm.register("17")
    slurm.run("train-17").write(
        StatusFile(time=time.time() - 1000, phase="terminating", heartbeat_timeout_seconds=10.0)
    )
    slurm.set_queue(j17="RUNNING")
    slurm.set_jobs("JobId=17 BatchFlag=1 JobState=RUNNING Partition=p")
    slurm.fake("scancel", f"case $* in *signal*) sed -i s/RUNNING/COMPLETED/ {slurm.directory}/queue;; esac")
    api.cancel("17")
    assert slurm.calls("scancel") == ["--verbose --signal=INT --batch 17"]


@pytest.mark.parametrize(
    ("kill_wait", "now", "seconds"), [(30, True, 36), (4, True, 10), (1, True, 10), (None, True, 10), (30, False, 136)]
)
def test_kill_waits_for_a_long_kill_wait_of_the_job(kill_wait: float | None, now: bool, seconds: float) -> None:
    file = JobFile(options={} if kill_wait is None else {"kill_wait_seconds": kill_wait})
    stop = cancellation._Stop(None, now, print)
    assert stop.seconds_until_kill(100, file) == seconds


@pytest.mark.parametrize("verb", ["cancel", "grow", "shrink"])
def test_name_of_several_jobs_that_run_is_refused(slurm: FakeSlurm, verb: str) -> None:
    for job_id in ("15", "17", "18"):
        slurm.register(job_id)
    slurm.set_queue(j15="COMPLETED", j17="RUNNING", j18="PENDING")
    calls: dict[str, Callable[[], object]] = {
        "cancel": lambda: api.cancel("train"),
        "grow": lambda: api.grow("train", 1),
        "shrink": lambda: api.shrink("train", 1),
    }
    expected = r"2 jobs with the name 'train' are pending or run: 18 \(PENDING\), 17 \(RUNNING\)\. Give the id"
    with pytest.raises(JobStateError, match=expected):
        calls[verb]()
    words = ["train"] if verb == "cancel" else ["train", "--workers", "1"]
    assert isinstance(CliRunner().invoke(cli, [verb, *words], obj={}).exception, JobStateError)
    assert not slurm.calls("scancel") + slurm.calls("sbatch")


def test_name_is_that_of_the_job_that_runs_among_ended_ones(slurm: FakeSlurm) -> None:
    for job_id in ("17", "18", "19"):
        slurm.register(job_id)
    slurm.set_queue(j17="COMPLETED", j18="RUNNING", j19="FAILED")
    assert api.find("train").job_id == "19"
    assert api.find_to_change("train").job_id == "18"
    assert api.find_to_change("train-19").job_id == "19"
    slurm.set_queue(j17="COMPLETED", j18="COMPLETED", j19="FAILED")
    assert api.find_to_change("train").job_id == "19"


def test_name_of_an_element_is_that_of_the_array_that_runs(slurm: FakeSlurm) -> None:
    slurm.register("17", range(3))
    slurm.register("18", range(3))
    slurm.register("19", range(2))
    slurm.set_queue(j17_1="RUNNING", j19_1="COMPLETED", j18_1="COMPLETED")
    assert api.find_to_change("train_1").job_id == "17_1"


def test_cancel_now_ends_elements_that_save(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "_NOW_SECONDS", 0.3)
    slurm.register("19", range(2))
    for index in range(2):
        slurm.run(f"train-19_{index}").write(
            StatusFile(time=time.time(), phase="stopping", heartbeat_timeout_seconds=10, grace_seconds_left=17.2)
        )
    slurm.set_queue(j19_0="RUNNING", j19_1="RUNNING")
    slurm.set_jobs("JobId=19 BatchFlag=1 JobState=RUNNING Partition=p")
    steps = "*--steps*19_0*) echo 19_0.batch; echo 19_0.3;; *--steps*) exit 1;;"
    slurm.fake("squeue", f"case $* in {steps} *) cat {slurm.directory}/queue;; esac")
    stopped = f"sed -i s/RUNNING/CANCELLED/ {slurm.directory}/queue"
    slurm.fake("scancel", f"case $* in *'19_0 19_1') {stopped};; esac")
    sentences: list[str] = []
    api.cancel("19", now=True, on_progress=sentences.append)
    assert slurm.calls("scancel") == [
        "--verbose --signal=QUIT --batch 19_0",
        "--verbose --signal=QUIT --batch 19_1",
        "19_0.3",
        "19_0 19_1",
    ]
    assert sentences == [
        "2 elements of train-19 are asked to end at once.",
        "19_0 19_1 did not end and was killed.",
    ]


@pytest.mark.parametrize(("now", "number"), [(False, signal.SIGTERM), (True, signal.SIGQUIT)])
def test_launcher_of_salloc_on_this_host_is_asked_to_stop(slurm: FakeSlurm, now: bool, number: signal.Signals) -> None:
    slurm.register("17")
    slurm.set_queue(j17="RUNNING")
    slurm.set_jobs("JobId=17 BatchFlag=0 JobState=RUNNING Partition=p")
    with subprocess.Popen(["sleep", "1000"]) as process:
        slurm.run("train-17").write(JobFile(grace_period_seconds=0.1, process=Process.of(process.pid)))
        api.cancel("17", grace_period_seconds=None if now else 0.3, now=now)
        assert process.wait(60) == -number


@pytest.mark.parametrize("now", [False, True])
def test_step_whose_rank_0_runs_the_launcher_is_asked_to_stop(slurm: FakeSlurm, now: bool) -> None:
    slurm.register("17")
    slurm.run("train-17").write(JobFile(grace_period_seconds=0.1, step="17.0"))
    slurm.set_queue(j17="RUNNING")
    slurm.fake("squeue", f"case $* in *--steps*) echo 17.0;; *) cat {slurm.directory}/queue;; esac")
    api.cancel("17", now=now)
    assert slurm.calls("scancel")[:2] == (["17.0", "17"] if now else ["--signal=TERM 17.0", "17"])


def test_job_of_salloc_elsewhere_is_cancelled_because_no_batch_script_can_save(slurm: FakeSlurm) -> None:
    slurm.register("17")
    slurm.run("train-17").write(JobFile(process=Process("another-host", 1, 1)))
    slurm.set_queue(j17="RUNNING")
    slurm.set_jobs("JobId=17 BatchFlag=0 JobState=RUNNING Partition=p")
    api.cancel("17")
    assert slurm.calls("scancel")[0] == "17"
    assert not any("signal" in call for call in slurm.calls("scancel"))


def keep_script(slurm: FakeSlurm, name: str = "train-19") -> None:
    (slurm.runs / f"{name}.sh").write_text(SCRIPT)
    (slurm.runs / f"{name}.sh").chmod(0o700)


@pytest.mark.parametrize(
    ("results", "queue", "words"),
    [
        ({0: "COMPLETED", 1: "COMPLETED"}, {}, "All 2 elements of train-19 have completed."),
        ({0: "FAILED", 1: None}, {"j19_1": "RUNNING"}, "train-19_1 is still RUNNING."),
        ({0: "FAILED"}, {"j19_1": "PENDING"}, "train-19_1 is still PENDING."),
        ({0: "FAILED"}, {}, "It is unknown whether train-19_1 has ended. Slurm no longer has this job"),
        ({}, {}, "It is unknown whether train-19_0 has ended. Slurm no longer has this job"),
    ],
)
def test_resume_is_refused(slurm: FakeSlurm, results: dict[int, str | None], queue: dict[str, str], words: str) -> None:
    slurm.register("19", range(2))
    keep_script(slurm)
    for index, state in results.items():
        slurm.run(f"train-19_{index}", state, 0 if state == "COMPLETED" else 7)
    slurm.set_queue(**queue)
    with pytest.raises(JobStateError) as caught:
        api.resume("19")
    assert words in str(caught.value)
    assert not slurm.calls("sbatch")


def test_resumed_array_keeps_limit_labels_and_name(slurm: FakeSlurm) -> None:
    slurm.register("19", range(6))
    keep_script(slurm)
    for index in range(6):
        slurm.run(f"train-19_{index}", *(("FAILED", 7) if index in (1, 4, 5) else ("COMPLETED", 0)))
    api.resume("19", environ={**os.environ, "SBATCH_ARRAY_INX": "0-99"})
    assert slurm.calls("sbatch")[0].split()[-1] == "--array=1,4-5%2"
    for index in (1, 4, 5):
        slurm.run(f"train-50_{index}", *(("COMPLETED", 0) if index == 4 else ("STOPPED", 130)))
    slurm.fake("sbatch", "cat > /dev/null; echo 51")
    done = CliRunner().invoke(resume, ["50"], obj=dict(os.environ))
    assert (done.exit_code, done.stdout) == (0, "51\n")
    assert slurm.calls("sbatch")[1].split()[-1] == "--array=1,5%2"
    job = find_job("51", os.environ)
    assert job.name == "train-51"
    assert [(each.name, each.labels) for each in job.elements] == [
        ("train-51_1", {"lr": "0.1"}),
        ("train-51_5", {"lr": "0.5"}),
    ]
    assert job.batch_script.read_text() == SCRIPT
    api.resume("50_4")
    assert slurm.calls("sbatch")[2].split()[-1] == "--array=4%2"


def invoke_wait(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(wait, words)
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("results", "code", "lines"),
    [
        ([("COMPLETED", 0), ("COMPLETED", 0)], 0, ["train-19 COMPLETED, exit code 0. 2 elements: 2 COMPLETED."]),
        (
            [("FAILED", 9), ("STOPPED", 130)],
            9,
            [
                "train-19 FAILED, exit code 9. 2 elements: 1 STOPPED, 1 FAILED.",
                "train-19_0 FAILED, exit code 9. It is FAILED.",
                "train-19_1 STOPPED, exit code 130. It is STOPPED.",
            ],
        ),
        (
            [("COMPLETED", 0), None],
            1,
            ["train-19 FORGOTTEN. 2 elements: 1 COMPLETED, 1 FORGOTTEN.", "train-19_1 FORGOTTEN. Slurm no longer has"],
        ),
    ],
)
def test_wait_exits_with_the_code_of_the_worst_element(
    slurm: FakeSlurm, results: list[tuple[str, int] | None], code: int, lines: list[str]
) -> None:
    slurm.register("19", range(2))
    for index, result in enumerate(results):
        if result is not None:
            slurm.run(f"train-19_{index}", *result)
    exit_code, printed = invoke_wait("19")
    shown = printed.splitlines()
    assert (exit_code, len(shown)) == (code, len(lines))
    assert all(line.startswith(f"tf4slurm: {expected}") for line, expected in zip(shown, lines, strict=True)), shown


def test_wait_shows_how_many_elements_are_done_and_exits_with_124_in_time(slurm: FakeSlurm) -> None:
    slurm.register("19", range(3))
    slurm.run("train-19_0", "FAILED", 7)
    slurm.set_queue(j19_1="RUNNING", j19_2="PENDING")
    done = CliRunner().invoke(wait, ["19", "--timeout", "0"])
    assert isinstance(done.exception, WaitTimeoutError)
    assert done.exception.exit_code == 124
    assert done.stderr.splitlines()[0] == "tf4slurm: train-19 1 of 3 done, 1 failed"


def test_ten_thousand_elements_are_shown_with_few_calls_of_slurms_programs(slurm: FakeSlurm) -> None:
    """An array of this size was cancelled while it was pending, except for some elements that ended before."""
    slurm.register("19", range(10_000))
    for index in range(20):
        slurm.run(f"train-19_{index}", "COMPLETED")
    slurm.set_queue(**{f"j19_{index}": "CANCELLED" for index in range(20, 10_000)})
    for verb in (status_verb, list_):
        done = CliRunner().invoke(verb, ["19"] if verb is status_verb else [], obj={})
        assert done.exit_code == 0, done.output
        assert "10,000 elements: 20 COMPLETED, 9980 STOPPED." in done.output or "10000 of 10000 done" in done.output
    assert len(slurm.calls("squeue") + slurm.calls("sacct") + slurm.calls("scontrol")) == 6
