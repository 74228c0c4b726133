"""What `tf4slurm env` shows on a terminal."""

from __future__ import annotations

from tf4slurm.doctor.environment import format_environment

STEP = {
    "job_id": "4711",
    "step_id": "0",
    "rank": 2,
    "local_rank": 0,
    "num_tasks": 4,
    "node": "n2",
    "distribution": "block",
    "reserved_ports": "12000-12003",
    "gpus": ["0", "1"],
    "restart_count": None,
    "components": 1,
}
INSIDE = """\
Process
  this process       task 2 of 4 of Slurm step 4711.0

Slurm step
  job id             4711
  step id            0
  rank               2
  local rank         0
  num tasks          4
  node               n2
  distribution       block
  reserved ports     12000-12003
  gpus               0, 1
  components         1

Nodes
  n1                 ranks 0-1,3
  n2                 rank 2

Network
  address of a task  10.0.0.2
  interface eth0     10.0.0.2
  interface ib0      down, or without an address

Cluster spec
  this task          worker/0
  ps/0               10.0.0.1:40000
  worker/0           10.0.0.2:40001

Warnings
  -  Only this host can reach the address."""


def test_sections_are_aligned() -> None:
    description = {
        "where": "task 2 of 4 of Slurm step 4711.0",
        "step": STEP,
        "nodes_by_rank": ["n1", "n1", "n2", "n1"],
        "address": "10.0.0.2",
        "interfaces": {"eth0": ["10.0.0.2"], "ib0": []},
        "tf_config": {
            "cluster": {"ps": ["10.0.0.1:40000"], "worker": ["10.0.0.2:40001"]},
            "task": {"type": "worker", "index": 0},
        },
        "warnings": ["Only this host can reach the address."],
    }
    assert format_environment(description) == INSIDE


def test_large_job_is_cut() -> None:
    description = {
        "where": "here",
        "step": None,
        "nodes_by_rank": [f"n{rank}" for rank in range(1000)],
        "address": None,
        "interfaces": {},
        "tf_config": {"cluster": {"worker": [f"n{rank}:1" for rank in range(1000)]}},
        "warnings": [],
    }
    text = format_environment(description)
    assert "984 more nodes: --json shows all" in text
    assert "984 more: --json shows all" in text
    assert len(text.splitlines()) < 50
