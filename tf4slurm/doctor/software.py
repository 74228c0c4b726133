"""What is looked at of the software: Python, TensorFlow with its Keras, and packages that contradict each other.

TensorFlow is imported in a process of its own, which is bounded: it takes seconds, and where it is broken, the process
that imports it may crash. Quickly, only what is written beside the packages (their metadata) is read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tf4slurm.doctor.finding import Finding

IMPORT_SECONDS = 90.0  # 2 to 10 s from a local disk; a parallel file system that many nodes ask at once takes longer
_PIP_SECONDS = 30.0
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "intel-tensorflow", "tensorflow-macos", "tf-nightly")
_CONCERNED = re.compile(r"^(tensorflow|tf.keras|keras|grpcio|protobuf|numpy|tf4slurm|tf-nightly)", re.IGNORECASE)
_FACTS = """
import json
import tensorflow as tf
facts = {"version": tf.__version__, "file": tf.__file__, "servers": hasattr(tf.distribute, "Server")}
try:
    keras = getattr(tf.keras, "__version__", None)
    if keras is None:  # as tf.keras, the Keras before 3 does not tell
        import tf_keras
        keras = tf_keras.__version__
    facts["keras"] = keras
except Exception as error:
    facts["keras_error"] = f"{type(error).__name__}: {error}"
import google.protobuf, grpc
facts.update(grpcio=grpc.__version__, protobuf=google.protobuf.__version__)
print()
print(json.dumps(facts))
"""


def check_software(environ: Mapping[str, str], *, is_quick: bool) -> list[Finding]:
    """Look at Python and what is installed in it; quickly: without starting TensorFlow or pip."""
    findings = [check_python(environ)]
    if importlib.util.find_spec("tensorflow") is None:
        todo = (
            "pip install 'tf4slurm[tensorflow]', or load its module before this; a script without it runs all the same."
        )
        return [*findings, Finding("warn", "tensorflow", "there is no TensorFlow in this Python", todo)]
    if is_quick:
        return [*findings, Finding("ok", "tensorflow", f"TensorFlow {_origin(environ)}, not started (--quick)")]
    return [*findings, *check_tensorflow(environ), *check_packages(environ)]


def check_python(environ: Mapping[str, str]) -> Finding:
    """Tell which Python this is, and whether `python` is another one."""
    text = f"Python {platform.python_version()}, {sys.executable}"
    other = shutil.which("python", path=environ.get("PATH"))
    if other is None or os.path.realpath(other) == os.path.realpath(sys.executable):
        return Finding("ok", "python", text)
    todo = "What is said here of packages is of tf4slurm's own Python: activate it, or end the command with its path."
    return Finding("warn", "python", f"{text}; but `python` is another one, {other}", todo)


def check_tensorflow(environ: Mapping[str, str]) -> list[Finding]:
    """Import TensorFlow in a process of its own, and tell what its Keras means for ParameterServerStrategy."""
    command = (sys.executable, "-c", _FACTS)
    try:
        done = subprocess.run(
            command,
            env={**environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        text = f"TensorFlow {_origin(environ)} was not imported within {IMPORT_SECONDS:g} s"
        todo = "Look at the file system it lies on; a copy on a local disk helps. Else give --start-timeout more time."
        return [Finding("fail", "tensorflow", text, todo)]
    try:
        facts = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        facts = None
    if done.returncode != 0 or not isinstance(facts, dict):
        return [_judge_failure(environ, done.returncode, done.stderr)]
    text = f"TensorFlow {facts['version']} ({_origin(environ)}), grpcio {facts['grpcio']}, protobuf {facts['protobuf']}"
    return [Finding("ok", "tensorflow", text), judge_keras(facts, environ)]


def judge_keras(facts: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    """Tell what the Keras of this TensorFlow can do under ParameterServerStrategy."""
    if "keras_error" in facts:
        text = f"tf.keras does not load: {facts['keras_error'].splitlines()[0][:200]}"
        wants_legacy = environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
        version = ".".join(str(facts["version"]).split(".")[:2])
        todo = (
            f"pip install tf_keras~={version}.0, or unset TF_USE_LEGACY_KERAS." if wants_legacy else "pip install keras"
        )
        return Finding("fail", "keras", text, todo)
    keras = str(facts["keras"])
    if keras.startswith("3."):
        todo = (
            "Write the loop yourself, with strategy.run and a step counter of your own (TUTORIALS/train_digits.py); or "
            "pip install tf_keras and set TF_USE_LEGACY_KERAS=1, where fit works."
        )
        return Finding("warn", "keras", f"Keras {keras}: Model.fit fails under ParameterServerStrategy", todo)
    return Finding(
        "ok", "keras", f"Keras {keras} (the one before Keras 3): Model.fit works under ParameterServerStrategy"
    )


def check_packages(environ: Mapping[str, str]) -> list[Finding]:
    """Ask pip which of the packages that matter here contradict each other; nothing where there is no pip."""
    try:
        done = subprocess.run(
            (sys.executable, "-m", "pip", "check", "--disable-pip-version-check"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PIP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return []
    if "No module named pip" in done.stderr:
        return []
    conflicts = [line.rstrip(".") for line in done.stdout.splitlines() if _CONCERNED.match(line)]
    if done.returncode == 0 or not conflicts:
        return [
            Finding("ok", "packages", "no contradiction between TensorFlow, Keras, grpcio and protobuf (pip check)")
        ]
    todo = "pip install the versions that are asked for, best in a fresh virtual environment."
    return [Finding("warn", "packages", conflict, todo) for conflict in conflicts]


def _judge_failure(environ: Mapping[str, str], returncode: int, words: str) -> Finding:
    last = (words.strip().splitlines() or ["without a word"])[-1][:300]
    if returncode == -signal.SIGILL:
        last, todo = "it was built for a newer processor (SIGILL)", "Use a TensorFlow built for this processor's kind."
    elif "protobuf" in words.lower() or "Descriptors cannot" in words:
        todo = (
            "Another protobuf is needed: pip install --force-reinstall tensorflow, best in a fresh virtual environment."
        )
    else:
        todo = f"See all of it with: {sys.executable} -c 'import tensorflow'"
    return Finding("fail", "tensorflow", f"TensorFlow {_origin(environ)} cannot be imported: {last}", todo)


def _origin(environ: Mapping[str, str]) -> str:
    """Return where TensorFlow is from, by what is written beside it."""
    spec = importlib.util.find_spec("tensorflow")
    place = os.path.dirname(spec.origin) if spec is not None and spec.origin else "unknown place"
    modules = [name for name in environ.get("LOADEDMODULES", "").split(":") if "tensorflow" in name.lower()]
    if modules:
        return f"of module {modules[-1]}, {place}"
    for name in _TENSORFLOWS:
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        installer = (package.read_text("INSTALLER") or "").strip() or "unknown hands"
        return f"package {name} {package.version} by {installer}, {place}"
    return f"of no package, {place}"
