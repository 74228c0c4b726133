"""A forked process is what exec would have made: each fact is read in both, in real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.preload.both_ways import Outcome, Scripts

PYTHON = os.environ.get("PRELOAD_PYTHON", sys.executable)

FACTS: dict[str, str] = {
    # What Python sets
    "__main__": "{n: repr(v) for n, v in sorted(vars(sys.modules['__main__']).items()) if n.startswith('__') and n not in ('__builtins__', '__loader__')}",
    "loader": "[type(__loader__).__name__, getattr(__loader__, 'path', None), getattr(__loader__, 'name', None)]",
    "builtins": "type(__builtins__).__name__",
    "main module": "[__name__, sys.modules['__main__'].__dict__ is globals()]",
    "arguments": "[sys.argv, getattr(sys, 'orig_argv', None)]",
    "path": "sys.path",
    "executable": "[sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix]",
    "flags": "[repr(sys.flags), sys.warnoptions, sys._xoptions, sys.dont_write_bytecode]",
    "warning filters": "[[str(part) for part in each] for each in __import__('warnings').filters]",
    "modules": "sorted(n for n in sys.modules if n.startswith(('tensorflow', '__main__')))",
    "name of the module's file": "[tf.__file__, tf.__name__, tf.__spec__.name, tf.__loader__.path, tf.__spec__.origin]",
    "streams": "[[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.isatty(), s.fileno(), s.seekable()] for s in (sys.stdin, sys.stdout, sys.stderr)]",
    "original streams": "[sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__]",
    "hooks": "[repr(sys.excepthook), repr(sys.displayhook), sys.gettrace(), sys.getprofile()]",
    "recursion limit": "[sys.getrecursionlimit(), sys.getswitchinterval()]",
    "encodings": "[sys.getdefaultencoding(), sys.getfilesystemencoding(), __import__('locale').getpreferredencoding(False)]",
    "environment": "sorted(os.environ.items())",
    "C environment": "sorted(line for line in os.popen('env').read().splitlines() if not line.startswith('_='))",
    "meta path": "[str(f) for f in sys.meta_path if 'Finder' in str(f) and 'editable' not in str(f) and 'istutils' not in str(f)]",
    "threads": "[t.name for t in __import__('threading').enumerate()]",
    "main thread": "__import__('threading').main_thread().ident == __import__('threading').get_ident()",
    "faulthandler": "__import__('faulthandler').is_enabled()",
    "gc": "[__import__('gc').isenabled(), __import__('gc').get_threshold()]",
    # What the kernel knows
    "directory": "os.getcwd()",
    "umask": "[oct(os.umask(0o22)), os.umask(0o22)][:1]",
    "limits": "open('/proc/self/limits').read()",
    "niceness": "os.getpriority(os.PRIO_PROCESS, 0)",
    "cpus": "sorted(os.sched_getaffinity(0))",
    "scheduler": "[os.sched_getscheduler(0), os.sched_getparam(0).sched_priority]",
    "oom_score_adj": "open('/proc/self/oom_score_adj').read()",
    "cgroup": "open('/proc/self/cgroup').read()",
    "session": "os.getsid(0)",
    "own process group": "os.getpgrp() == os.getpid()",
    "users": "[os.getresuid(), os.getresgid(), os.getgroups()]",
    "signals": "[l for l in open('/proc/self/status').read().splitlines() if l.startswith(('SigBlk', 'SigIgn', 'SigCgt', 'SigPnd', 'ShdPnd'))]",
    "Python's signal handlers": "[repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())]",
    "command line": "open('/proc/self/cmdline').read()",
    "environment of the process": "sorted(e for e in open('/proc/self/environ').read().split('\\0') if e)",
    "name of the process": "open('/proc/self/comm').read()",
    "program": "os.readlink('/proc/self/exe')",
    "ps": "os.popen('ps -o args= -p %d' % os.getpid()).read()",
    "pgrep": "os.popen('pgrep -f \"train.py the.argument\" | grep -c %d' % os.getpid()).read()",
    "children": "open('/proc/self/task/%d/children' % os.getpid()).read()",
    "open files": "sorted(_name(fd) for fd in os.listdir('/proc/self/fd'))",
    "standard input": "[sys.stdin.read(), os.readlink('/proc/self/fd/0')]",
    "core pattern": "[l for l in open('/proc/self/status').read().splitlines() if l.startswith(('NoNewPrivs', 'Seccomp', 'CapEff', 'Threads'))]",
    "dumpable": "__import__('ctypes').CDLL(None).prctl(3, 0, 0, 0, 0)",
    "parent's death signal": "(lambda n, c: [c.CDLL(None).prctl(2, c.byref(n), 0, 0, 0), n.value])(__import__('ctypes').c_int(), __import__('ctypes'))",
    "child subreaper": "(lambda n, c: [c.CDLL(None).prctl(37, c.byref(n), 0, 0, 0), n.value])(__import__('ctypes').c_int(), __import__('ctypes'))",
    "timer slack": "open('/proc/self/timerslack_ns').read()",
    "time zone": "__import__('time').tzname",
}

TEXT = """
import json, os, signal, sys
import tensorflow as tf

def _name(descriptor):
    try:
        name = os.readlink("/proc/self/fd/" + descriptor)
    except OSError:
        return ""
    return descriptor if name.startswith("pipe") and int(descriptor) < 3 else name.split(":")[0]

print(json.dumps({what!r} and ({expression})))
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("table"))


def expect_equal(executed: Outcome, forked: Outcome) -> None:
    assert forked.not_forked == ""
    assert forked.output == executed.output
    assert forked.returncode == executed.returncode


@pytest.mark.parametrize("what", FACTS)
def test_fact_is_equal(what: str, scripts: Scripts) -> None:
    text = TEXT.format(what=what, expression=FACTS[what])
    executed, forked = scripts.run_script(text, "the argument", environ=scripts.environ(TZ="Asia/Tokyo"))
    assert executed.returncode == 0, executed.output
    expect_equal(executed, forked)


OPTIONS = [
    "-u",
    "-O",
    "-OO",
    "-B",
    "-E",
    "-s",
    "-W error",
    "-Wd",
    "-X dev",
    "-Xutf8",
    "-X faulthandler",
    "-b",
    "-q",
    "-uB",
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_python(options: str, scripts: Scripts) -> None:
    names = ["flags", "streams", "arguments", "path", "warning filters", "command line", "faulthandler"]
    facts = "{" + ", ".join(f"{name!r}: {FACTS[name]}" for name in names) + "}"
    path = scripts.write("train.py", TEXT.format(what="options", expression=facts))
    environ = scripts.environ()
    if "E" in options:  # which ignores PYTHONPATH
        path.write_text(f"import sys\nsys.path.insert(0, {str(scripts.site)!r})\n" + path.read_text())
    expect_equal(*scripts.run((PYTHON, *options.split(), "train.py", "x"), environ=environ))


VARIABLES = {
    "unbuffered": {"PYTHONUNBUFFERED": "1"},
    "encoding": {"PYTHONIOENCODING": "latin-1:replace"},
    "utf8": {"PYTHONUTF8": "1"},
    "no utf8": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
    "locale": {"LANG": "C.UTF-8"},
    "warnings": {"PYTHONWARNINGS": "default"},
    "optimize": {"PYTHONOPTIMIZE": "1"},
    "faulthandler": {"PYTHONFAULTHANDLER": "1"},
    "hash seed": {"PYTHONHASHSEED": "3"},
    "no home": {"HOME": ""},
    "safe path": {"PYTHONSAFEPATH": "1"},
    "undecodable": {"STRANGE": os.fsdecode(b"\xff\xfe")},
    "long": {"LONG": "x" * 100_000},
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_python(name: str, scripts: Scripts) -> None:
    names = ["flags", "streams", "encodings", "path", "environment", "environment of the process", "faulthandler"]
    facts = "{" + ", ".join(f"{each!r}: {FACTS[each]}" for each in names) + "}"
    text = TEXT.format(what="variables", expression=f"[{facts}, hash('a') if {name == 'hash seed'} else 0]")
    expect_equal(*scripts.run_script(text, environ=scripts.environ(**VARIABLES[name])))


ENDS = {
    "end": "pass",
    "exit": "sys.exit(3)",
    "exit with text": "sys.exit('the text')",
    "exit with None": "sys.exit(None)",
    "exit with a large number": "sys.exit(300)",
    "os._exit": "print('x', flush=True); os._exit(5)",
    "exception": "raise ValueError('the value')",
    "nested exception": "def f():\n    raise ValueError('1')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError('2') from e",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    "exception group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])"
    if sys.version_info >= (3, 11)
    else "pass",
    "syntax error in an import": "import broken",
    "exception in an import": "import fails",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "own excepthook": "sys.excepthook = lambda *a: print('hook', a[0].__name__, a[1], a[2].tb_frame.f_code.co_name, a[2].tb_lineno)\nraise ValueError('x')",
    "failing excepthook": "def hook(*a):\n    raise TypeError('in the hook')\nsys.excepthook = hook\nraise ValueError('x')",
    "exit in the excepthook": "sys.excepthook = lambda *a: sys.exit(9)\nraise ValueError('x')",
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')",
    "atexit and exception": "import atexit\natexit.register(print, 'first')\nraise ValueError('x')",
    "atexit and interrupt": "import atexit\natexit.register(print, 'first')\nraise KeyboardInterrupt",
    "exception in atexit": "import atexit\natexit.register(lambda: 1 / 0)",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "thread with exception": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()",
    "daemon thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "__del__": "class A:\n    def __del__(self):\n        print('del')\na = A()",
    "unflushed": "sys.stdout.write('no newline')",
    "closed output": "sys.stdout.close()",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "abort": "os.abort()",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "terminate": "os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)",
    "hangup": "os.kill(os.getpid(), signal.SIGHUP)",
    "user signal": "os.kill(os.getpid(), signal.SIGUSR1)",
    "alarm": "signal.alarm(1)\nimport time\ntime.sleep(60)",
    "broken pipe": "r, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    "too large file": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\nopen('large', 'wb').write(b'x' * 100)",
    "warning": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "main": "if __name__ == '__main__':\n    print('main')",
    "print_exc": "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()",
    "pickle": "import pickle\nclass A:\n    pass\nprint(pickle.dumps(A()).hex(), type(pickle.loads(pickle.dumps(A()))) is A)",
    "runpy": "import runpy\nprint(sorted(runpy.run_path('other.py')))",
    "exec a file": "exec(open('other.py').read())",
    "import of itself": "import train\nprint(train.__name__)",
    "main by import": "import __main__\nprint(__main__.__file__, __main__ is sys.modules['__main__'])",
    "inspect": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))",
    "annotations": "x: int = 1\nprint(__import__('typing').get_type_hints(sys.modules['__main__']))",
    "multiprocessing's main module": "import multiprocessing\nprint(sys.modules['__mp_main__'] is sys.modules['__main__'])",
    "reload": "import importlib\nprint(importlib.reload(tf).__name__)",
    "find_spec": "import importlib.util\nprint(importlib.util.find_spec('tensorflow').name, importlib.util.find_spec('tensorflow.lazy').name)",
    "fork": "pid = os.fork()\nif pid == 0:\n    print('child', flush=True)\n    os._exit(4)\nprint(os.waitpid(pid, 0)[1])",
    "system": "print(os.system('exit 7'))",
    "subprocess": "import subprocess\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv)', 'a'], capture_output=True, text=True).stdout)",
    "coroutine": "import asyncio\nprint(asyncio.run(asyncio.sleep(0.01, 'slept')))",
    "child handler": "import asyncio\nasync def main():\n    p = await asyncio.create_subprocess_exec('true')\n    return await p.wait()\nprint(asyncio.run(main()))",
    "pdb without terminal": "import pdb\npdb.set_trace()\nprint('after')",
    "input": "input('name? ')",
}
POOLS = {
    f"multiprocessing {method}": (
        "import multiprocessing\n"
        "def f(x):\n    return x * 2, multiprocessing.current_process().name\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    with multiprocessing.Pool(1) as pool:\n        print(pool.map(f, [1, 2]))\n"
    )
    for method in ("fork", "spawn", "forkserver")
}
POOLS["executor"] = (
    "from concurrent.futures import ProcessPoolExecutor\n"
    "if __name__ == '__main__':\n    with ProcessPoolExecutor(1) as pool:\n        print(list(pool.map(abs, [-1])))\n"
)
ENDS.update(POOLS)


@pytest.mark.parametrize("name", ENDS)
def test_end_is_equal(name: str, scripts: Scripts) -> None:
    scripts.write("broken.py", "x = (\n")
    scripts.write("fails.py", "def f():\n    raise OSError('no')\nf()\n")
    scripts.write("other.py", "value = 1\nprint(__name__)\n")
    executed, forked = scripts.run_script(f"import os, signal, sys\nimport tensorflow as tf\n{ENDS[name]}\n")
    expect_equal(executed, forked)


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL, signal.SIGALRM]


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_has_the_same_effect(number: signal.Signals, ignores: bool, scripts: Scripts) -> None:
    is_ignored = ignores and number not in (signal.SIGKILL, signal.SIGQUIT, signal.SIGALRM)
    # One line, for equal tracebacks. Not one long sleep, which misses a signal that arrives just before it.
    waits = f"for _ in [print('ready', flush=True), *range({50 if is_ignored else 6000})]: time.sleep(0.01)"
    text = f"import time\nimport tensorflow\n{waits}\n"
    environ = scripts.environ(PYTHONNODEBUGRANGES="1")
    expect_equal(
        *scripts.run_script(text, environ=environ, signal_number=number, until="ready", ignores_stop_signals=ignores)
    )


def test_handler_of_the_script(scripts: Scripts) -> None:
    text = (
        "import signal, sys, time\n"
        "import tensorflow\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f'handled {number}'))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    expect_equal(*scripts.run_script(text, signal_number=signal.SIGTERM, until="ready"))


MODULES: dict[str, dict[str, str]] = {
    "train": {"train.py": "{text}"},
    "package.train": {"package/__init__.py": "", "package/train.py": "{text}"},
    "package": {"package/__init__.py": "", "package/__main__.py": "{text}"},
    "package.inner.train": {
        "package/__init__.py": "import os\n",
        "package/inner/__init__.py": "from package import other\n",
        "package/other.py": "",
        "package/inner/train.py": "{text}",
    },
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("what", ["__main__", "arguments", "path", "command line", "flags", "main module", "modules"])
def test_module(module: str, what: str, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    for name, text in MODULES[module].items():
        scripts.write(name, text.replace("{text}", TEXT.format(what=what, expression=FACTS[what])))
    expect_equal(*scripts.run((PYTHON, "-m", module, "an", "argument")))


def test_exception_in_a_module(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    scripts.write("train.py", "import tensorflow\nraise ValueError('x')\n")
    expect_equal(*scripts.run((PYTHON, "-m", "train")))


PATHS = [
    "./train.py",
    "{work}/train.py",
    "../work/train.py",
    "inner/train.py",
    "./inner/../train.py",
    "link.py",
    "linked/train.py",
]


@pytest.mark.parametrize("path", PATHS)
def test_path_of_the_script(path: str, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    names = ["__main__", "arguments", "path", "command line"]
    text = TEXT.format(what="path", expression="[" + ", ".join(FACTS[name] for name in names) + "]")
    for name in ("train.py", "inner/train.py"):
        scripts.write(name, text + "raise ValueError\n")
    (scripts.work / "link.py").symlink_to("inner/train.py")
    (scripts.work / "linked").symlink_to("inner")
    expect_equal(*scripts.run((PYTHON, path.format(work=scripts.work), "x")))


def test_random_numbers_of_numpy_differ(scripts: Scripts) -> None:
    text = "import tensorflow\nimport numpy\nprint(numpy.random.rand())\n"
    _, first = scripts.run_script(text)
    _, second = scripts.run_script(text)
    assert first.not_forked == second.not_forked == ""
    assert first.output != second.output


def test_open_files_of_a_forked_process_are_not_those_of_the_preloader(scripts: Scripts) -> None:
    text = "import os\nimport tensorflow\nprint(sorted(os.readlink(f'/proc/self/fd/{d}') for d in os.listdir('/proc/self/fd') if int(d) > 2 and os.path.exists(f'/proc/self/fd/{d}')))\n"
    executed, forked = scripts.run_script(text)
    expect_equal(executed, forked)
