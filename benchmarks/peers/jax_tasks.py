"""JAX's coordination service and its clients, as jax.distributed uses them.

python jax_tasks.py serve TASKS | python jax_tasks.py tasks TASKS PORT FIRST STEP
"""

from __future__ import annotations

import socket
from typing import Any

from jaxlib import _jax  # type: ignore[import-not-found]  # in the peers' environment
from stage import PATIENCE_SECONDS, address_of, begin, serve_until_told  # type: ignore[import-not-found]


class JaxTask:
    def __init__(self, num_tasks: int, port: int, rank: int) -> None:
        self.rank = rank
        self._num_tasks = num_tasks
        self._at = f"127.0.0.1:{port}"
        self._client: Any = None
        self._map: list[tuple[str, str]] = []

    def rendezvous(self) -> None:
        self._client = _jax.get_distributed_runtime_client(
            self._at, self.rank, init_timeout=PATIENCE_SECONDS, use_compression=True
        )
        self._client.connect()
        self._client.key_value_set(f"map/{self.rank}", address_of(self.rank))
        self._client.wait_at_barrier("map", PATIENCE_SECONDS * 1000)
        self._map = self._client.key_value_dir_get("map/")

    def verify(self) -> None:
        assert {key.rpartition("/")[2]: value for key, value in self._map} == {
            str(rank): address_of(rank) for rank in range(self._num_tasks)
        }

    def barrier(self) -> None:
        self._client.wait_at_barrier("barrier", PATIENCE_SECONDS * 1000)

    def leave(self) -> None:
        self._client.shutdown()


def serve(num_tasks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    service = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", num_tasks)
    serve_until_told(port)
    del service


if __name__ == "__main__":
    begin(serve, JaxTask)
