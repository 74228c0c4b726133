"""Serve the live page of a job on the loopback address: the job's report, updated while the job runs.

The URL contains a random token of 256 bits. Requests without the token, or with another host name than one of the
loopback address (DNS rebinding), get status 403.
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

from tf4slurm.jobs.formatting import format_seconds
from tf4slurm.jobs.job_files import JobFiles
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.reports.report import make_body, make_page, make_title, read_template
from tf4slurm.reports.summary import JobSummary

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?", re.IGNORECASE)  # any port, for SSH tunnels
_MIN_UPDATE_SECONDS = 2.0
_MAX_UPDATE_SECONDS = 30.0
_PROCESSOR_SHARE = 0.1  # maximum share of a core for making the page
_LAST_REQUEST_SECONDS = 10.0  # time for a browser to fetch the final page
_STATUS_TIMEOUT_SECONDS = 60.0
_REQUEST_SECONDS = 10.0  # timeout for a request, and for its answer
_MAX_UNAUTHENTICATED = 64


def serve_page(
    run: RunDirectory, on_ready: Callable[[str], None], should_stop: Callable[[], bool] = lambda: False
) -> str:
    """Serve the live page of a job, and return when the page is not needed any more.

    This is when one of these happens:

    * A browser has fetched the final page of the ended job.
    * The job has ended, and 10 s and the time of one update have passed.
    * The launcher has written nothing for 60 s.
    * The user presses Ctrl-C.
    * `should_stop` returns True.

    Args:
        run: Run directory of the job.
        on_ready: Called once with the URL.
        should_stop: Called twice a second.

    Returns:
        A sentence that says why the page is no longer served.
    """
    page = _Page(run)
    with _Server(page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        try:
            on_ready(f"http://{_LOOPBACK}:{server.server_port}/{page.token}/")
            return _wait_for_end(page, should_stop)
        except KeyboardInterrupt:
            return "The page is no longer served. The job continues."
        finally:
            server.shutdown()
            thread.join()


def _wait_for_end(page: _Page, should_stop: Callable[[], bool]) -> str:
    ended_at: float | None = None
    status_time: float | None = None
    status_changed_at = time.monotonic()  # by this host's clock, not the job's
    while not should_stop():
        time.sleep(0.5)
        files = JobFiles(page.run)
        now = time.monotonic()
        if ended_at is None and files.has_ended:
            ended_at = now
        if files.status.time != status_time:
            status_time, status_changed_at = files.status.time, now
        is_late = ended_at is not None and now - ended_at > page.update_seconds + _LAST_REQUEST_SECONDS
        if page.was_end_fetched or is_late:
            return "The job has ended."
        if now - status_changed_at > _STATUS_TIMEOUT_SECONDS:
            age = format_seconds(now - status_changed_at)
            return f"The launcher has written nothing for {age}: it is stopped, or its host has failed."
    return "The page is no longer served."


class _Page:
    """The content of the live page. A request renews it if it is older than half of `update_seconds`.

    Attributes:
        update_seconds: The time after which a browser requests the content again: 10 times the time that it took to
            make it, but at least 2 s and at most 30 s.
        was_end_fetched: Whether a browser has fetched the content of the ended job.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.token = secrets.token_urlsafe(32)
        self.was_end_fetched = False
        self.update_seconds = 0.0
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {}
        self._expires_at = 0.0

    def content(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() >= self._expires_at and not self._content.get("ended"):
                self._content = self._make_content()
                self._expires_at = time.monotonic() + self.update_seconds / 2
            return self._content

    def _make_content(self) -> dict[str, Any]:
        started = time.monotonic()
        summary = JobSummary(self.run)
        title, body = make_title(summary), make_body(summary)
        cost = time.monotonic() - started
        self.update_seconds = min(max(_MIN_UPDATE_SECONDS, cost / _PROCESSOR_SHARE), _MAX_UPDATE_SECONDS)
        note = f"Live: updated at {time.strftime('%H:%M:%S')}, every {format_seconds(self.update_seconds)}."
        if summary.has_ended:
            note = "The job has ended. This page is final."
        return {
            "title": title,
            "body": body,
            "note": note,
            "ended": summary.has_ended,
            "update_seconds": self.update_seconds,
        }

    def html(self) -> str:
        content = self.content()
        script = read_template("page.js") + read_template("live.js")
        return make_page(content["title"], content["body"], script, content["note"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False
    request_queue_size = 128  # a burst of other connections must not delay the user's browser

    def __init__(self, page: _Page) -> None:
        self.page = page
        self._unauthenticated: dict[socket.socket, float] = {}  # time of each connection, oldest first
        self._lock = threading.Lock()
        super().__init__((_LOOPBACK, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a new connection.

        If 64 connections are unauthenticated already, close the oldest of them first.
        """
        with self._lock:
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                self._close(next(iter(self._unauthenticated)))
            self._unauthenticated[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.mark_authenticated(request)

    def mark_authenticated(self, request: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(request, None)

    def service_actions(self) -> None:
        """Close connections that sent no valid request within 10 s. The server's loop calls this every 0.2 s."""
        with self._lock:
            latest = time.monotonic() - _REQUEST_SECONDS
            for request in [each for each, since in self._unauthenticated.items() if since < latest]:
                self._close(request)

    def _close(self, request: socket.socket) -> None:
        """Shut down the connection `request`, so that its thread ends and closes it."""
        del self._unauthenticated[request]
        with contextlib.suppress(OSError):  # the client has just closed it
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request to the live page failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        _, token, path = (*self.path.split("/", 2), "", "")[:3]
        has_token = hmac.compare_digest(token.encode(errors="replace"), self.server.page.token.encode())
        hosts = self.headers.get_all("Host") or []
        if not has_token or len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            self._answer(403, "text/plain", "Forbidden: use the whole URL that tf4slurm printed.\n")
            return
        self.server.mark_authenticated(self.connection)
        if path == "":
            self._answer(200, "text/html", self.server.page.html())
        elif path == "content":
            content = self.server.page.content()
            self._answer(200, "application/json", json.dumps(content))
            self.server.page.was_end_fetched = bool(content["ended"])
        else:
            self._answer(404, "text/plain", "Not found.\n")

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
