"""Explain known error messages of TensorFlow, Keras and Python."""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Sequence

from tf4slurm.spec.options import did_you_mean


def explain(lines: Sequence[str], returncode: int | None = None) -> list[str]:
    """Return explanations and remedies for the known errors in these lines, in the order of the table `_KNOWN`.

    Args:
        lines: The last lines that the failed process printed.
        returncode: Its exit code, or minus the number of the signal that killed it; None if unknown.
    """
    text = "\n".join(lines)
    found = [meaning for pattern, meaning in _KNOWN if re.search(pattern, text)]
    if {_GPU_MEMORY, _SLURM_MEMORY} & set(found) and _MEMORY in found:
        found.remove(_MEMORY)
    if _LINE_ENDINGS in found and _NO_FILE in found:
        found.remove(_NO_FILE)
    if returncode == -signal.SIGKILL and not {_MEMORY, _GPU_MEMORY, _SLURM_MEMORY} & set(found):
        found.append(_KILLED)
    elif returncode in _CRASHES:
        found.append("The process crashed in a compiled library, which the named line of your code has called.")
    return [f"{each}{did_you_mean(_find_similar_modules(text))}" if each == _NO_MODULE else each for each in found]


def _find_similar_modules(text: str) -> list[str]:
    """Return the known module, if any, that the missing one in `text` may be a misspelling of."""
    match = re.search(r"No module named '(\w+)'", text)
    if match is None or match[1] in _MODULES:
        return []
    found = difflib.get_close_matches(match[1], _MODULES, 1, _SIMILAR)
    return [each for each in found if abs(len(each) - len(match[1])) <= 1]


_FIT = (
    "Use tf4slurm.tensorflow.fit: strategy, coordinator = tf4slurm.tensorflow.job_strategy(); def dataset_fn(): return "
    "your dataset; fit(model, dataset_fn, coordinator=coordinator, epochs=…, steps_per_epoch=…). evaluate and predict "
    "likewise."
)
RESOLVER = (
    "TensorFlow's own SlurmClusterResolver does not use the cluster that tf4slurm has formed: it computes another one "
    "from Slurm's variables, and calls nvidia-smi. Use tf4slurm.SlurmClusterResolver, which takes the same arguments."
)
_KERAS_2 = "Use Keras 2 (pip install 'tf4slurm[tf-keras]', and export TF_USE_LEGACY_KERAS=1 before the job)"
_SCOPE = (
    "A model, optimizer or metric was created outside of the strategy's scope, or in the scope of another strategy. "
    "Create all of them in `with strategy.scope():`, with one strategy."
)
_MEMORY = "Memory ran out: ask for more, or take smaller batches."
_SLURM_MEMORY = "The job needed more memory than it had asked Slurm for: ask for more with --mem or --mem-per-cpu."
_GPU_MEMORY = (
    "The GPU's memory ran out. Take smaller batches or a smaller model, and check with --gpus-per-worker 1 that no "
    "other task uses the same GPU."
)
_KILLED = (
    "tf4slurm did not send this signal: memory ran out on the host (ask for more with --mem, or take smaller batches), "
    "or somebody killed the process."
)
_CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL))
_LINE_ENDINGS = (
    "A script has the line endings of Windows (CRLF), so that the name of a program or file in it ends with a carriage "
    "return. To convert the script, run dos2unix SCRIPT, or sed -i 's/\\r$//' SCRIPT."
)
_NO_FILE = "A file does not exist on that host: check its path, and that all hosts share its file system."
_MODULES = (*sys.stdlib_module_names, "keras", "matplotlib", "numpy", "pandas", "tensorflow", "tf4slurm")
_SIMILAR = 0.8  # the least similarity of a suggested module, from 0 to 1
_NO_MODULE = (
    "The job's Python has no module of that name: check the spelling of the import, or start the job from the "
    "environment that has the package."
)
_KNOWN = (
    (
        r"keras/src/[\s\S]*create_per_worker_dataset",
        f"Keras 3's fit does not work under ParameterServerStrategy. {_FIT}",
    ),
    (
        r"keras/src/[\s\S]*unsupported type .*PerReplica",
        f"Keras 3's fit does not work under MultiWorkerMirroredStrategy with several workers. {_FIT}",
    ),
    # From here to `_SCOPE`: produced with the code of TensorFlow's guide "Parameter server training"
    # (tests/tensorflow/guide.py), on TensorFlow 2.16, 2.18 and 2.21 with Keras 3.15, and on 2.16 with Keras 3.3.
    (
        r"keras/src/[\s\S]*Unrecognized data type: x=<(function|tensorflow\.python\.distribute\.)"
        r"|keras/src/[\s\S]*Cannot get the cardinality of a dataset that is not built",
        f"Keras 3's fit takes neither a function nor a distributed dataset. {_FIT}",
    ),
    (
        r"module 'keras[\w.]*\.utils' has no attribute 'experimental'"
        r"|No module named 'tensorflow\.keras\.utils\.experimental'",
        f"The script is written for Keras 2, whose fit takes a DatasetCreator, and this is Keras 3. {_FIT}",
    ),
    (
        r"tf4slurm/tensorflow/keras/[\s\S]*missing 1 required positional argument",
        "fit calls the dataset function without an argument. Use a function that passes it, such as lambda: "
        "dataset_fn(tf.distribute.InputContext()).",
    ),
    (
        r"Incompatible shapes: \[(\d+)\] vs\. \[\1,[\s\S]*compile_loss/"
        r"|Incompatible shapes: \[(\d+),[\d,]+\] vs\. \[\2\][\s\S]*compile_loss/",
        "The labels have fewer axes than the model's output, and Keras 3 does not add them. Let the dataset return "
        "labels of the same number of axes, such as labels[:, None].",
    ),
    (
        r"must end in `\.(weights\.h5|keras)`|Invalid filepath extension for saving",
        "The path is written for Keras 2. Keras 3 saves a model as NAME.keras, and its weights as NAME.weights.h5: use "
        "such a name. For a SavedModel call model.export(DIRECTORY).",
    ),
    (
        r"module 'keras[\w.]*' has no attribute 'SidecarEvaluator'",
        "Keras 3 has no SidecarEvaluator. Use tf4slurm.tensorflow.evaluate_checkpoints, or a loop over "
        "tf.train.checkpoints_iterator(DIRECTORY), which reads each checkpoint into a model.",
    ),
    (
        r"module 'keras[\w.]*(?<!\.utils)' has no attribute 'experimental'|`keras\.optimizers\.legacy` is not supported"
        r"|Argument\(s\) not recognized: \{'(lr|decay)'",
        f"The script is written for Keras 2, and this is Keras 3. {_KERAS_2}, or change that call: most names have "
        "lost the word experimental or legacy.",
    ),
    (
        r"'ShardedVariable' object has no attribute|assert len\(emb_layer\.weights\)",
        "A Keras 3 layer cannot use a variable that a variable_partitioner has split. Leave out the argument "
        "variable_partitioner of the strategy, and use tf4slurm.tensorflow.ShardedEmbedding for a large table.",
    ),
    (
        r"'(Keras)?Variable' object has no attribute 'device'",
        "A weight of a Keras 3 layer is not a tf.Variable, which is its attribute value: use weight.value.device.",
    ),
    (
        r"Invalid input shape for input [\s\S]*Expected shape \(None, ([\w, ]+)\), but input has incompatible shape "
        r"\(\1,?\)",
        "A Keras 3 model takes batches, and gets one row here. Call .batch() on the dataset before .map(), or let the "
        "layer, such as StringLookup, take the row instead of a model.",
    ),
    (
        r"Missing data for input \"",
        "A Keras 3 model of a dictionary takes its keys only. Use one name for the key and its Input, such as "
        'Model({"features": Input(…, name="features")}, …), and call the model with {"features": …}.',
    ),
    (
        r"A KerasTensor (cannot be used as input to|is symbolic)",
        "TensorFlow's functions do not take the tensors of which a Keras 3 model is built. Use keras.ops "
        "(keras.ops.mean for tf.reduce_mean), or a layer.",
    ),
    (
        r"argument `reduction`[\s\S]*Received: reduction=auto",
        'Keras 3 has no Reduction.AUTO: use reduction="sum_over_batch_size", or "none" for a loss of each row.',
    ),
    (
        r"object has no attribute 'reset_states'",
        "Metrics of Keras 3 have no reset_states: use reset_state().",
    ),
    (
        r"Mixing different tf\.distribute\.Strategy objects"
        r"|`colocate_vars_with` must only be passed a variable created in this"
        r"|_validate_colocate_extended[\s\S]*'NoneType' object has no attribute 'extended'",
        _SCOPE,
    ),
    (
        # Produced with TensorFlow 2.21: a step function of run_steps that calls next() on its argument.
        r"tf4slurm/tensorflow/step_closure\.py[\s\S]*object is not an iterator",
        "run_steps gives the step function a batch, not an iterator. Use the argument without next(), for example: "
        "def step(batch): features, labels = batch.",
    ),
    (
        # Produced with TensorFlow 2.16, 2.18 and 2.21, as the next two.
        r"Unable to parse tensor proto",
        "A dataset or other object of the chief was passed to a worker. Let the function for create_per_worker_dataset "
        "make the whole dataset: use only arrays from outside of it.",
    ),
    (
        r"OutOfRangeError[\s\S]*End of sequence|End of sequence\s+\[\[\{\{node \w*IteratorGetNext",
        "The dataset of a worker has ended. Let it call .repeat(), and end the training by the number of steps.",
    ),
    (
        r"No module named 'portpicker'",
        "The script starts a cluster in its own process, as TensorFlow's guide does, but tf4slurm has formed one. Take "
        "it from TF_CONFIG, or call strategy, coordinator = tf4slurm.tensorflow.parameter_server_strategy().",
    ),
    (
        r"ImportError: Keras cannot be imported|lazy_loader\.py[\s\S]*RecursionError",  # TensorFlow 2.16; 2.15
        "TF_USE_LEGACY_KERAS=1 needs the package tf-keras, of TensorFlow's own version: pip install "
        "'tf4slurm[tf-keras]', or unset that variable.",
    ),
    (
        # Produced with TensorFlow 1.15 and 2.4.
        r"module 'tensorflow[\w.]*' has no attribute '(coordinator|ParameterServerStrategy)'",
        "This TensorFlow is too old for that name: tf.distribute.experimental has ParameterServerStrategy and "
        "coordinator since 2.4, tf.distribute since a later version. Run the script with a newer TensorFlow. In "
        "TensorFlow 1, train on ps with tf.train.Server and tf.train.MonitoredTrainingSession.",
    ),
    (
        r"module 'tensorflow[\w.]*' has no attribute '(estimator|contrib)'",
        "The script needs a part that TensorFlow does not have any more: estimator went with 2.16, contrib with 2.0. "
        "Run it with an older TensorFlow, or change that part.",
    ),
    (
        r"module 'tensorflow[\w.]*' has no attribute "
        r"'(Session|placeholder|app|flags|get_variable|global_variables_initializer|\w+Optimizer|MonitoredTrainingSession"
        r"|logging|ConfigProto|Supervisor|replica_device_setter|SessionRunHook|disable_v2_behavior)'",
        'The script is written for TensorFlow 1. Import it as "import tensorflow.compat.v1 as tf", and call '
        "tf.disable_v2_behavior() first.",
    ),
    (
        # Produced with TensorFlow 2.21 on a host without nvidia-smi. Our class derives from TensorFlow's.
        r"^(?![\s\S]*tf4slurm/tensorflow/resolver\.py)[\s\S]*cluster_resolver/slurm_cluster_resolver\.py",
        RESOLVER,
    ),
    (
        r"^(?![\s\S]*slurm_cluster_resolver\.py)[\s\S]*No such file or directory: 'nvidia-smi'",
        "The script calls nvidia-smi on a host without NVIDIA's driver. Look for the program first (shutil.which), or "
        "run the script on hosts with GPUs only.",
    ),
    (
        r"Could not start gRPC server",
        "TensorFlow's server could not listen at its address: another server has the port, or it is another host's. "
        "Start one server in each task, with cluster, type and index as TF_CONFIG says. TensorFlow before 2.3 needs "
        "--hold-ports auto or never.",
    ),
    (
        r"UnavailableError|failed to connect to all addresses",
        "The server of another task was not reached, or is gone: look at how the other tasks ended, and at their logs.",
    ),
    (
        # Produced with Python 3.11 without TensorFlow.
        r"No module named 'tensorflow'",
        "The job's Python has no TensorFlow. Start the job with the Python of the environment that has it, or give "
        "--module, --venv or --conda.",
    ),
    (
        r"No module named 'tf4slurm'",
        "The script's Python does not have tf4slurm. If it is Python 3.10 or newer, install tf4slurm there. In an "
        "older one, import tf4slurm_client, which the job brings along. A script for tf4slurm before 0.1 runs there "
        'under plain srun, after eval "$(tf4slurm client)".',
    ),
    (
        r"No module named '(?!tensorflow'|tf4slurm'|tensorflow\.keras\.utils\.experimental'|portpicker')",
        _NO_MODULE,
    ),
    (
        # https://github.com/tensorflow/tensorflow/issues/60913
        r"Loaded runtime CuDNN library: \S+ but source was compiled with",
        "The cuDNN library is older than the one that TensorFlow was built with. Use the cuDNN of pip install "
        "'tensorflow[and-cuda]', and remove other ones from LD_LIBRARY_PATH.",
    ),
    (
        # https://github.com/tensorflow/tensorflow/issues/31319
        r"CUDA driver version is insufficient for CUDA runtime version",
        "The node's NVIDIA driver is too old for this TensorFlow. Use a TensorFlow for an older CUDA, or nodes with a "
        "newer driver (nvidia-smi shows it).",
    ),
    (
        # https://github.com/tensorflow/tensorflow/issues/56266 and
        # https://github.com/world-federation-of-advertisers/cross-media-measurement/issues/3327
        r"Descriptors cannot (not )?be created directly|Detected incompatible Protobuf Gencode/Runtime versions",
        "The installed protobuf does not fit TensorFlow's. Run pip check, and install the version of protobuf that it "
        "names.",
    ),
    (
        # https://github.com/tensorflow/tensorflow/issues/56562
        r"version `(GLIBCXX|CXXABI|GLIBC)_[\d.]+' not found",
        "A system library on that host is older than the one that a package needs. Load a newer compiler's module "
        "(gcc), or use an environment that was made for these nodes.",
    ),
    (
        # https://github.com/tensorflow/tensorflow/issues/98406
        r"compiled using NumPy 1\.x cannot be run in|numpy\.dtype size changed",
        "A package was built for another major version of NumPy. Install numpy<2, or a newer version of that package.",
    ),
    (
        # Produced with Python's socket module: OSError 98.
        r"^(?![\s\S]*Could not start gRPC server)[\s\S]*Address already in use",
        "Another process on that host has the port. Take the port from TF_CONFIG, or port 0 for servers of your own.",
    ),
    (
        # Produced with Python's socket.getaddrinfo (EAI_NONAME, EAI_AGAIN); the last:
        # https://github.com/tensorflow/serving/issues/1535
        r"Name or service not known|Temporary failure in name resolution|DNS resolution failed",
        "A host name cannot be resolved on that node. Use the addresses in TF_CONFIG, which are numbers, and download "
        "data before the job: compute nodes often have no internet.",
    ),
    (
        # https://github.com/nextflow-io/nextflow/issues/5932
        r"[Dd]etected \d+ oom.kill event",
        _SLURM_MEMORY,
    ),
    (
        # https://github.com/ZettaAI/zetta_utils/issues/671
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "Slurm ended the job at its time limit. Ask for more with -t, or let it continue in a new job: --requeue 3.",
    ),
    (
        # The first: TensorFlow's bfc_allocator, https://github.com/tensorflow/tensorflow/issues/17669; the second:
        # cuda_driver.cc.
        r"OOM when allocating tensor.*\bGPU:\d|CUDA_ERROR_OUT_OF_MEMORY",
        _GPU_MEMORY,
    ),
    (
        r"(?i:(?<!cuda_error_)out of memory)|MemoryError|ResourceExhausted(?![\s\S]*No space left)"
        r"|\bOOM\b(?! happens)(?!.*\bGPU:\d)",
        _MEMORY,
    ),
    (
        # Produced with Python: OSError 28 and 122.
        r"No space left on device|Disk quota exceeded",
        "A disk or your quota is full: make room, or let the script write elsewhere.",
    ),
    (
        # https://github.com/derpston/python-simpleflock/issues/9
        r"Stale (NFS )?file handle",
        "A file on a network file system was replaced or deleted while the script had it open. Let one task write it, "
        "and read it only after that: tf4slurm.barrier().",
    ),
    (
        # Produced with Python: OSError 7.
        r"Argument list too long",
        "A command line or a variable is too long for Linux (E2BIG), which allows 128 KB for each argument and "
        "variable: shorten it, or write it to a file.",
    ),
    (r"(?i)Permission denied", "A file may not be read or written by this user: look at the path in the last lines."),
    (
        # Produced with scripts whose lines end with CRLF: env of coreutils 9.1, bash 5.2, Python 3.11. The last: older
        # bash, https://stackoverflow.com/questions/14219092
        r"\\r['’]: (\[Errno 2\] )?(No such file or directory|command not found)|unexpected token `\$'\w*\\r'"
        r"|\^M: bad interpreter",
        _LINE_ENDINGS,
    ),
    (
        r"No such file or directory(?!: 'nvidia-smi')",
        _NO_FILE,
    ),
    (
        # Produced with TensorFlow 2.21: dataset functions with arrays of 2.25 GB, and of two times 1.2 GB.
        r"Cannot create a tensor proto whose content is larger than 2GB|Protobuf is too large to be serialized"
        r"|'__inference_\S+' is neither a type of a primitive operation nor a name of a function registered",
        "A function was not sent to a worker, most likely because its arrays exceed TensorFlow's limit of 2 GB. Let "
        "the workers read files (tf4slurm.tensorflow.worker_files) or a tf.data service, or call tf.numpy_function in "
        "the dataset.",
    ),
)
