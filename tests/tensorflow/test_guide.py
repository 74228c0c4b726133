"""The code of TensorFlow's guide to parameter servers: each failure with Keras 3 is explained, and its cure works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.troubleshooting.page import Entry
from tests.unit.test_child_log import kept
from tf4slurm.jobs.boilerplate import BoilerplateFilter
from tf4slurm.jobs.known_errors import explain

pytest.importorskip("tensorflow", reason="pip install tensorflow-cpu, or tf4slurm[cpu]")

pytestmark = pytest.mark.keras

GUIDE = Path(__file__).with_name("guide.py")
FIT = "Use tf4slurm.tensorflow.fit"
PARTITIONER = "Leave out the argument variable_partitioner of the strategy"
SCOPE = "Create all of them in `with strategy.scope():`"
WORDS = {
    "in_process_cluster": "tf4slurm has formed one",
    "dataset_creator": f"whose fit takes a DatasetCreator, and this is Keras 3. {FIT}",
    "imported_dataset_creator": f"whose fit takes a DatasetCreator, and this is Keras 3. {FIT}",
    "fit_of_a_function": f"neither a function nor a distributed dataset. {FIT}",
    "fit_of_a_dataset": f"Keras 3's fit does not work under ParameterServerStrategy. {FIT}",
    "fit_of_a_coordinators_dataset": f"neither a function nor a distributed dataset. {FIT}",
    "fit_of_a_distributed_dataset": f"neither a function nor a distributed dataset. {FIT}",
    "evaluation": "evaluate and predict likewise",
    "checkpoint_path": "NAME.keras",
    "old_layers": "most names have lost the word experimental",
    "model_of_a_row": "Call .batch() on the dataset before .map()",
    "keys_of_a_dictionary": "Use one name for the key and its Input",
    "function_of_a_symbolic_tensor": "keras.ops.mean for tf.reduce_mean",
    "reduction": "sum_over_batch_size",
    "reset_of_a_metric": "use reset_state()",
    "old_optimizer": "experimental or legacy",
    "partitioner": PARTITIONER,
    "partitioner_and_checkpoint": PARTITIONER,
    "partitioner_and_save": PARTITIONER,
    "partitioner_and_weights": PARTITIONER,
    "device_of_a_weight": "weight.value.device",
    "optimizer_outside_of_the_scope": SCOPE,
    "model_outside_of_the_scope": SCOPE,
    "sidecar_evaluator": "tf.train.checkpoints_iterator",
    "dataset_that_ends": ".repeat()",
    "dataset_function_with_context": "dataset_fn(tf.distribute.InputContext())",
    "labels_without_columns": "labels[:, None]",
    "dataset_of_the_chief": "make the whole dataset",
}
"""By part of the guide, words of the one explanation of its failure."""


@pytest.fixture(scope="module")
def outputs() -> Mapping[str, str]:
    """What each part printed, as in the guide and cured, in one process with Keras as it is installed."""
    environ = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    done = subprocess.run(
        [sys.executable, str(GUIDE)],
        env=environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    parts = re.split(r"^=== (\w+(?: cured)?)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def last_lines(output: str) -> list[str]:
    """The lines that an agent keeps of this output."""
    boilerplate = BoilerplateFilter()
    return kept("\n".join(line for line in output.splitlines() if not boilerplate.is_boilerplate(line)))


def test_each_part_has_words(outputs: Mapping[str, str]) -> None:
    assert list(outputs) == [*WORDS, *(f"{name} cured" for name in WORDS)]


@pytest.mark.parametrize("name", WORDS)
def test_failure_of_the_guides_code_has_one_explanation(name: str, outputs: Mapping[str, str]) -> None:
    assert "Traceback (most recent call last):" in outputs[name]
    lines = last_lines(outputs[name])
    (explanation,) = explain(lines) or ["nothing explains\n" + "\n".join(lines)]
    assert WORDS[name] in explanation


@pytest.mark.parametrize("name", WORDS)
def test_cure_of_the_guides_code_works(name: str, outputs: Mapping[str, str]) -> None:
    assert "Traceback (most recent call last):" not in outputs[f"{name} cured"]


def test_each_message_of_the_page_is_printed(outputs: Mapping[str, str]) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/keras.md").read_text(encoding="utf-8")
    table = page.partition("## The code of TensorFlow's guide")[2].partition("\n## ")[0]
    messages = [text for line in table.splitlines() for text in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    printed = "".join(outputs[name] for name in WORDS).replace("`", "")
    assert len(messages) >= 17
    assert [message for message in messages if not Entry(message, "").is_in(printed)] == []


@pytest.mark.long
@pytest.mark.timeout(400)  # two jobs
@pytest.mark.parametrize("name", WORDS)
def test_job_of_the_guides_code_is_explained_and_cured(name: str, tmp_path: Path) -> None:
    for is_cured in (False, True):
        directory = tmp_path / ("cured" if is_cured else "guide")
        directory.mkdir()
        with Job(directory) as job:
            words = ["cured"] * is_cured
            job.start("--ps", "2", "--workers", "2", command=(sys.executable, str(GUIDE), name, *words))
            exit_code = job.wait(170)
            if is_cured:
                assert exit_code == 0, job.stderr
                assert "chief/0 | done" in job.stdout
            else:
                assert exit_code == 1, job.stderr
                (meaning,) = job.result["meaning"]
                assert WORDS[name] in meaning
