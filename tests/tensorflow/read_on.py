"""A chief that reads numbers from its job's data service, and waits halfway until the test writes "go"."""

import sys
import time
from pathlib import Path

import tensorflow as tf

import tf4slurm

COUNT, MIDDLE, SECONDS = 2000, 1000, 120
go = Path(sys.argv[1])
service = tf.data.experimental.service
numbers = tf.data.Dataset.range(COUNT).apply(
    service.distribute(service.ShardingPolicy.DYNAMIC, tf4slurm.data_service(), job_name="numbers")
)
seen = []
for number in numbers:
    seen.append(int(number))
    if len(seen) in (1, MIDDLE):
        print(f"has read {len(seen)}", flush=True)
    if len(seen) == MIDDLE:
        deadline = time.monotonic() + SECONDS
        while not go.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
print(f"read {len(seen)}, {len(set(seen))} of them different", flush=True)
