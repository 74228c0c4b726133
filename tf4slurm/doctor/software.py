"""Check the software: Python, TensorFlow with its Keras, and conflicts between packages.

TensorFlow is imported in a separate process with a timeout, because the import takes seconds and can crash.
"""

from __future__ import annotations

import contextlib
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

from tf4slurm.doctor.finding import Finding, warn_unless

IMPORT_SECONDS = 90.0  # the import takes 2 to 10 s from a local disk, longer if many nodes read one file system
_PIP_SECONDS = 30.0
_RELEVANT = re.compile(r"^(tensorflow|tf.keras|keras|grpcio|protobuf|numpy|tf4slurm|tf-nightly)", re.IGNORECASE)
_SHOW_ERROR = f"Show the whole error: {sys.executable} -c 'import tensorflow'"
_FACTS = """
import json, time
begin = time.monotonic()
import tensorflow as tf
facts = {"version": tf.__version__, "seconds": time.monotonic() - begin}
try:
    keras = getattr(tf.keras, "__version__", None)
    if keras is None:  # Keras 2 has no version as tf.keras
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
    """Run all checks of the software. With `is_quick`, TensorFlow is not imported and pip is not run."""
    python = check_python(environ)
    if importlib.util.find_spec("tensorflow") is None:
        advice = (
            "pip install 'tf4slurm[tensorflow]', or load its module first. Scripts that do not need it run without."
        )
        return [python, Finding("warn", "tensorflow", "TensorFlow is not installed in this Python", advice)]
    if is_quick:
        return [python, Finding("ok", "tensorflow", f"TensorFlow {_origin(environ)}, not started (--quick)")]
    return [python, *_check_tensorflow(environ), *_check_packages(environ)]


def check_python(environ: Mapping[str, str]) -> Finding:
    """Return a finding that names this Python. It is a warning if the command `python` starts another Python."""
    other = shutil.which("python", path=environ.get("PATH"))
    return warn_unless(
        other is None or os.path.realpath(other) == os.path.realpath(sys.executable),
        topic="python",
        text=f"Python {platform.python_version()}, {sys.executable}",
        problem=f"; but `python` is another one, {other}",
        advice="These checks are about tf4slurm's own Python: activate it, or give its path in the job's command.",
    )


def check_keras(facts: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    """Check whether the Keras of TensorFlow has a Model.fit that works under ParameterServerStrategy.

    `facts` is what the program `_FACTS` printed, which imports TensorFlow.
    """
    if "keras_error" in facts:
        text = f"tf.keras does not load: {facts['keras_error'].splitlines()[0][:200]}"
        advice = "pip install keras"
        if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
            version = ".".join(facts["version"].split(".")[:2])
            advice = f"pip install tf_keras~={version}.0, or unset TF_USE_LEGACY_KERAS."
        return Finding("fail", "keras", text, advice)
    if not facts["keras"].startswith("3."):
        return Finding("ok", "keras", f"Keras {facts['keras']}: Model.fit works under ParameterServerStrategy")
    advice = (
        "Call tf4slurm.tensorflow.fit(model, dataset_fn, …) instead, as TUTORIALS/train_digits.py does; or "
        "pip install tf_keras and set TF_USE_LEGACY_KERAS=1, with which Model.fit works."
    )
    return Finding("warn", "keras", f"Keras {facts['keras']}: Model.fit fails under ParameterServerStrategy", advice)


def _check_tensorflow(environ: Mapping[str, str]) -> list[Finding]:
    origin = _origin(environ)
    done = _run_python(("-c", _FACTS), {**environ, "TF_CPP_MIN_LOG_LEVEL": "2"}, IMPORT_SECONDS)
    if done is None:
        text = f"TensorFlow {origin} was not imported within {IMPORT_SECONDS:g} s"
        advice = "Check its file system; a copy on a local disk helps. Or increase --start-timeout."
        return [Finding("fail", "tensorflow", text, advice)]
    if done.returncode != 0:
        reason, advice = _explain_failure(done.returncode, done.stderr)
        return [Finding("fail", "tensorflow", f"TensorFlow {origin} cannot be imported: {reason}", advice)]
    facts = find_facts(done.stdout)
    if facts is None:
        text, advice = f"TensorFlow {origin} cannot be imported: Python printed no versions", _SHOW_ERROR
        return [Finding("fail", "tensorflow", text, advice)]
    text = f"TensorFlow {facts['version']} ({origin}), grpcio {facts['grpcio']}, protobuf {facts['protobuf']}"
    text += f"; its import takes {facts['seconds']:.1f} s"
    return [Finding("ok", "tensorflow", text), check_keras(facts, environ)]


def find_facts(output: str) -> dict[str, Any] | None:
    """Return the JSON object that the program `_FACTS` printed, or None without one. Other lines are ignored."""
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict) and facts.keys() >= {"version", "seconds", "grpcio", "protobuf"}:
                return facts
    return None


def _explain_failure(returncode: int, stderr: str) -> tuple[str, str]:
    if returncode == -signal.SIGILL:
        return "it was built for a newer processor (SIGILL)", "Install a TensorFlow built for this processor."
    reason = (stderr.strip().splitlines() or ["no error message"])[-1][:300]
    if "protobuf" in stderr.lower() or "Descriptors cannot" in stderr:
        advice = "pip install --force-reinstall tensorflow, best in a new virtual environment."
        return reason, f"It needs another protobuf: {advice}"
    return reason, _SHOW_ERROR


def _check_packages(environ: Mapping[str, str]) -> list[Finding]:
    """Check the versions of TensorFlow, Keras, grpcio, protobuf and numpy for conflicts with `pip check`.

    Without pip, or if it takes more than 30 s, there is no finding.
    """
    done = _run_python(("-m", "pip", "check", "--disable-pip-version-check"), environ, _PIP_SECONDS)
    if done is None or "No module named pip" in done.stderr:
        return []
    conflicts = [line.rstrip(".") for line in done.stdout.splitlines() if _RELEVANT.match(line)]
    if done.returncode == 0 or not conflicts:
        return [Finding("ok", "packages", "no conflict between TensorFlow, Keras, grpcio and protobuf (pip check)")]
    advice = "pip install the required versions, best in a new virtual environment."
    return [Finding("warn", "packages", conflict, advice) for conflict in conflicts]


def _run_python(
    arguments: tuple[str, ...], environ: Mapping[str, str], timeout_seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """Run this Python with `arguments`. Return the ended process with its output, or None after the timeout."""
    command = (sys.executable, *arguments)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            command,
            check=False,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
        )
    return None


def _origin(environ: Mapping[str, str]) -> str:
    spec = importlib.util.find_spec("tensorflow")
    place = os.path.dirname(spec.origin) if spec is not None and spec.origin else "an unknown place"
    modules = [name for name in environ.get("LOADEDMODULES", "").split(":") if "tensorflow" in name.lower()]
    if modules:
        return f"from module {modules[-1]}, {place}"
    names = importlib.metadata.packages_distributions().get("tensorflow")
    if not names:
        return f"from no package, {place}"
    package = importlib.metadata.distribution(names[0])
    installer = (package.read_text("INSTALLER") or "").strip() or "an unknown installer"
    return f"package {package.name} {package.version} by {installer}, {place}"
