"""tf4slurm.system.proc finds processes while threads end."""

import os
import subprocess
import threading

import pytest

from tf4slurm.system.proc import find_children


def test_children_are_found_while_threads_end() -> None:
    """A thread's list of children is gone when it ends, and its children move to another list."""
    child = subprocess.Popen(["sleep", "300"])
    done = threading.Event()

    def start_threads() -> None:
        while not done.is_set():
            threading.Thread(target=int).start()

    starter = threading.Thread(target=start_threads)
    starter.start()
    try:
        assert all(child.pid in find_children(os.getpid()) for _ in range(2000))
    finally:
        done.set()
        starter.join()
        child.kill()
        child.wait()


def test_process_that_has_ended_has_no_list_of_children() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(FileNotFoundError):
        find_children(child.pid)
