"""The liveness probe of a child whose agent did not run for a while."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from tf4slurm.agent.liveness import wait_until_unresponsive
from tf4slurm.cluster import Address


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
