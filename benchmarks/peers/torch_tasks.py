"""torch's TCPStore and its clients, used as torch's own rendezvous and barriers use it.

python torch_tasks.py serve TASKS | python torch_tasks.py tasks TASKS PORT FIRST STEP
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from stage import PATIENCE_SECONDS, address_of, begin, serve_until_told  # type: ignore[import-not-found]
from torch.distributed import TCPStore  # type: ignore[import-not-found]  # in the peers' environment

_PATIENCE = timedelta(seconds=PATIENCE_SECONDS)


class TorchTask:
    def __init__(self, num_tasks: int, port: int, rank: int) -> None:
        self.rank = rank
        self._num_tasks = num_tasks
        self._port = port
        self._store: Any = None
        self._map: list[bytes] = []

    def rendezvous(self) -> None:
        self._store = TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        self._store.set(f"map/{self.rank}", address_of(self.rank))
        self._meet("map")
        self._map = self._store.multi_get([f"map/{rank}" for rank in range(self._num_tasks)])

    def verify(self) -> None:
        assert [value.decode() for value in self._map] == [address_of(rank) for rank in range(self._num_tasks)]

    def barrier(self) -> None:
        self._meet("barrier")

    def leave(self) -> None:
        raise NotImplementedError("a TCPStore knows no leaving")

    def _meet(self, name: str) -> None:
        """Increase a counter; the last task sets a key, and all wait for it."""
        if self._store.add(f"{name}/come", 1) == self._num_tasks:
            self._store.set(f"{name}/all", "1")
        self._store.wait([f"{name}/all"])


def serve(num_tasks: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    serve_until_told(store.port)


if __name__ == "__main__":
    begin(serve, TorchTask)
