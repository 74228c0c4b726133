"""The input of scripts: the address of the data service, and the shares of the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tf4slurm
from tf4slurm.errors import SlurmEnvironmentError
from tf4slurm.system.variables import SERVICES_VARIABLE


def test_data_service_is_the_dispatchers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVICES_VARIABLE, '{"data-dispatcher": ["[fd00::1]:4001"], "data-worker": ["[fd00::2]:4001"]}')
    assert tf4slurm.data_service() == "grpc://[fd00::1]:4001"


@pytest.mark.parametrize("services", [None, "{}"])
def test_job_without_data_service_is_an_error_with_the_option(
    monkeypatch: pytest.MonkeyPatch, services: str | None
) -> None:
    monkeypatch.delenv(SERVICES_VARIABLE, raising=False)
    if services is not None:
        monkeypatch.setenv(SERVICES_VARIABLE, services)
    with pytest.raises(SlurmEnvironmentError, match="--data-workers 2") as caught:
        tf4slurm.data_service()
    assert caught.value.variable == SERVICES_VARIABLE


@given(data=st.data(), files=st.sets(st.text(min_size=1), min_size=1))
def test_each_file_is_read_once_in_an_epoch(data: st.DataObject, files: set[str]) -> None:
    count = data.draw(st.integers(1, len(files)))
    orders = [data.draw(st.permutations(sorted(files))) for _ in range(count)]  # each host lists them in another order
    shares = [tf4slurm.share_of(order, index, count) for index, order in enumerate(orders)]
    assert sorted(file for share in shares for file in share) == sorted(files)
    sizes = [len(share) for share in shares]
    assert min(sizes) >= max(sizes) - 1 >= 0


def test_share_is_every_count_th_file_by_name() -> None:
    files = [Path("b"), Path("e"), Path("a"), Path("d"), Path("c")]
    assert [tf4slurm.share_of(files, index, 2) for index in (0, 1)] == [["a", "c", "e"], ["b", "d"]]


@pytest.mark.parametrize(
    ("files", "index", "count", "words"),
    [
        (["a", "b"], 0, 3, "2 files are too few for 3 workers: some would have nothing to read."),
        ([], 0, 1, "0 files are too few for 1 workers"),
        (["a", "b", "a"], 0, 2, "'a' is named twice"),
        (["a", "b"], 2, 2, "There is no worker 2 of 2: expected an index from 0 to 1."),
        (["a", "b"], -1, 2, "There is no worker -1 of 2"),
    ],
)
def test_invalid_share_is_refused(files: list[str], index: int, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        tf4slurm.share_of(files, index, count)


def test_tensor_as_index_is_an_error_that_names_worker_files() -> None:
    with pytest.raises(TypeError, match=r"call tf4slurm\.tensorflow\.worker_files\(files\) instead"):
        tf4slurm.share_of(["a", "b"], object(), 2)  # type: ignore[arg-type]
