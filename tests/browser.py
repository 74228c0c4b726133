"""Headless Chromium: the DOM, the text and the colors of a page, and pages that a test operates by mouse."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

from tests.png import count_colors
from tests.processes import wait_until

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
        body = re.sub(r"(?s)<(script|style)\b.*?</\1>|^.*?<body[^>]*>", " ", self.dom(url, seconds))
        return " ".join(re.sub(r"<[^>]*>", " ", body).split())

    def colors(self, url: str, width: int = 700, height: int = 900, *, dark: bool = False) -> Counter[bytes]:
        """Return the number of pixels of each color in the first screen of the page."""
        path = self._directory / "page.png"
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        self._run(f"--window-size={width},{height}", f"--screenshot={path}", *scheme, url)
        return count_colors(path)

    @contextlib.contextmanager
    def open(self, url: str, width: int = 1280, height: int = 1000) -> Iterator[Page]:
        """Open a page of this size, which a test can operate, and close it afterwards."""
        profile = self._directory / "profile"
        options = (*_OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "--remote-allow-origins=*")
        port_file = profile / "DevToolsActivePort"
        port_file.unlink(missing_ok=True)
        with self._start(*options, "about:blank", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            assert wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") == 1, 60)
            port, path = port_file.read_text().split()
            socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=_TIMEOUT_SECONDS)
            with contextlib.closing(socket):
                yield Page(socket, url, width, height)

    def _run(self, *options: str) -> str:
        options = (*_OPTIONS, f"--user-data-dir={self._directory / 'profile'}", *options)
        with self._start(*options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            stdout, stderr = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert process.returncode == 0, stderr
        return stdout

    @contextlib.contextmanager
    def _start(self, *options: str, stdout: int, stderr: int) -> Iterator[subprocess.Popen[str]]:
        """Start Chromium, and afterwards kill all its processes and remove its temporary files."""
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
            subprocess.Popen(
                [self._program, *options],
                env={**os.environ, "TMPDIR": temporary},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                errors="replace",
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


class Page:
    """A page in a running Chromium, operated by the DevTools protocol.

    Attributes:
        errors: What the page has written to the console as errors, and its uncaught exceptions.
    """

    def __init__(self, socket: websocket.WebSocket, url: str, width: int, height: int) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        assert wait_until(lambda: self.evaluate("document.readyState") == "complete", 60)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters, **self._session}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._handle_event(message["method"], message["params"])

    def _handle_event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown" or (
            (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"))
            or (method == "Log.entryAdded" and parameters["entry"]["level"] == "error")
        ):
            self.errors.append(json.dumps(parameters))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the page in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def prefer_dark(self) -> None:
        """Ask the page for dark colors."""
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        self.call("Emulation.setEmulatedMedia", features=[dark])

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """Send a mouse event at a position of the window; `kind` is "Moved", "Pressed" or "Released"."""
        button = {} if kind == "Moved" else {"button": "left", "clickCount": clicks}
        self.call(
            "Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, buttons=1 if kind == "Pressed" else 0, **button
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at one position and release it at another."""
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=end[0], y=end[1], button="left", buttons=1)
        self.mouse("Released", *end)

    def double_click(self, x: float, y: float) -> None:
        for clicks in (1, 2):
            self.mouse("Pressed", x, y, clicks)
            self.mouse("Released", x, y, clicks)

    def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        """Write a picture of the page, or of its visible part."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(picture["data"]))


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
