"""The live page: access control, slow clients, and when serving ends."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.processes import wait_until
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports import live_page
from tf4slurm.reports.live_page import serve_page

RUNS = Path(__file__).parents[1] / "data" / "runs"


class Served:
    """A live page that is served in a thread of this process."""

    def __init__(self, run: Path) -> None:
        self.stop = threading.Event()
        self.ends: list[str] = []
        self._ready: list[str] = []
        self.thread = threading.Thread(target=self._serve, args=(RunDirectory(run),))
        self.thread.start()
        assert wait_until(lambda: bool(self._ready), 60)
        address = urlsplit(self._ready[0])
        assert address.port is not None
        self.port, self.path = address.port, address.path

    def _serve(self, run: RunDirectory) -> None:
        self.ends.append(serve_page(run, self._ready.append, should_stop=self.stop.is_set))

    def get(self, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A running job: a real one without its result."""
    path = Path(shutil.copytree(RUNS / "digits", tmp_path / "digits"))
    (path / "result.json").unlink()
    return path


@pytest.fixture
def served(run: Path) -> Iterator[Served]:
    page = Served(run)
    yield page
    page.stop.set()
    page.thread.join(60)
    assert not page.thread.is_alive()


def test_url_serves_the_page_uncached(served: Served) -> None:
    code, headers, text = served.get(served.path)
    assert code == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert "digits" in text
    assert "default-src 'none'" in text
    code, _, content = served.get(served.path + "content")
    assert code == 200
    assert json.loads(content)["ended"] is False


def test_other_path_is_refused(served: Served) -> None:
    token = served.path.strip("/")
    assert len(token) >= 43  # 256 bits
    wrong = (
        "/",
        "//",
        "/index.html",
        f"/{token[:-1]}/",
        f"/{token}x/",
        f"/{token.swapcase()}/",
        "/%00/",
        f"/x/{token}/",
    )
    for path in wrong:
        assert served.get(path)[0] == 403, path
    assert served.get(served.path + "../job.json")[0] == 404
    assert served.get(served.path, method="POST")[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "localhost@x"]
)
def test_foreign_host_name_is_refused(served: Served, host: str) -> None:
    assert served.get(served.path, host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:9"])
def test_tunnel_with_another_port_is_accepted(served: Served, host: str) -> None:
    assert served.get(served.path, host)[0] == 200


def test_server_listens_on_loopback_only(served: Served) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", served.port), timeout=60)


def test_idle_clients_do_not_block_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page._Handler, "timeout", 0.5)
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(40)]

    def is_served() -> bool:
        try:
            return served.get(served.path)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    assert wait_until(is_served, 60)
    for connection in idle:
        connection.close()


class SlowClients:
    """Connections that send a request byte by byte and never complete it."""

    def __init__(self, port: int, count: int) -> None:
        self.connections = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
        self.closed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._trickle)
        self._thread.start()

    def _trickle(self) -> None:
        text = b"GET / HTTP/1.1\r\nX-Slow: " + b"x" * 10_000
        for place in range(len(text)):
            for connection in [*self.connections]:
                try:
                    connection.send(text[place : place + 1])
                except OSError:
                    self.connections.remove(connection)
                    self.closed += 1
            if self._stop.wait(0.1):
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self.connections:
            connection.close()


@pytest.mark.parametrize("count", [16, 200])
def test_slow_clients_do_not_block_the_user(served: Served, count: int) -> None:
    slow = SlowClients(served.port, count)
    try:
        for _ in range(5):
            assert served.get(served.path)[0] == 200
    finally:
        slow.close()


def test_slow_request_is_closed_after_its_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowClients(served.port, 3)
    try:
        with monkeypatch.context() as context:
            context.setattr(live_page, "_REQUEST_SECONDS", 1.0)
            assert wait_until(lambda: slow.closed == 3, 60)
        assert served.get(served.path)[0] == 200
    finally:
        slow.close()


def test_serving_ends_after_the_end_was_fetched(served: Served, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_LAST_REQUEST_SECONDS", 300)
    shutil.copy(RUNS / "digits" / "result.json", run)
    assert wait_until(lambda: json.loads(served.get(served.path + "content")[2])["ended"], 60, 0.5)
    assert wait_until(lambda: served.ends == ["The job has ended."], 60)


def test_browser_that_rarely_updates_can_fetch_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_LAST_REQUEST_SECONDS", 0)
    monkeypatch.setattr(live_page, "_MIN_UPDATE_SECONDS", 30)
    page = Served(run)
    page.get(f"{page.path}content")
    shutil.copy(RUNS / "digits" / "result.json", run)
    assert not wait_until(lambda: bool(page.ends), 2)
    page.stop.set()
    page.thread.join()


def test_serving_ends_when_the_launcher_is_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_STATUS_TIMEOUT_SECONDS", 1.0)
    page = Served(run)
    assert wait_until(lambda: bool(page.ends), 60)
    assert page.ends[0].startswith("The launcher has written nothing for")


def test_deleted_run_directory_does_not_stop_the_server(served: Served, run: Path) -> None:
    shutil.rmtree(run)
    code, _, text = served.get(served.path)
    assert code == 200
    assert "events.jsonl is missing" in text
