"""Which ps holds which variable, in real jobs, and what status and report show of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TF4SLURM, Job

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

BEGIN = """
import json, os, sys, time
from tf4slurm.scripts.channel import find_script_channel
from tf4slurm.tensorflow import ShardedEmbedding, parameter_server_strategy

strategy, coordinator = parameter_server_strategy(**json.loads(sys.argv[1]))
import tensorflow as tf

def ps(variables):
    return [tf.DeviceSpec.from_string(each.device).task for each in variables]

def end(**found):
    held = strategy.extended._create_var_creator.__self__._bytes
    while find_script_channel().state.ps_bytes != tuple(held):
        time.sleep(0.05)
    print("found", json.dumps({**found, "held": held}), flush=True)
"""
DENSE = """
import keras

with strategy.scope():
    layers = [keras.layers.Dense(512) for _ in range(4)]
    model = keras.Sequential([keras.layers.Input((512,)), *layers])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    before = [each.numpy() for each in model.trainable_variables]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.save(os.environ["TF4SLURM_RUN_DIRECTORY"] + "/saved") if len(sys.argv) == 2 else sys.argv[2]
    for variable in model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    checkpoint.restore(path).assert_existing_objects_matched()
    if len(sys.argv) == 2:
        assert all((one == other.numpy()).all() for one, other in zip(before, model.trainable_variables))
kernels = [each.value for each in model.trainable_variables[::2]]
slots = [each.value for each in optimizer._momentums[::2]]
end(path=path, kernels=ps(kernels), slots=ps(slots), sum=float(sum(tf.reduce_sum(tf.abs(each)) for each in kernels)))
"""
SPLIT = """
import gc

def beside(scalar, size):
    with strategy.extended.colocate_vars_with(scalar):  # such a variable is not split
        return tf.Variable(tf.zeros(size))

with strategy.scope():
    first = tf.Variable(0.0)
    large = beside(first, 100_000)
    table = tf.Variable(tf.zeros((700, 2)))
    embedding = ShardedEmbedding(10, 4)
    embedding.build()
    second = tf.Variable(0.0)
    temporary = beside(second, 200_000)
    del temporary
    gc.collect()
    third = tf.Variable(0.0)
end(scalars=ps([first, second, third]), large=ps([large]), table=ps(table.variables),
    embedding=ps(part.value for part in embedding.variables))
"""


def find(job: Job, script: str, options: dict[str, Any], *arguments: str) -> dict[str, Any]:
    """Return what the chief's script found."""
    command = [sys.executable, "-c", BEGIN + script, json.dumps(options), *arguments]
    job.start("--ps", "2", "--workers", "1", command=command)
    assert job.wait(120) == 0, job.stdout + job.stderr
    (line,) = (line for line in job.stdout.splitlines() if "found {" in line)
    found: dict[str, Any] = json.loads(line.partition("found ")[2])
    assert [task["variable_bytes"] for task in job.result["tasks"]] == [None, *found["held"], None]
    return found


def show(job: Job, verb: str) -> str:
    command = [TF4SLURM, verb, str(job.run_directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=job.directory).stdout


@pytest.mark.keras
def test_variables_are_placed_by_bytes_and_slots_beside_their_variables(job: Job) -> None:
    found = find(job, DENSE, {})
    assert sorted(found["kernels"]) == [0, 0, 1, 1]
    assert found["slots"] == found["kernels"]
    assert sum(found["held"]) > 12 * 512 * 512 * 4
    assert max(found["held"]) < 1.1 * min(found["held"])
    assert re.search(r"^Variables: ps/\d 6.3 MB, ps/\d 6.3 MB\.$", show(job, "status"), re.MULTILINE)


@pytest.mark.long
@pytest.mark.keras
def test_checkpoint_of_round_robin_is_restored_with_another_placement(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for options in ({"placement": "round-robin"}, {}):
        directory = tmp_path / str(len(found))
        directory.mkdir()
        with Job(directory) as job:
            found.append(find(job, DENSE, options, *(each["path"] for each in found)))
            shown = show(job, "status"), Path(show(job, "report").strip()).read_text()
        if options:
            assert "Variables: ps/0 12.6 MB, ps/1 24.6 kB." in shown[0]
            assert "ps/0 12.6 MB, ps/1 24.6 kB" in shown[1]
            assert "ps/0 holds 12.6 MB of the variables, the other ps 24.6 kB on average." in shown[1]
    first, second = found
    assert first["kernels"] == [0, 0, 0, 0]
    assert sorted(second["kernels"]) == [0, 0, 1, 1]
    assert first["sum"] == second["sum"] > 0


@pytest.mark.keras
def test_parts_are_on_different_ps_and_deleted_variables_do_not_count(job: Job) -> None:
    found = find(job, SPLIT, {"sharding": "min-size", "min_shard_bytes": 1000})
    assert sorted(found["table"]) == sorted(found["embedding"]) == [0, 1]
    assert found["large"] == [0]
    assert found["scalars"] == [0, 1, 1]


def test_unknown_placement_is_refused() -> None:
    from tf4slurm.tensorflow import parameter_server_strategy

    with pytest.raises(ValueError, match="Unknown placement 'size': expected one of 'bytes', 'round-robin'"):
        parameter_server_strategy(placement="size")
