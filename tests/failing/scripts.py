"""Scripts that fail, each with the failure that the job must show. "# here" marks the line that it must name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FailingScript:
    """A script that fails, and the expected failure.

    Attributes:
        text: The text of train.py, or of a notebook.
        type: The expected type of the failure.
        message: The beginning of the expected message.
        helper: The text of helper.py.
        task: The beginning of the name of the task whose process failed.
        worker: The beginning of the name of the task on which a closure of the chief failed.
        ran_in_task: Whether the process of `task` ran the function that failed, for `worker`.
        caused_by: The expected direct cause.
        file: The file that has the line "# here". None if the failure names no line.
        cell_line: The line in a notebook's cell.
        options: Options of `tf4slurm run`.
        command: The command, in which "{python}" and "{script}" are replaced.
    """

    text: str
    type: str
    message: str
    helper: str = ""
    task: str = "chief/0"
    worker: str | None = None
    ran_in_task: bool = False
    caused_by: str = ""
    file: str | None = "train.py"
    cell_line: int | None = None
    options: tuple[str, ...] = ("--ps", "0", "--workers", "0")
    command: tuple[str, ...] = ("{python}", "{script}")

    @property
    def line(self) -> int | None:
        """The number of the line that has "# here", in `file`."""
        if self.cell_line is not None:
            return self.cell_line
        text = self.helper if self.file == "helper.py" else self.text
        return next((number for number, line in enumerate(text.splitlines(), 1) if "# here" in line), None)

    def write(self, directory: Path, python: str) -> list[str]:
        """Write the files of the script. Return the command that runs it with this Python in `directory`."""
        name = "train.ipynb" if self.text.lstrip().startswith("{") else "train.py"
        (directory / name).write_text(self.text)
        (directory / "helper.py").write_text(self.helper)
        return [word.replace("{python}", python).replace("{script}", name) for word in self.command]


_PSS = ("--ps", "1", "--workers", "2")
_COORDINATOR = """
import tensorflow as tf
import tf4slurm.tensorflow as tft
strategy, coordinator = tft.job_strategy()
"""
_OWN_COORDINATOR = """
import json, os
import tensorflow as tf
config = json.loads(os.environ["TF_CONFIG"])
if config["task"]["type"] in ("ps", "worker"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
"""

PLAIN = {
    "exception": FailingScript(
        """
import helper
def main():
    helper.read({"rate": "fast"})
main()
""",
        "ValueError",
        "could not convert string to float: 'fast'",
        helper="def read(options):\n    return float(options['rate'])  # here\n",
        file="helper.py",
    ),
    "exception in the standard library": FailingScript(
        """
import json
def main():
    return json.loads("{")  # here
main()
""",
        "JSONDecodeError",
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    "missing module": FailingScript("import numpie  # here\n", "ModuleNotFoundError", "No module named 'numpie'"),
    "missing name": FailingScript(
        "from math import cosinus  # here\n", "ImportError", "cannot import name 'cosinus' from 'math'"
    ),
    "syntax error": FailingScript("print('before')\nx = (1,  # here\ny = 2\n", "SyntaxError", "'(' was never closed"),
    "syntax error in a module": FailingScript(
        "import helper\n", "SyntaxError", "invalid syntax", helper="a = 1\nb = = 2  # here\n", file="helper.py"
    ),
    "indentation": FailingScript(
        "def f():\nreturn 1  # here\nf()\n",
        "IndentationError",
        "expected an indented block after function definition on line 1",
    ),
    "exit with text": FailingScript(
        "import sys\nprint('loading')\nsys.exit('The data directory /data/x does not exist.')\n",
        "exit code 1",
        "The data directory /data/x does not exist.",
        file=None,
    ),
    "exit with a code": FailingScript(
        "import sys\nprint('Reading failed: 3 records are damaged')\nsys.exit(3)\n",
        "exit code 3",
        "Reading failed: 3 records are damaged",
        file=None,
    ),
    "printed traceback": FailingScript(
        """
import sys, traceback
try:
    [][1]  # here
except IndexError:
    traceback.print_exc()
    sys.exit(4)
""",
        "IndexError",
        "list index out of range",
    ),
    "chained": FailingScript(
        """
def read(options):
    try:
        return options["rate"]
    except KeyError as error:
        raise RuntimeError("The settings are incomplete.") from error  # here
read({})
""",
        "RuntimeError",
        "The settings are incomplete.",
        caused_by="KeyError: 'rate'",
    ),
    "exception in a handler": FailingScript(
        """
try:
    open("/no/such/file")
except OSError as error:
    print(error.filename.nothing)  # here
""",
        "AttributeError",
        "'str' object has no attribute 'nothing'",
    ),
    "exception group": FailingScript(
        """
def check(value):
    if value < 0:
        raise ValueError(f"negative: {value}")  # here
found = []
for value in (1, -2, -3):
    try:
        check(value)
    except ValueError as error:
        found.append(error)
raise ExceptionGroup("2 values are wrong", found)
""",
        "ValueError",
        "negative: -2",
        caused_by="",
    ),
    "notes": FailingScript(
        """
error = ValueError("bad record")
error.add_note("in file part-0007")
raise error  # here
""",
        "ValueError",
        "bad record",
    ),
    "several lines": FailingScript(
        "raise ValueError('two problems:\\n  no rate\\n  no size')  # here\n",
        "ValueError",
        "two problems: no rate no size",
    ),
    "no message": FailingScript("assert 1 > 2  # here\n", "AssertionError", ""),
    "long message": FailingScript(
        "raise ValueError('shapes ' + 'x' * 20_000 + ' differ')  # here\n", "ValueError", "shapes xxx"
    ),
    "recursion": FailingScript(
        "def f(n):\n    return f(n + 1)  # here\nf(0)\n", "RecursionError", "maximum recursion depth exceeded"
    ),
    "thread": FailingScript(
        """
import os, threading
def work():
    raise ValueError("bad batch")  # here
thread = threading.Thread(target=work)
thread.start()
thread.join()
os._exit(5)
""",
        "ValueError",
        "bad batch",
    ),
    "subprocess": FailingScript(
        """
import subprocess, sys
subprocess.run([sys.executable, "helper.py"], check=True)  # here
""",
        "CalledProcessError",
        "Command '['",
        helper="raise ValueError('bad archive')\n",
        caused_by="ValueError: bad archive",
    ),
    "process pool": FailingScript(
        """
import multiprocessing
def work(number):
    return 10 / number  # here
if __name__ == "__main__":
    with multiprocessing.Pool(1) as pool:
        pool.map(work, [1, 0])
""",
        "ZeroDivisionError",
        "division by zero",
    ),
    "executor": FailingScript(
        """
import concurrent.futures
def work(number):
    return 10 / number  # here
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        list(pool.map(work, [1, 0]))
""",
        "ZeroDivisionError",
        "division by zero",
    ),
    "at exit": FailingScript(
        """
import atexit
def clean():
    print("cleaning up")
    raise RuntimeError("too late")
atexit.register(clean)
raise ValueError("bad rate")  # here
""",
        "ValueError",
        "bad rate",
    ),
    "handled before": FailingScript(
        """
import logging, sys
try:
    int("x")
except ValueError:
    logging.exception("line 3 is left out")
for line in range(60):
    print("record", line)
sys.exit("No record is complete.")
""",
        "exit code 1",
        "No record is complete.",
        file=None,
    ),
    "segmentation fault": FailingScript(
        "import ctypes\ndef read():\n    ctypes.string_at(0)  # here\nread()\n", "SIGSEGV", "Segmentation fault"
    ),
    "abort": FailingScript("import os\nos.abort()  # here\n", "SIGABRT", "Aborted"),
    "killed": FailingScript(
        "import os, signal\nprint('step 7', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "SIGKILL",
        "",
        file=None,
    ),
    "worker before its server": FailingScript(
        """
import os, time
if '"type": "worker", "index": 1' in os.environ["TF_CONFIG"]:
    raise ValueError("no data for this worker")  # here
time.sleep(60)
""",
        "ValueError",
        "no data for this worker",
        task="worker/1",
        options=_PSS,
    ),
    "module with -m": FailingScript(
        "",
        "ValueError",
        "bad rate",
        helper="raise ValueError('bad rate')  # here\n",
        file="helper.py",
        command=("{python}", "-m", "helper"),
    ),
    "shell": FailingScript(
        "",
        "exit code 7",
        "helper.sh: the queue is empty",
        file=None,
        command=("bash", "-c", "echo 'helper.sh: the queue is empty'; exit 7"),
    ),
    "shell with python": FailingScript(
        "raise ValueError('bad rate')  # here\n",
        "ValueError",
        "bad rate",
        command=("bash", "-c", "{python} {script} || exit 9"),
    ),
}
"""Scripts without TensorFlow."""

TENSORFLOW = {
    "closure": FailingScript(
        f"""{_OWN_COORDINATOR}
with strategy.scope():
    table = tf.Variable([1.0, 2.0])
@tf.function
def step(index):
    return tf.raw_ops.CheckNumerics(tensor=tf.math.log(-table[index]), message="the loss")  # here
for number in range(4):
    coordinator.schedule(step, args=(0,))
coordinator.join()
""",
        "InvalidArgumentError",
        "the loss : Tensor had NaN values",
        worker="worker/",
        options=_PSS,
    ),
    "step of run_steps": FailingScript(
        f"""{_COORDINATOR}
@tf.function
def step(batch):
    tf.debugging.assert_less(batch, tf.constant(3, tf.int64), message="too large")  # here
dataset_fn = lambda context=None: tf.data.Dataset.range(10)
iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
tft.run_steps(coordinator, step, 100, dataset=iterator)
""",
        "InvalidArgumentError",
        "assertion failed: [too large]",
        worker="worker/",
        options=_PSS,
    ),
    "input function": FailingScript(
        f"""{_OWN_COORDINATOR}
def read(index):
    raise ValueError("record 3 is damaged")  # here
def dataset_fn(context=None):
    dataset = tf.data.Dataset.range(8)
    return dataset.map(lambda index: tf.py_function(read, [index], tf.int64))
iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
@tf.function
def step(iterator):
    return next(iterator)
coordinator.schedule(step, args=(iterator,))
coordinator.join()
""",
        "ValueError",
        "record 3 is damaged",
        worker="worker/",
        ran_in_task=True,
        options=_PSS,
    ),
    "generator": FailingScript(
        f"""{_COORDINATOR}
def read():
    yield 1.0
    raise OSError("the archive is damaged")  # here
def dataset_fn():
    return tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec((), tf.float32))
@tf.function
def step(batch):
    return batch
tft.run_steps(coordinator, step, 10, dataset=iter(coordinator.create_per_worker_dataset(dataset_fn)))
""",
        "OSError",
        "the archive is damaged",
        worker="worker/",
        ran_in_task=True,
        options=_PSS,
    ),
    "dataset function": FailingScript(
        f"""{_COORDINATOR}
def dataset_fn():
    return tf.data.Dataset.range(8).map(lambda index: {{"x": index}}["y"])  # here
iter(coordinator.create_per_worker_dataset(dataset_fn))
""",
        "KeyError",
        "'y'",
        options=_PSS,
    ),
    "map function": FailingScript(
        """
import tensorflow as tf
def parse(text):
    return tf.io.decode_csv(text, [1.0, 1.0])
for row in tf.data.Dataset.from_tensor_slices(["1,2", "1"]).map(parse):  # here
    print(row)
""",
        "InvalidArgumentError",
        "Expect 2 fields but have 1 in record 0",
    ),
    "missing file": FailingScript(
        f"""{_COORDINATOR}
dataset_fn = lambda: tf.data.TFRecordDataset("/data/none.tfrecord")
@tf.function
def step(batch):
    return tf.cast(tf.strings.length(batch), tf.float32)
tft.run_steps(coordinator, step, 10, dataset=iter(coordinator.create_per_worker_dataset(dataset_fn)))  # here
""",
        "NotFoundError",
        "/data/none.tfrecord; No such file or directory",
        worker="worker/",
        options=_PSS,
    ),
    "traced step": FailingScript(
        f"""{_COORDINATOR}
@tf.function
def step():
    return tf.matmul(tf.ones((2, 3)), tf.ones((2, 3)))  # here
tft.run_steps(coordinator, step, 10)
""",
        "ValueError",
        "Dimensions must be equal, but are 3 and 2 for ",
        options=_PSS,
    ),
    "eager step": FailingScript(
        """
import tensorflow as tf
def step(x):
    return tf.matmul(x, x)  # here
step(tf.ones((2, 3)))
""",
        "InvalidArgumentError",
        "Matrix size-incompatible: In[0]: [2,3], In[1]: [2,3]",
    ),
    "keras layers": FailingScript(
        """
import numpy, keras
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(numpy.ones((8, 3)), numpy.ones((8, 1)), verbose=0)  # here
""",
        "ValueError",
        "Exception encountered when calling Sequential.call(). Input 0 ",
    ),
    "keras loss": FailingScript(
        f"""{_COORDINATOR}
import keras
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
def dataset_fn():
    return tf.data.Dataset.from_tensors((tf.ones(4), 7)).repeat().batch(2)
tft.fit(model, dataset_fn, coordinator=coordinator, epochs=1, steps_per_epoch=8)  # here
""",
        "InvalidArgumentError",
        "Received a label value of 7 which is outside the valid range of [0, 3)",
        worker="worker/",
        options=_PSS,
    ),
    "keras callback": FailingScript(
        f"""{_COORDINATOR}
import keras
class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError(f"epoch {{epoch}} is too long")  # here
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
def dataset_fn():
    return tf.data.Dataset.from_tensors((tf.ones(4), tf.ones(1))).repeat().batch(2)
tft.fit(model, dataset_fn, coordinator=coordinator, epochs=1, steps_per_epoch=8, callbacks=[Stop()])
""",
        "RuntimeError",
        "epoch 0 is too long",
        options=_PSS,
    ),
    "checkpoint": FailingScript(
        """
import tensorflow as tf
value = tf.Variable(1.0)
checkpoint = tf.train.Checkpoint(value=value)
checkpoint.read("/data/none").assert_consumed()  # here
""",
        "NotFoundError",
        "Unsuccessful TensorSliceReader constructor: Failed to find any matching files for /data/none",
    ),
    "checkpoint of another model": FailingScript(
        """
import tempfile
import tensorflow as tf
path = tf.train.Checkpoint(value=tf.Variable([1.0, 2.0])).save(tempfile.mkdtemp() + "/saved")
tf.train.Checkpoint(value=tf.Variable([1.0, 2.0, 3.0])).restore(path).assert_consumed()  # here
""",
        "ValueError",
        "Received incompatible tensor with shape (2,)",
        caused_by="ValueError: Shapes (3,) and (2,) are incompatible",
    ),
    "session": FailingScript(
        """
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
def make_loss(x):
    return tf.check_numerics(tf.log(x), "the loss")  # here
loss = make_loss(tf.placeholder(tf.float32, name="x"))
with tf.Session() as session:
    session.run(loss, {"x:0": -1.0})
""",
        "InvalidArgumentError",
        "the loss : Tensor had NaN values",
    ),
    "session with py_func": FailingScript(
        """
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
def read(x):
    raise KeyError("no record 3")  # here
value = tf.py_func(read, [1.0], tf.float32)
with tf.Session() as session:
    session.run(value)
""",
        "KeyError",
        "'no record 3'",
    ),
    "session on a worker": FailingScript(
        """
import json, os
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
config = json.loads(os.environ["TF_CONFIG"])
name, index = config["task"]["type"], config["task"]["index"]
server = tf.train.Server(config["cluster"], job_name=name, task_index=index)
if name == "ps":
    server.join()
with tf.device(tf.train.replica_device_setter(cluster=config["cluster"])):
    step = tf.train.get_or_create_global_step()
    loss = tf.check_numerics(tf.log(tf.cast(2 - step, tf.float32)), "the loss")  # here
    train = tf.group(loss, tf.assign_add(step, 1))
session_config = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
with tf.train.MonitoredTrainingSession(server.target, is_chief=index == 0, config=session_config) as session:
    while not session.should_stop():
        session.run(train)
""",
        "InvalidArgumentError",
        "the loss : Tensor had",
        task="worker/",
        options=("--ps", "1", "--workers", "2", "--no-chief"),
    ),
    "mirrored": FailingScript(
        """
import json, os
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def parse(number):
    if index:
        raise ValueError("shard 3 is empty")  # here
    return number
dataset = tf.data.Dataset.range(4).map(lambda n: tf.numpy_function(parse, [n], tf.int64))
@tf.function
def step(n):
    context = tf.distribute.get_replica_context()
    return context.all_reduce("sum", tf.cast(n, tf.float32))
for n in dataset:
    strategy.run(step, args=(n,))
""",
        "ValueError",
        "shard 3 is empty",
        task="worker/1",
        options=("--ps", "0", "--workers", "2", "--no-chief"),
    ),
    "ps before its server": FailingScript(
        """
import os, time
import tensorflow as tf
if '"type": "ps"' in os.environ["TF_CONFIG"]:
    float("one")  # here
time.sleep(60)
""",
        "ValueError",
        "could not convert string to float",
        task="ps/0",
        options=_PSS,
    ),
}
"""Scripts with TensorFlow."""

NOTEBOOK = FailingScript(
    """
{"cells": [{"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": null, "source": "x = 1"},
{"cell_type": "code", "id": "b", "metadata": {}, "outputs": [], "execution_count": null,
 "source": "def f(n):\\n    return 1 / n\\nf(0)"}],
 "metadata": {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}},
 "nbformat": 4, "nbformat_minor": 5}
""",
    "ZeroDivisionError",
    "division by zero",
    file="Cell In[2]",
    cell_line=2,
    command=("{python}", "-m", "jupyter", "nbconvert", "--execute", "--to", "notebook", "{script}"),
)
SCRIPTS = PLAIN | TENSORFLOW | {"notebook": NOTEBOOK}
