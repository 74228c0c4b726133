"""Explanations of real error messages of TensorFlow and Keras."""

from __future__ import annotations

import errno
import importlib
import os
import re
import socket

import pytest

from tests.unit.test_child_log import KERAS, PER_REPLICA, kept
from tf4slurm.jobs.known_errors import _KNOWN, explain


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            f"{KERAS}\nValueError: To use this dataset, you need to pass this dataset to "
            "ClusterCoordinator.create_per_worker_dataset.",
            "Keras 3's fit does not work under ParameterServerStrategy",
        ),
        (PER_REPLICA, "Keras 3's fit does not work under MultiWorkerMirroredStrategy"),
        ("AttributeError: module 'keras.utils' has no attribute 'experimental'", "written for Keras 2"),
        ("ValueError: Argument(s) not recognized: {'lr': 1}", "written for Keras 2"),
        (
            "ValueError: The filename must end in `.weights.h5`. Received: filepath=x",
            "written for Keras 2",
        ),
        # TensorFlow's guide "Parameter server training"; tests/tensorflow/test_guide.py produces the others
        (
            # Keras 3.3 on TensorFlow 2.16
            '  File "/v/keras/src/trainers/data_adapters/__init__.py", line 172, in get_data_adapter\n'
            "ValueError: Unrecognized data type: "
            "x=<tensorflow.python.distribute.input_lib.DistributedDatasetsFromFunction object at 0x7f>",
            "neither a function nor a distributed dataset",
        ),
        ("AttributeError: module 'keras.api.utils' has no attribute 'experimental'", "takes a DatasetCreator"),
        ("AttributeError: module 'keras._tf_keras.keras.layers' has no attribute 'experimental'", "for Keras 2"),
        ("AttributeError: module 'keras.api.utils' has no attribute 'SidecarEvaluator'", "has no SidecarEvaluator"),
        (
            "[1mInvalid input shape for input [b'red' b'green' b'blue']. Expected shape (None, 3), but input has "
            "incompatible shape (3,)[0m",  # Keras 3.3
            "gets one row here",
        ),
        (
            '  File "/v/tensorflow/python/distribute/distribute_utils.py", line 263, in _validate_colocate_extended\n'
            "AttributeError: 'NoneType' object has no attribute 'extended'",  # TensorFlow 2.16
            "outside of the strategy's scope",
        ),
        (
            "ValueError: `colocate_vars_with` must only be passed a variable created in this "
            "tf.distribute.Strategy.scope(), not <tf.Variable 'embedding/embeddings:0'>",  # 2.18 and 2.21
            "outside of the strategy's scope",
        ),
        (
            "  (0) INVALID_ARGUMENT:   Incompatible shapes: [4] vs. [4,10]\n"
            "\t [[{{node gradient_tape/compile_loss/mse/sub/BroadcastGradientArgs}}]]",
            "fewer axes",
        ),
        (
            "  (0) OUT_OF_RANGE:  End of sequence\n\t [[{{node IteratorGetNext}}]]\nAdditional GRPC error information",
            "The dataset of a worker has ended",
        ),
        ("Incompatible shapes: [4,10] vs. [4]\n\t [[{{node compile_loss/mse/sub}}]]", "fewer axes"),
        (
            "Input has an error, the original exception is InvalidArgumentError(), error message is Failed copying "
            "input tensor from /job:chief/replica:0/task:0/device:CPU:0 to "
            "/job:worker/replica:0/task:1/device:CPU:0 in order to run __inference_fn_22: Unable to parse tensor proto",
            "make the whole dataset",
        ),
        ("ImportError: Keras cannot be imported. Check that it is installed.", "needs the package tf-keras"),
        (
            '  File "/v/tensorflow/python/util/lazy_loader.py", line 143, in __getattr__\n'
            "RecursionError: maximum recursion depth exceeded in comparison",
            "needs the package tf-keras",
        ),
        ("AttributeError: module 'tensorflow' has no attribute 'placeholder'", "written for TensorFlow 1"),
        ("AttributeError: module 'tensorflow._api.v2.train' has no attribute 'AdamOptimizer'", "for TensorFlow 1"),
        ("AttributeError: module 'tensorflow' has no attribute 'contrib'", "does not have any more"),
        (
            "AttributeError: module 'tensorflow._api.v1.distribute.experimental' has no attribute 'coordinator'",
            "This TensorFlow is too old for that name",
        ),
        ("tensorflow.python.framework.errors_impl.UnknownError: Could not start gRPC server", "could not listen"),
        ("ModuleNotFoundError: No module named 'sklearn'", "check the spelling of the import, or start the job from"),
        ("/usr/bin/env: ‘python3\\r’: No such file or directory", "line endings of Windows"),
        ("run.sh: line 1: $'set\\r': command not found", "line endings of Windows"),
        ("run.sh: line 3: syntax error near unexpected token `$'do\\r''", "line endings of Windows"),
        ("/bin/bash^M: bad interpreter: No such file or directory", "line endings of Windows"),
        ("ls: cannot access 'data'$'\\r': No such file or directory", "line endings of Windows"),
        (
            "ValueError: Cannot create a tensor proto whose content is larger than 2GB.",
            "its arrays exceed TensorFlow's",
        ),
        (
            "ERROR:tensorflow:Worker /job:worker/replica:0/task:0 failed with NotFoundError():'__inference_fn_14' is "
            "neither a type of a primitive operation nor a name of a function registered in binary running on vm.",
            "its arrays exceed TensorFlow's limit",
        ),
        ("ModuleNotFoundError: No module named 'tensorflow'", "has no TensorFlow"),
        ("ModuleNotFoundError: No module named 'tf4slurm'", "import tf4slurm_client, which the job brings along"),
        (
            "E0000 00:00:1738697930.202924    7665 cuda_dnn.cc:522] Loaded runtime CuDNN library: 9.1.0 but source was "
            "compiled with: 9.3.0.  CuDNN library needs to have matching major version and equal or higher minor "
            "version.",
            "cuDNN library is older",
        ),
        (
            "InternalError: cudaGetDevice() failed. Status: CUDA driver version is insufficient for CUDA runtime "
            "version",
            "driver is too old",
        ),
        ("TypeError: Descriptors cannot not be created directly.", "protobuf does not fit"),
        (
            "google.protobuf.runtime_version.VersionError: Detected incompatible Protobuf Gencode/Runtime versions "
            "when "
            "loading basic_report.proto: gencode 5.29.5 runtime 5.27.2.",
            "protobuf does not fit",
        ),
        (
            "ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by "
            "/venv/lib/python3.8/site-packages/tensorflow/python/_pywrap_tensorflow_internal.so)",
            "system library on that host is older",
        ),
        (
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility.",
            "another major version of NumPy",
        ),
        ("OSError: [Errno 98] Address already in use", "has the port"),
        ("socket.gaierror: [Errno -2] Name or service not known", "cannot be resolved"),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "cannot be resolved"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have", "with --mem"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 3495064.0 cgroup.", "with --mem"),
        (
            "slurmstepd: error: *** STEP 494583.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***",
            "at its time limit",
        ),
        (
            "ResourceExhaustedError: OOM when allocating tensor with shape[32,64] and type float on "
            "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
            "GPU's memory ran out",
        ),
        ("failed to allocate 2.20G from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "GPU's memory ran out"),
        (
            "ResourceExhaustedError: OOM when allocating tensor with shape[9] on "
            "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
            "Memory ran out",
        ),
        ("OSError: [Errno 28] No space left on device: 'x'", "quota is full"),
        ("OSError: [Errno 122] Disk quota exceeded", "quota is full"),
        ("OSError: [Errno 116] Stale file handle", "replaced or deleted"),
        (
            '  File "/v/tensorflow/python/distribute/cluster_resolver/slurm_cluster_resolver.py", line 97, in get\n'
            "    gpus = subprocess.check_output(['nvidia-smi', '--list-gpus'])\n"
            "FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'",
            "TensorFlow's own SlurmClusterResolver",
        ),
        (
            # TensorFlow 2.21
            "TypeError: in user code:\n\n"
            '    File "/v/tf4slurm/tensorflow/step_closure.py", line 122, in __call__  *\n'
            "        result = self._step_fn(*batch)\n"
            '    File "/home/ana/train.py", line 11, in step  *\n'
            "        x = next(batch)\n\n"
            "    TypeError: 'tuple' object is not an iterator",
            "a batch, not an iterator",
        ),
        (
            "AttributeError: 'ShardedVariable' object has no attribute 'handle'",
            "Leave out the argument variable_partitioner",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'", "host without NVIDIA's driver"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data'", "check its path"),
        ("OSError: [Errno 7] Argument list too long: 'python'", "128 KB for each argument"),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "may not be read"),
    ],
)
def test_known_failure_has_one_line_with_cause_and_advice(text: str, meaning: str) -> None:
    (explanation,) = explain(kept(text))
    assert meaning in explanation
    assert "\n" not in explanation
    action = (
        r"\b(take|pip install|import|start|run|use|load|install|ask|make room|let|look|shorten|check|create|call)\b"
    )
    assert re.search(action, explanation, re.IGNORECASE)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tensorfow", " Did you mean 'tensorflow'?"),
        ("jsn", " Did you mean 'json'?"),
        *dict.fromkeys(("tensorflow_hub", "numpyro", "x", "numpy.nothing", "json"), "").items(),
    ],
)
def test_misspelled_module_has_a_suggestion(name: str, hint: str) -> None:
    (explanation,) = explain([f"ModuleNotFoundError: No module named '{name}'"])
    assert explanation.partition("has the package.")[2] == hint


def test_explanations_are_sentences_with_full_stops() -> None:
    """Two joined sentences without a full stop show as a capital letter after a word that is no name."""
    names = "TensorFlow|Keras|NumPy|Python|Linux|Slurm|GPU|NVIDIA|CUDA|SCRIPT|DIRECTORY|NAME|E2BIG|SavedModel"
    names += "|MultiWorkerMirroredStrategy|ParameterServerStrategy|CRLF|SlurmClusterResolver|TF_|SidecarEvaluator|KB|GB"
    names += "|DatasetCreator|ShardedEmbedding|Windows|Reduction|Input|Model|KerasTensor|DNS|PATH|LD_|AUTO|StringLookup"
    for _, meaning in _KNOWN:
        assert meaning.endswith((".", "?")), meaning
        assert not re.search(rf"[a-z)'] (?!{names})[A-Z]", meaning), meaning


def test_error_of_our_resolver_is_not_explained_as_tensorflows() -> None:
    ours = 'File "/v/tf4slurm/tensorflow/resolver.py", line 9'
    assert explain([ours, 'File "/v/cluster_resolver/slurm_cluster_resolver.py", line 97', "ValueError: x"]) == []


def test_dataset_of_a_custom_loop_is_not_explained_as_keras_fit() -> None:
    assert explain(["ValueError: … pass this dataset to ClusterCoordinator.create_per_worker_dataset."]) == []


def test_another_wrong_shape_is_not_explained_as_a_row() -> None:
    assert (
        explain(["Invalid input shape for input x. Expected shape (None, 3), but input has incompatible shape (8, 4)"])
        == []
    )
    assert explain(["Incompatible shapes: [4] vs. [5]", "[[{{node compile_loss/mse/sub}}]]"]) == []


@pytest.mark.parametrize(
    ("line", "is_memory"),
    [
        ("OOM when allocating tensor", True),
        ("CUDA out of Memory", True),
        ("BloomEmbedding in room.py: ZOOM", False),
        ("ResourceExhaustedError: ckpt-1; No space left on device\nHint: a list of tensors when OOM happens", False),
    ],
)
def test_memory_is_named_only_if_it_ran_out(line: str, is_memory: bool) -> None:
    assert any(text.startswith("Memory ran out") for text in explain([line])) is is_memory


@pytest.mark.parametrize(
    ("returncode", "lines", "words"),
    [
        (-9, [], "did not send this signal"),
        (-9, ["Killed: out of memory"], "Memory ran out"),
        (-11, ["step 3"], "compiled library"),
        (-6, [], "compiled library"),
    ],
)
def test_end_by_signal_is_explained(returncode: int, lines: list[str], words: str) -> None:
    (explanation,) = explain(lines, returncode)
    assert words in explanation


@pytest.mark.parametrize("returncode", [1, 143, -15, None])
def test_other_end_is_not_explained(returncode: int | None) -> None:
    assert explain(["step 3"], returncode) == []


def test_messages_of_this_python_are_explained() -> None:
    """The texts come from this host's C library and from Python, not from a copy."""
    numbers = (errno.EADDRINUSE, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EACCES, errno.E2BIG)
    messages = [str(OSError(number, os.strerror(number))) for number in numbers]
    with pytest.raises(socket.gaierror) as unknown:
        socket.getaddrinfo("no-such-host.invalid", 1)
    with pytest.raises(ModuleNotFoundError) as missing:
        importlib.import_module("tensorflow.no_such_module_or.other")
    for message in (*messages, str(unknown.value), str(missing.value)):
        assert len(explain([message])) == 1, message
