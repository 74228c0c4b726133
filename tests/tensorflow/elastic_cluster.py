"""A cluster whose workers join, leave, fail and move: real TensorFlow servers, and a fake script channel."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Collection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["TF_GRPC_REUSE_PORT"] = "true"  # TensorFlow's server shares the held port

import tensorflow as tf

from tests.processes import wait_until
from tf4slurm.control.messages import DesiredState
from tf4slurm.network.ports import HeldPort, hold_port
from tf4slurm.tensorflow.elastic import let_workers_change
from tf4slurm.tensorflow.servers import connect_parameter_server_strategy


class FakeChannel:
    """A script channel without an agent: a test sets `desired` and reads `sent`."""

    def __init__(self) -> None:
        self.desired = DesiredState()
        self.sent: dict[str, Any] = {}

    def send(self, **changes: object) -> None:
        self.sent |= changes


class ServerStarter:
    """A process that forks TensorFlow servers: a fork takes milliseconds, the import of TensorFlow 4 s."""

    def __init__(self) -> None:
        """Fork this process, before TensorFlow has started threads."""
        self._socket, theirs = socket.socketpair()
        self._process_id = os.fork()
        if not self._process_id:
            self._socket.close()
            os._exit(self._serve(theirs))
        theirs.close()
        self._lines = self._socket.makefile("r")

    def start(self, cluster: dict[str, list[str]], role: str, index: int) -> int:
        """Start a server; return its process id."""
        self._socket.sendall(json.dumps([cluster, role, index]).encode() + b"\n")
        return int(self._lines.readline())

    def end(self) -> None:
        self._lines.close()
        self._socket.close()
        os.waitpid(self._process_id, 0)

    def _serve(self, connection: socket.socket) -> int:
        started = []  # ended servers stay zombies until the end, so that no other process gets their ids
        for line in connection.makefile("r"):
            cluster, role, index = json.loads(line)
            process_id = os.fork()
            if not process_id:
                connection.close()
                tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc").join()
            started.append(process_id)
            connection.sendall(b"%d\n" % process_id)
        for process_id in started:
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)
        return 0


class ElasticCluster:
    """A chief, in this process, with ps and workers; in `wanted` are the addresses of the workers by index."""

    def __init__(self, workers: int, ps: int = 1, *, is_elastic: bool = True) -> None:
        self.starter = ServerStarter()
        self.channel = FakeChannel()
        self.wanted: dict[int, str] = {}
        self._addresses: list[str] = []  # the last address of each index
        self._held: list[HeldPort] = []
        self._ids: dict[str, int] = {}  # by address
        self._chief, self._ps = self._address(), [self._address() for _ in range(ps)]
        for index in range(workers):
            self.place(index)
        for role, addresses in (("ps", self._ps), ("worker", self._addresses)):
            for index, address in enumerate(addresses):
                self._ids[address] = self.starter.start(self.spec, role, index)
        cluster = self.spec
        self.strategy = connect_parameter_server_strategy(cluster, None, 60)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        if is_elastic:
            self.let_workers_change()

    def let_workers_change(self) -> None:
        let_workers_change(self.coordinator, self.spec, self.channel)  # type: ignore[arg-type]

    @property
    def spec(self) -> dict[str, list[str]]:
        return {"chief": [self._chief], "ps": self._ps, "worker": list(self._addresses)}

    def place(self, index: int) -> None:
        """Give a worker a new address; no server is there yet."""
        address = self._address()
        self._addresses += ["127.0.0.1:1"] * (index + 1 - len(self._addresses))  # those between have left
        self._addresses[index] = self.wanted[index] = address

    def start(self, index: int) -> None:
        address = self.wanted[index]
        self._ids[address] = self.starter.start(self.spec, "worker", index)

    def kill(self, index: int) -> None:
        self.signal(self.wanted[index], signal.SIGKILL)

    def kill_at(self, address: str) -> None:
        self.signal(address, signal.SIGKILL)

    def signal(self, address: str, number: int) -> None:
        os.kill(self._ids[address], number)

    def kill_ps(self) -> None:
        self.signal(self._ps[0], signal.SIGKILL)

    def publish(self) -> None:
        """Send the wanted workers to the chief."""
        self.channel.desired = DesiredState(workers=tuple(self.wanted.items()))

    def wait_for(self, used: Collection[int], timeout_seconds: float = 60.0) -> float:
        """Wait until the chief uses exactly these workers; return the seconds."""
        started = time.monotonic()
        expected = tuple(sorted(used))
        assert wait_until(lambda: self.channel.sent.get("workers") == expected, timeout_seconds, 0.005), (
            expected,
            self.channel.sent,
        )
        return time.monotonic() - started

    def end(self) -> None:
        """Kill all servers."""
        self.starter.end()
        for held in self._held:
            held.close()

    def _address(self) -> str:
        self._held.append(hold_port())
        return f"127.0.0.1:{self._held[-1].port}"
