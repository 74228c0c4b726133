"""The probes of a child: its liveness, its processes, and the connections to its port as counted by the kernel."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.processes import wait_until
from tf4slurm.agent import probes
from tf4slurm.agent.probes import read_traffic, wait_until_unresponsive
from tf4slurm.cluster import Address
from tf4slurm.control.messages import ObservedState, Usage, decode, encode

_SENT, _RECEIVED = 5_000, 300_000


@pytest.fixture
def connection() -> Iterator[tuple[int, socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as served:
            yield port, client, served


def exchange(client: socket.socket, served: socket.socket) -> None:
    client.sendall(bytes(_RECEIVED))
    _take(served, _RECEIVED)
    served.sendall(bytes(_SENT))
    _take(client, _SENT)


def _take(end: socket.socket, size: int) -> None:
    while size:
        size -= len(end.recv(size))


def test_both_directions_of_a_port_are_counted(connection: tuple[int, socket.socket, socket.socket]) -> None:
    port, client, served = connection
    exchange(client, served)
    assert wait_until(lambda: list(read_traffic(port).values()) == [(_SENT, _RECEIVED)], 60)


def test_usage_includes_the_processes_that_the_child_has_started(
    connection: tuple[int, socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_FIRST_USAGE_SECONDS", 0.05)
    port, client, served = connection
    exchange(client, served)
    burn = (
        "import sys; held = bytearray(80_000_000); [0 for _ in range(3_000_000)]; print('ready', flush=True); input()"
    )
    shell = ["sh", "-c", f'"{sys.executable}" -c "{burn}"; :']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            samples: list[Usage] = []

            async def watch() -> None:
                task = asyncio.create_task(probes.watch_usage(child.pid, os.getpid(), port, samples.append))
                while not samples:
                    await asyncio.sleep(0.02)
                task.cancel()

            asyncio.run(asyncio.wait_for(watch(), 60))
        finally:
            child.communicate(b"\n")
    assert samples[0].memory_bytes > 80_000_000
    assert samples[0].cpu_seconds > 0
    assert (samples[0].sent_bytes, samples[0].received_bytes) == (_SENT, _RECEIVED)


def test_usage_of_a_child_that_has_ended_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_FIRST_USAGE_SECONDS", 0.01)
    monkeypatch.setattr(probes, "usage_interval_seconds", lambda num_tasks: 0.01)
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.wait()
    samples: list[Usage] = []

    async def watch() -> None:
        task = asyncio.create_task(probes.watch_usage(child.pid, os.getpid(), None, samples.append))
        await asyncio.sleep(0.1)
        assert not task.done()
        task.cancel()

    asyncio.run(watch())
    assert samples == []


def test_usage_survives_encoding() -> None:
    status = ObservedState(state="running", usage=Usage(1, 2.5, 3, 4))
    assert decode(encode(status), ObservedState) == status


def test_time_in_which_the_agent_was_stopped_does_not_fail_the_liveness_probe() -> None:
    async def watch(address: Address) -> bool:
        probe = asyncio.create_task(wait_until_unresponsive(os.getpid(), address, 0.4))
        for _ in range(5):
            await asyncio.sleep(0.07)  # the probe sleeps for 0.05 s and waits as long for an answer
            time.sleep(0.6)  # as if this process were stopped
        await asyncio.sleep(0.2)
        return probe.done()

    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        assert not asyncio.run(watch(Address("127.0.0.1", unresponsive.getsockname()[1])))


ORPHAN = """
import os, subprocess, sys, time
from tf4slurm.system.proc import adopt_orphans, reap_orphans, walk_family
adopt_orphans()
burn = "import time\\nwhile time.process_time() < 0.3: pass\\ninput()"
shell = ["sh", "-c", '"$0" -c "$1" <&3 >/dev/null & echo $!', sys.executable, burn]
reader, writer = os.pipe()
os.dup2(reader, 3)
done = subprocess.run(shell, stdout=subprocess.PIPE, pass_fds=[3], start_new_session=True, check=False)
orphan = int(done.stdout)
assert orphan in walk_family(0, os.getpid())
os.write(writer, b"\\n")
deadline, seconds = time.monotonic() + 60, 0.0
while not seconds and time.monotonic() < deadline:
    seconds = reap_orphans(0)
    time.sleep(0.01)
print(seconds)
"""


def test_processor_time_of_an_orphan_is_known_after_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, timeout=120, check=True)
    assert float(done.stdout) >= 0.3
