"""Headless Chromium: the DOM, the text and the colors of a page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.png import count_colors

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_SECONDS = 90.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # Chromium as root requires it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-crash-reporter",
    "--disable-breakpad",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # pages can load nothing else
)


class Browser:
    """Starts Chromium for each call with its own profile, and kills all its processes afterwards."""

    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._directory = directory

    def dom(self, url: str, seconds: float = 2.0) -> str:
        """Return the page as HTML after its scripts have run for this many seconds of virtual time."""
        return self._run("--dump-dom", f"--virtual-time-budget={int(1000 * seconds)}", url)

    def words(self, url: str, seconds: float = 2.0) -> str:
        """Return the visible text of the page."""
        body = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", self.dom(url, seconds).partition("<body>")[2])
        return " ".join(re.sub(r"<[^>]*>", " ", body).split())

    def colors(self, url: str, width: int = 700, height: int = 900, *, dark: bool = False) -> Counter[bytes]:
        """Return the number of pixels of each color in the first screen of the page."""
        path = self._directory / "page.png"
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        self._run(f"--window-size={width},{height}", f"--screenshot={path}", *scheme, url)
        return count_colors(path)

    def _run(self, *options: str) -> str:
        profile = self._directory / "profile"
        with subprocess.Popen(
            [self._program, *_OPTIONS, f"--user-data-dir={profile}", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=_TIMEOUT_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, stderr
        return stdout


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    """A browser; without one the test is skipped, or fails if TF4SLURM_REQUIRE_SLURM=1."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        reason = f"no browser found: {', '.join(_NAMES)} (Debian: apt-get install chromium)"
        if os.environ.get("TF4SLURM_REQUIRE_SLURM") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    directory = tmp_path / "browser"
    directory.mkdir()
    return Browser(program, directory)
