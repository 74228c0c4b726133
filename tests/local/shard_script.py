"""Take shards and log each: "seen NUMBER" before its training, "done NUMBER" after it.

Arguments: the directory of the logs, the seconds per shard, and the number of rows of this task's data. With SAVES=1
the chief saves the position after each of its shards, and when the job is asked to stop. The task named by SLOW trains
its first shard until the others have seen as many as SEEN_BY_OTHERS. With HOLD_AT=N, each process that is the first of
its task trains its Nth shard until the file "go" exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import tf4slurm

directory, seconds, rows = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
task = os.environ["TF4SLURM_TASK"].replace("/", "-")
saved, go = directory / "position.json", directory / "go"
hold_at = 0 if (directory / f"{task}.log").exists() else int(os.environ.get("HOLD_AT", "0"))
position = json.loads(saved.read_text()) if saved.exists() else None
if task == "ps-0":
    (directory / "ps-0.log").write_text(f"process {os.getpid()}\n")
    time.sleep(1000)
if task == os.environ.get("OTHER_DATA") and not (directory / f"{task}.log").exists():
    rows += 10
    while not (directory / "chief-0.log").exists() or "seen" not in (directory / "chief-0.log").read_text():
        time.sleep(0.02)
shards = tf4slurm.data_shards(rows, shard_size=10, epochs=2, position=position)
saves = task == "chief-0" and os.environ.get("SAVES")
if saves:
    tf4slurm.should_stop()  # so that a stop request does not end this process
if task == os.environ.get("FORKS"):
    os.fork()


def wait_for_others() -> None:
    others = [directory / f"{name}.log" for name in ("chief-0", "worker-0", "worker-1") if name != task]
    count = int(os.environ["SEEN_BY_OTHERS"])
    while sum(path.read_text().count("seen") for path in others if path.exists()) < count:
        time.sleep(0.02)


def save() -> None:
    draft = directory / "draft.json"
    draft.write_text(json.dumps(shards.position()))
    draft.replace(saved)


with (directory / f"{task}.log").open("a", buffering=1) as log:
    print("process", os.getpid(), rows, file=log)
    for turn, shard in enumerate(shards, 1):
        print("seen", shard.number, file=log)
        time.sleep(seconds)
        while turn == hold_at and not go.exists():
            time.sleep(0.02)
        if task == os.environ.pop("SLOW", None):
            wait_for_others()
        print("done", shard.number, file=log)
        if saves:
            shards.done()
            save()
if saves:
    save()
