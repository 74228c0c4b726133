"""The scripts that find, unpack and remove copies of environments on a node: this host."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_until
from tf4slurm.launch.node_copies import FIND, LOCK_AND_RUN, UNPACK, parse_answers

IN_USE_MINUTES, UNUSED_MINUTES = 40, 7 * 24 * 60
PLENTY = 10**12  # kilobytes
DEADLINE_SECONDS = 60


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """The directory of all copies of this user."""
    path = tmp_path / "disk" / f"tf4slurm-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True)
    return path


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(["sh", "-c", script, "sh", *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def answer_of(process: subprocess.Popen[str]) -> str:
    (answer,) = parse_answers(process.communicate(timeout=DEADLINE_SECONDS)[0]).values()
    return answer


def find(parent: Path, name: str = "env-new", needed: int = 1, limit: int = PLENTY) -> str:
    return answer_of(start(FIND, parent, name, needed, limit, IN_USE_MINUTES, UNUSED_MINUTES))


def add(parent: Path, name: str, *, hours: float = 0.0, kilobytes: int = 0) -> Path:
    """Make a copy that was used some hours ago."""
    path = parent / name
    path.mkdir()
    (path / ".complete").write_text(f"{kilobytes}\n")
    use(path, hours)
    return path


def use(path: Path, hours: float) -> None:
    os.utime(path, (time.time() - hours * 3600,) * 2)


def copies(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


@pytest.fixture
def archive(parent: Path) -> Path:
    """An archive that has arrived, with the program tool."""
    source = parent.parent / "tool"
    source.write_text("#!/bin/sh\n")
    source.chmod(0o755)
    path = parent / "env-new.7.1.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(source, "0/tool")
    return path


def unpack(parent: Path, archive: Path, program: str = "tool") -> subprocess.Popen[str]:
    return start(UNPACK, parent, "env-new", archive.name, f"{parent}/env-new/0/{program}", ".")


def test_copy_is_missing_then_unpacked_then_found(parent: Path, archive: Path) -> None:
    assert find(parent).startswith("free: ")
    assert answer_of(unpack(parent, archive)) == "complete"
    assert copies(parent) == {"env-new"}
    assert int((parent / "env-new/.complete").read_text()) > 0
    use(parent / "env-new", 1)
    assert find(parent) == "complete"
    assert time.time() - (parent / "env-new").stat().st_mtime < 60  # so that no job removes it


@pytest.mark.parametrize("fault", ["no archive", "no program"])
def test_failed_copy_leaves_nothing(parent: Path, archive: Path, fault: str) -> None:
    if fault == "no archive":
        archive.write_text("text")
    answer = answer_of(unpack(parent, archive, "tool" if fault == "no archive" else "python"))
    assert answer.startswith("error: ")
    assert ("tar" if fault == "no archive" else "python") in answer
    assert copies(parent) == set()


def test_half_a_copy_of_a_dead_job_is_unpacked_again(parent: Path, archive: Path) -> None:
    (parent / "env-new").mkdir()
    (parent / "env-new/half").touch()
    assert find(parent).startswith("free: ")
    assert answer_of(unpack(parent, archive)) == "complete"
    assert {path.name for path in (parent / "env-new").iterdir()} == {"0", ".complete"}


@pytest.fixture
def locked(parent: Path) -> Iterator[int]:
    """The copy env-new, which another job is unpacking: the descriptor has its lock."""
    (parent / "env-new").mkdir()
    use(parent / "env-new", 2)  # for longer than any copy stays without its lock
    descriptor = os.open(parent / "env-new", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_slow_unpack_keeps_its_lock_and_other_jobs_wait_for_it(parent: Path, archive: Path, locked: int) -> None:
    assert find(parent, "env-other", PLENTY).startswith("free: ")  # removes what it may, as it lacks space
    assert find(parent).startswith("free: ")
    waiting = unpack(parent, archive)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.2)
    (parent / "env-new/.complete").write_text("1\n")
    fcntl.flock(locked, fcntl.LOCK_UN)
    assert answer_of(waiting) == "complete"
    assert {path.name for path in (parent / "env-new").iterdir()} == {".complete"}  # the other job's


def test_job_that_waits_for_an_unpack_that_fails_unpacks_itself(parent: Path, archive: Path, locked: int) -> None:
    waiting = unpack(parent, archive)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.2)
    (parent / "env-new").rename(parent / ".removed-env-new.1")
    fcntl.flock(locked, fcntl.LOCK_UN)
    assert answer_of(waiting) == "complete"
    assert (parent / "env-new/0/tool").exists()


def test_copy_of_which_a_job_was_told_is_not_removed_by_another(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job has listed the copies before, and is removing a large one."""
    is_removing, can_go_on = tmp_path / "is-removing", tmp_path / "can-go-on"
    rm = tmp_path / "rm"
    wait = f"touch {is_removing}; until [ -e {can_go_on} ]; do sleep 0.02; done"
    rm.write_text(f'#!/bin/sh\ncase "$*" in *env-large*) {wait};; esac\nexec /bin/rm "$@"\n')
    rm.chmod(0o755)
    add(parent, "env-large", hours=3)
    wanted = add(parent, "env-wanted", hours=2)
    with monkeypatch.context() as context:
        context.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        other = start(FIND, parent, "env-new", PLENTY, PLENTY, IN_USE_MINUTES, UNUSED_MINUTES)
    assert wait_until(is_removing.exists, DEADLINE_SECONDS)
    assert find(parent, "env-wanted") == "complete"
    can_go_on.touch()
    assert answer_of(other).startswith("free: ")
    assert (wanted / ".complete").exists()
    assert not (parent / "env-large").exists()


def test_removed_copy_is_never_called_complete(parent: Path) -> None:
    """A copy that is being moved away is locked: the job copies it again."""
    path = add(parent, "env-new", hours=2)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    finding = start(FIND, parent, "env-new", 1, PLENTY, IN_USE_MINUTES, UNUSED_MINUTES)
    path.rename(parent / ".removed-env-new.1")
    os.close(descriptor)
    assert answer_of(finding).startswith("free: ")


def test_used_copies_stay_and_the_least_recently_used_make_room(parent: Path) -> None:
    for name, hours in {"env-agent": 9, "env-old": 5, "env-told": 0.5}.items():
        add(parent, name, hours=hours)
    command = ["sh", "-c", LOCK_AND_RUN, str(parent / "env-agent"), "sh", "-c", "echo started; exec sleep 60"]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "started\n"
        assert find(parent, needed=PLENTY).startswith("free: ")
    finally:
        agent.kill()
        agent.communicate()
    assert copies(parent) == {"env-agent", "env-told"}


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (1000, {"env-1", "env-2", "env-3"}),
        (999, {"env-1", "env-3"}),
        (600, {"env-1"}),
        (100, set()),
    ],
)
def test_copies_beyond_the_limit_are_removed_the_least_recently_used_first(
    parent: Path, limit: int, left: set[str]
) -> None:
    for name, hours in {"env-1": 1, "env-2": 3, "env-3": 2}.items():
        add(parent, name, hours=hours, kilobytes=300)
    find(parent, needed=200, limit=limit)  # 100 for the copy itself
    assert copies(parent) == left


def test_what_dead_jobs_have_left_is_removed(parent: Path) -> None:
    add(parent, "env-week", hours=8 * 24)
    add(parent, "env-day", hours=24)
    for name, hours in {"env-half": 1, "env-unpacking": 0.1, ".removed-env-1.7": 0}.items():
        (parent / name).mkdir()
        use(parent / name, hours)
    for name, hours in {"env-new.7.1.tar": 1, "env-new.8.1.tar": 0.1, "env-day.7.1.tar": 1}.items():
        (parent / name).touch()
        use(parent / name, hours)
    find(parent)
    assert copies(parent) == {"env-day", "env-unpacking", "env-new.8.1.tar"}


def test_agent_whose_copy_is_gone_exits_with_a_sentence(parent: Path) -> None:
    (parent / "env-half").mkdir()
    for path in (parent / "env-1", parent / "env-half"):
        command = ["sh", "-c", LOCK_AND_RUN, str(path), "echo", "started"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{path}, this node's copy of the environment, is gone. Start the job again." in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("chmod 777 ..", "other users may rename"),
        ("chmod 770 ..", "other users may rename"),
        ("chmod 1777 ..", ""),
        ("chmod 777 ../..", "other users may rename"),
        ("chmod 1777 ..; chown nobody ..", "other users may rename"),
        ("chmod 777 .", ""),  # it is made private
        ("mv $PWD ../mine; ln -s mine $PWD", "is not a directory of this user"),
        ("chown nobody .", "is not a directory of this user"),
        ("cd ..; rmdir $OLDPWD; touch $OLDPWD", "File exists"),
    ],
)
def test_directory_of_copies_belongs_to_this_user_alone(parent: Path, change: str, words: str) -> None:
    if "chown" in change and os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    subprocess.run(["sh", "-c", change], cwd=parent, check=True)
    answer = find(parent)
    assert answer.startswith("error: " if words else "free: ")
    assert words in answer
    if not words:
        assert parent.stat().st_mode & 0o777 == 0o700
