"""What scripts decide before they import TensorFlow: each script runs both ways, without a difference."""

from __future__ import annotations

import pytest

from tests.preload.both_ways import Scripts

FORKED = ""
"""The result of a script that runs in a forked process, as `Child.not_forked`."""

SEEN = """
import json as _json, os as _os, sys as _sys, tensorflow as _tf
_of_task = ("TF_CONFIG", "TF4SLURM_TASK", "CUDA_VISIBLE_DEVICES")  # no import reads them
print(_json.dumps({
    "seen by tensorflow": {k: v for k, v in _tf.AT_IMPORT.items() if k not in _of_task},
    "path": _tf.PATH_AT_IMPORT,
    "environ": dict(_os.environ),
    "modules": sorted(n for n in _sys.modules if n.startswith(("tensorflow", "own", "other"))),
    "file": __file__,
}))
"""

FILES = {
    "own.py": "import os\nos.environ['FROM_OWN'] = '1'\n",
    "own_package/__init__.py": "from own_package import names\n",
    "own_package/names.py": "import os\nos.environ['TF_X'] = '1'\nLEVEL = '2'\n",
    "own_sees.py": "import tensorflow\nLEVEL = '2'\n",
    "own_prints.py": "print('own')\n",
    "own_function.py": "import os\ndef set_level():\n    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'\n",
    "own_relative/__init__.py": "from .inner import name\nfrom . import other\n",
    "own_relative/inner.py": "name = 1\n",
    "own_relative/other.py": "import os\nos.environ['FROM_OTHER'] = 'x'\n",
    ".env": "TF_CPP_MIN_LOG_LEVEL=2\n",
}

SCRIPTS = {
    # Constants in the source, which the preloader also sets
    "nothing": ("", FORKED),
    "docstring": ('"""Train."""\n', FORKED),
    "future": ("from __future__ import annotations\n", FORKED),
    "constant": ('import os\nos.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"\n', FORKED),
    "constant by another name": ('import os as system\nsystem.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"\n', FORKED),
    "from os": ('from os import environ\nenviron["TF_USE_LEGACY_KERAS"] = "1"\n', FORKED),
    "two names": ('import os\nos.environ["KERAS_BACKEND"] = os.environ["X"] = "tensorflow"\n', FORKED),
    "setdefault": ('import os\nos.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")\n', FORKED),
    "update": ('import os\nos.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})\n', FORKED),
    "update by keywords": ('import os\nos.environ.update(OMP_NUM_THREADS="1")\n', FORKED),
    "pop": ('import os\nos.environ.pop("TO_REMOVE", None)\n', FORKED),
    "del": ('import os\ndel os.environ["TO_REMOVE"]\n', FORKED),
    "augmented": ('import os\nos.environ["TO_REMOVE"] += ":more"\n', FORKED),
    "constant of the script": ('import os\nLEVEL = 2\nos.environ["TF_CPP_MIN_LOG_LEVEL"] = str(LEVEL)\n', FORKED),
    "formatted": ('import os\nN = 4\nos.environ["OMP_NUM_THREADS"] = f"{N // 2}"\n', FORKED),
    "joined": ('import os\nos.environ["XLA_FLAGS"] = " ".join(["--a", "--b"])\n', FORKED),
    "from another variable": ('import os\nos.environ["A"] = os.environ.get("HOME", "/") + "/x"\n', FORKED),
    "getenv": ('import os\nos.environ["A"] = os.getenv("HOME", "/")\n', FORKED),
    "path of the script": (
        'import os\nos.environ["A"] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")\n',
        FORKED,
    ),
    "pathlib": (
        'import os\nfrom pathlib import Path\nos.environ["A"] = str(Path(__file__).resolve().parent)\n',
        FORKED,
    ),
    "json": ('import json, os\nos.environ["A"] = json.dumps({"a": 1})\n', FORKED),
    "after another import": ('import json, os\nimport numbers\nos.environ["A"] = "1"\n', FORKED),
    "if of a constant": ('import os\nDEBUG = False\nif DEBUG:\n    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"\n', FORKED),
    "if of the version": (
        'import os, sys\nif sys.version_info[0] < 3:\n    os.environ["A"] = "2"\nelse:\n    os.environ["A"] = "3"\n',
        FORKED,
    ),
    "if and elif": ('import os\nN = 2\nif N == 1:\n    pass\nelif N == 2:\n    os.environ["A"] = "two"\n', FORKED),
    "try": ("try:\n    import does_not_exist\nexcept ImportError:\n    does_not_exist = None\n", FORKED),
    "try tensorflow 1": (
        "try:\n    import tensorflow.compat.v1 as tf\nexcept ImportError:\n    import tensorflow as tf\n",
        FORKED,
    ),
    "function": ("def f(a, b=2, *, c=None):\n    print(a)\n", FORKED),
    "property": ("class A:\n    @property\n    def f(self):\n        return 1\n", FORKED),
    "enum": ("import enum\nclass A(enum.Enum):\n    X = 1\n", FORKED),
    "class": ("class A:\n    x = 1\n    def f(self):\n        print(1)\n", FORKED),
    "dataclass": ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n", FORKED),
    "annotated": ('import os\nX: str = "1"\nos.environ["A"] = X\n', FORKED),
    "warnings": ('import warnings\nwarnings.filterwarnings("ignore")\n', FORKED),
    "logging": ('import logging\nlogging.getLogger("tensorflow").setLevel(logging.ERROR)\n', FORKED),
    "logging to a file": ('import logging\nlogging.basicConfig(filename="log", filemode="w")\n', FORKED),
    "sys.path of the script": (
        'import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))\n',
        FORKED,
    ),
    "sys.path append": ('import sys\nsys.path.append("lib")\n', FORKED),
    # The user's own modules, whose source is read
    "own module": ("import own\n", FORKED),
    "own package": ("import own_package.names\n", FORKED),
    "from own package": ("from own_package import names\n", FORKED),
    "from own module": ("from own_package.names import LEVEL\n", FORKED),
    "own module with tensorflow": ("import own_sees\n", FORKED),
    "own module with relative imports": ("import own_relative\n", FORKED),
    "own function that is not called": ("from own_function import set_level\n", FORKED),
    # Variables of the task, which are known in the child only
    "TF_CONFIG": (
        'import json, os\nos.environ["TF_CONFIG"] = json.dumps({"task": os.environ.get("TF4SLURM_TASK")})\n',
        FORKED,
    ),
    "visible devices": (
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("TF4SLURM_TASK", "0")[-1]\n',
        FORKED,
    ),
    "by the task": (
        'import os\nos.environ["OMP_NUM_THREADS"] = os.environ.get("TF4SLURM_TASK", "0")[-1]\n',
        "changes OMP_NUM_THREADS",
    ),
    "unknown in the task": (
        'import os\nos.environ["A"] = os.environ["TF4SLURM_TASK"]\n',
        "cannot be evaluated",
    ),
    "sys.path by the task": (
        'import os, sys\nsys.path.insert(0, os.environ.get("TF4SLURM_TASK", ""))\n',
        "changes sys.path",
    ),
    "if of the task": (
        'import os\nif os.environ.get("TF4SLURM_TASK") == "ps/0":\n    os.environ["A"] = "1"\n',
        "depends on the environment",
    ),
    # What cannot be known, or has an effect: never preloaded
    "own function": ("from own_function import set_level\nset_level()\n", "calls a function"),
    "function of the script": (
        'import os\ndef level():\n    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"\nlevel()\n',
        "calls a function",
    ),
    "lambda": ('import os\n(lambda: os.environ.update(A="1"))()\n', "calls a function"),
    "putenv": ('import os\nos.putenv("TF_CPP_MIN_LOG_LEVEL", "2")\n', "calls a function"),
    "arguments": ('import os, sys\nos.environ["TF_CPP_MIN_LOG_LEVEL"] = sys.argv[1]\n', "depends on the arguments"),
    "argparse": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args()\n",
        "calls a function",
    ),
    "file of variables": (
        "import os\nfor line in open('.env'):\n    name, _, value = line.strip().partition('=')\n    os.environ[name] = value\n",
        "is not an import",
    ),
    "with": ("import os\nwith open('.env') as file:\n    os.environ['A'] = file.read()\n", "is not an import"),
    "exec": ("exec(\"import os; os.environ['A'] = '1'\")\n", "calls a function"),
    "print": ("print('starting')\n", "calls a function"),
    "writes a file": ("from pathlib import Path\nPath('count').write_text('1')\n", "calls a function"),
    "own module that prints": ("import own_prints\n", "calls a function"),
    "decorator": ("def register(f):\n    print('f')\n@register\ndef f(): pass\n", "has a decorator"),
    "base class": (
        "class A:\n    def __init_subclass__(cls):\n        print(cls.__name__)\nclass B(A): pass\n",
        "has a base class",
    ),
    "metaclass": ("class M(type):\n    pass\nclass B(metaclass=M): pass\n", "has a base class"),
    "property set": ("import sys\nsys.dont_write_bytecode = True\n", "is not an import"),
    "walrus": ("import os\nif (x := os.getpid()):\n    pass\n", "is not an import"),
    "while": ("n = 0\nwhile n < 2:\n    n += 1\n", "is not an import"),
    "assert": ("assert True\n", "is not an import"),
    "raise": ("raise SystemExit('no')\n", "is not an import"),
    "syntax error": ("def f(:\n", "cannot be read"),
    "module that does not exist": ("import does_not_exist_at_all\n", "does_not_exist_at_all"),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    scripts = Scripts(tmp_path_factory.mktemp("scripts"))
    for name, text in FILES.items():
        scripts.write(name, text)
    return scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_in_the_same_way(name: str, scripts: Scripts) -> None:
    text, not_forked = SCRIPTS[name]
    executed, forked = scripts.run_script(
        text + SEEN,
        "7",
        environ=scripts.environ(TO_REMOVE="x"),
        task_environ={"TF4SLURM_TASK": "worker/3", "TF_CONFIG": "{}"},
    )
    assert forked.output == executed.output
    assert forked.returncode == executed.returncode
    if not_forked == FORKED:
        assert forked.not_forked == ""
    else:
        assert not_forked in forked.not_forked
