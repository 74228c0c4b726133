"""The live page of a job: the report of the moment, on this host's loopback, for whoever knows its address.

The address holds a token of 256 bits, made for this page. Any other address, and any other host name in the request
(a page of the web that was pointed here by its name server), is answered with 403.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.status import is_lost
from tf4slurm.reports.drawing import escape
from tf4slurm.reports.job_summary import read_story
from tf4slurm.reports.quantities import format_seconds
from tf4slurm.reports.report import make_body, make_page, read_part, title_of

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?", re.IGNORECASE)  # any port: it may come by a tunnel
_SHORTEST_SECONDS = 2.0
_LONGEST_SECONDS = 30.0
_SHARE = 0.1  # of a processor, that making the page may take
_LAST_LOOK_SECONDS = 10.0  # for a browser to fetch the end, once it is its turn
_SILENCE_SECONDS = 60.0
_REQUEST_SECONDS = 10.0  # for a whole request, and again for its answer
_MOST_UNAUTHENTICATED = 64


def serve_page(
    run: RunDirectory,
    on_ready: Callable[[str], None],
    *,
    port: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Serve the live page until the job has ended and its end was seen, nothing is written any more, or Ctrl-C.

    Args:
        on_ready: Is told the address, once it is served.
        port: Which one, of 127.0.0.1; 0 for any that is free.
        should_stop: Is asked twice a second.

    Returns:
        Why it ended, in a sentence.

    Raises:
        OSError: The port cannot be taken.
    """
    page = _Page(run)
    with _Server((_LOOPBACK, port), page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        try:
            on_ready(f"http://{_LOOPBACK}:{server.server_port}/{page.token}/")
            return _wait_for_end(page, should_stop)
        except KeyboardInterrupt:
            return "The page is no longer served. The job goes on."
        finally:
            server.shutdown()
            thread.join()


def _wait_for_end(page: _Page, should_stop: Callable[[], bool]) -> str:
    ended_at: float | None = None
    while not should_stop():
        time.sleep(0.5)
        now = time.monotonic()
        if page.was_end_seen:
            return "The job has ended."
        if ended_at is None and page.look_for_end():
            ended_at = now
        if ended_at is not None and now - ended_at > page.pause_seconds + _LAST_LOOK_SECONDS:
            return "The job has ended."
        if page.silent_seconds > _SILENCE_SECONDS:
            return f"Nothing was written of the job for {format_seconds(page.silent_seconds)}: its launcher is gone."
    return "The page is no longer served."


class _Page:
    """What is served: made at most as often as it costs little, however many ask."""

    def __init__(self, run: RunDirectory) -> None:
        self.token = secrets.token_urlsafe(32)
        self.was_end_seen = False
        self._run = run
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {}
        self._fresh_until = 0.0
        self._written: object = None
        self._written_at = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """For how long status.json is the same; by this host's clock, whatever that of the job's host says."""
        status = (self._run.read_status() or {}).get("time")
        if status != self._written:
            self._written, self._written_at = status, time.monotonic()
        return time.monotonic() - self._written_at

    @property
    def pause_seconds(self) -> float:
        """How long a browser waits until it asks again; 0 if none has asked."""
        return float(self._content.get("pause", 0.0))

    def look_for_end(self) -> bool:
        return self._run.read_result() is not None or is_lost(self._run)

    def content(self) -> dict[str, Any]:
        """Return what the page's script asks for."""
        with self._lock:
            now = time.monotonic()
            if now >= self._fresh_until and not self._content.get("ended"):
                story = read_story(self._run)
                pause = min(max(_SHORTEST_SECONDS, (time.monotonic() - now) / _SHARE), _LONGEST_SECONDS)
                note = (
                    "The job has ended: this page stays as it is."
                    if story.has_ended
                    else (f"Live: looked at {time.strftime('%H:%M:%S')}, every {format_seconds(pause)}.")
                )
                self._content = {
                    "title": title_of(story),
                    "body": make_body(story),
                    "note": note,
                    "ended": story.has_ended,
                    "pause": pause,
                }
                self._fresh_until = time.monotonic() + pause / 2
            return self._content

    def html(self) -> str:
        content = self.content()
        body = f'<p class="live-note">{escape(content["note"])}</p><div id="body">{content["body"]}</div>'
        return make_page(content["title"], body, read_part("page.js") + read_part("live.js"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False
    request_queue_size = 128  # a burst of others' connections must not make the user's wait for a retry

    def __init__(self, address: tuple[str, int], page: _Page) -> None:
        self.page = page
        self._unauthenticated: dict[socket.socket, float] = {}  # since when, the oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve each in a thread. Of many without a token so far, close the oldest: a browser sends it at once."""
        with self._lock:
            if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                self._close(next(iter(self._unauthenticated)))
            self._unauthenticated[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.authenticated(request)

    def authenticated(self, request: socket.socket) -> None:
        """Close this connection neither for others nor for the time it has taken so far."""
        with self._lock:
            self._unauthenticated.pop(request, None)

    def service_actions(self) -> None:
        """Close the connections that have taken too long for their request; the server's loop calls this."""
        with self._lock:
            latest = time.monotonic() - _REQUEST_SECONDS
            for request in [each for each, since in self._unauthenticated.items() if since < latest]:
                self._close(request)

    def _close(self, request: socket.socket) -> None:
        """End the reading of a request; its thread does the rest."""
        del self._unauthenticated[request]
        with contextlib.suppress(OSError):  # it has just ended
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request to the live page failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        _, token, place = (*self.path.split("/", 2), "", "")[:3]
        is_ours = hmac.compare_digest(token.encode(errors="replace"), self.server.page.token.encode())
        hosts = self.headers.get_all("Host") or []
        if not is_ours or len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            self._answer(403, "text/plain", "This page is not for you: its whole address is needed.\n")
            return
        self.server.authenticated(self.connection)
        if place == "":
            self._answer(200, "text/html", self.server.page.html())
        elif place == "content":
            content = self.server.page.content()
            self._answer(200, "application/json", json.dumps(content))
            self.server.page.was_end_seen = bool(content["ended"])
        else:
            self._answer(404, "text/plain", "There is nothing here.\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        data = text.encode(errors="replace")
        self.send_response(code)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(data))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def version_string(self) -> str:
        return "tf4slurm"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s", format % args)
