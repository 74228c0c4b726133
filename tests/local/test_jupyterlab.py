"""`Job.plot()` in a real JupyterLab, in a real browser."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.browser import Browser, Page
from tests.processes import wait_until

RUN = Path(__file__).parents[1] / "data" / "runs" / "digits"
PICTURE = "document.querySelector('.jp-OutputArea-output img')"
SIZES = f"""(() => {{
    const area = document.querySelector('.jp-OutputArea-output').getBoundingClientRect();
    const box = {PICTURE}.getBoundingClientRect();
    const ratio = {PICTURE}.naturalWidth / {PICTURE}.naturalHeight;
    return [box.width, box.width / box.height, ratio, area.right - box.right];
}})()"""


@contextmanager
def jupyterlab(directory: Path) -> Iterator[str]:
    """Start JupyterLab in a directory on the loopback address; yield its URL with "{}" for the path of a page."""
    home = directory / "home"
    environ = {**os.environ, "HOME": str(home), "JUPYTER_RUNTIME_DIR": str(home / "runtime")}
    words = ["--no-browser", "--ip", "127.0.0.1", "--port", "0", "--ServerApp.port_retries=0", "--allow-root"]
    words += ["--ServerApp.root_dir", str(directory), "--LabApp.news_url=", "--LabApp.check_for_updates_class"]
    words += ["jupyterlab.NeverCheckForUpdate"]
    home.mkdir()
    with (home / "log").open("wb") as log:
        command = [sys.executable, "-m", "jupyterlab", *words]
        with subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True) as process:
            try:
                found = home / "runtime"
                assert wait_until(lambda: bool([*found.glob("jpserver-*.json")]), 120), (home / "log").read_text()
                server = json.loads(next(found.glob("jpserver-*.json")).read_text())
                yield f"{server['url']}{{}}?token={server['token']}"
            finally:
                process.terminate()  # the server then ends its kernels, which have sessions of their own
                process.wait(60)


def has_width(page: Page, low: float, high: float) -> bool:
    width: float = page.evaluate(SIZES)[0]
    return low < width < high


def is_shown(page: Page) -> bool:
    return bool(page.evaluate(f"{PICTURE} !== null && {PICTURE}.complete && {PICTURE}.naturalWidth > 0"))


@pytest.mark.long
def test_picture_of_a_job_is_not_cut_off(browser: Browser, tmp_path: Path) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    cell: dict[str, Any] = {"cell_type": "code", "id": "plot", "metadata": {}, "outputs": [], "execution_count": None}
    cell["source"] = f"import tf4slurm\ntf4slurm.Job.find({str(RUN)!r}).plot()"
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}
    notebook = nbformat.reads(json.dumps(content), as_version=4)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (directory / "plot.ipynb").write_text(json.dumps(notebook))
    with jupyterlab(directory) as url, browser.open(url.format("lab/tree/plot.ipynb"), 1000, 900) as page:
        assert wait_until(lambda: is_shown(page), 120), page.errors
        for width in (1000, 1600):
            page.resize(width, 900)
            low, high = width * 0.5, width  # the layout follows a resize after a moment
            assert wait_until(functools.partial(has_width, page, low, high), 60)
            _, ratio, true_ratio, space = page.evaluate(SIZES)
            assert space >= 0
            assert ratio == pytest.approx(true_ratio, rel=0.01)
        page.screenshot(tmp_path / "lab.png", is_whole=False)
