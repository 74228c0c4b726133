"""Access to the control service: an interceptor that checks the token, and gRPC settings that bound other clients."""

from __future__ import annotations

import hmac
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tf4slurm.control.messages import MAX_STATUS_BYTES, TOKEN_METADATA

if TYPE_CHECKING:  # generic for type checkers only
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[bytes, bytes]

logger = logging.getLogger(__name__)

_UNAUTHENTICATED_CONNECTIONS = 4096  # in addition to two per task
_OWN_FILES = 128  # pipes and logs of this process, beside its connections and four files per task
_MAX_METADATA_BYTES = 4096
_MAX_STREAMS = 2  # per connection: a task has one
_MAX_READ_BYTES = 32_768  # per connection: with 4,096 clients that flood, memory is 0.8 GB, not 2 GB (grpcio 1.85)
_HANDSHAKE_SECONDS = 3.0
_HANDSHAKES_PER_SECOND = 500  # fewer than two cores complete, so that all tasks may connect at the same time


def handshake_seconds(num_tasks: int) -> float:
    """Return how long a new connection may take for its TLS handshake, and again until it has a call."""
    return _HANDSHAKE_SECONDS + num_tasks / _HANDSHAKES_PER_SECOND


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses each call whose metadata lacks the job's token, before a message of it is read."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_METADATA:
                token = value if isinstance(value, bytes) else value.encode()
                if hmac.compare_digest(token, self._token):
                    return await continuation(handler_call_details)
        return _REFUSE


# A handler of streams: of a unary call, gRPC would read the message first.
async def _refuse(_: AsyncIterator[bytes], context: _Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")  # and no detail: the client may be anyone


_REFUSE: _Handler = grpc.stream_stream_rpc_method_handler(_refuse)


def server_options(num_tasks: int) -> Sequence[tuple[str, int]]:
    """Return gRPC's settings: what they allow a client without the token, and what they save.

    A connection is closed when its TLS handshake takes too long, when it is idle, and when it exceeds its maximum age
    and has no open call. A task's call lasts as long as its connection, so this closes only unauthenticated ones.
    """
    patience_ms = round(1000 * handshake_seconds(num_tasks))
    pending = 1000 + 2 * num_tasks
    return (
        ("grpc.max_allowed_incoming_connections", _raise_file_limit(num_tasks)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_receive_message_length", MAX_STATUS_BYTES),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", patience_ms),
        ("grpc.max_connection_idle_ms", patience_ms),
        # Without this, a client could keep a connection open by repeating refused calls. Calls that are open at that
        # age go on: gRPC ends them only after a grace period, which is infinite by default.
        ("grpc.max_connection_age_ms", patience_ms),
        ("grpc.experimental.tcp_max_read_buffer_size", _MAX_READ_BYTES),
        # By default 1,000 calls may wait to be taken, and more are refused: all tasks may call at the same time.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", 2 * pending),
        ("grpc.so_reuseport", 1),  # beside the socket that holds the port
        ("grpc.http2.bdp_probe", 0),  # pings that measure bandwidth: half of the bytes in steady state
    )


def _raise_file_limit(num_tasks: int) -> int:
    """Return how many connections may be open at a time; raise the limit of open files if necessary.

    At the limit of open files no connection is accepted and this process can open no file. So connections are refused
    before, where the hard limit leaves room for the tasks at all.
    """
    connections, own = _UNAUTHENTICATED_CONNECTIONS + 2 * num_tasks, _OWN_FILES + 4 * num_tasks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= connections + own:
        return connections
    most = connections + own if hard == resource.RLIM_INFINITY else min(connections + own, hard)
    if most < 2 * num_tasks + own:
        logger.warning("%d open files are few for %d tasks: raise the hard limit (ulimit -Hn)", most, num_tasks)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(2 * num_tasks, most - own)
