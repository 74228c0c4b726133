"""The preloader: `python [OPTIONS] program.py LISTENER SETTINGS` imports modules once, and forks processes.

The two arguments are file descriptors: of a listening socket, and of a pipe with the settings as one line of JSON. The
end of the pipe ends the preloader. This file and those that it imports run with the script's Python, 3.9 or newer,
which need not have tf4slurm.

    agent ──── connection ────────────> keeper ── fork ──> child, which runs the script
                preloader ── fork ──────>│

The preloader replays the beginning of the script (`replay.py`). Then it only forks, so it has one thread. Each child
has a keeper (`keeper.py`). The loss of the preloader changes nothing for running children. In the child (`child.py`)
the preloaded modules are hidden until the script imports them.
"""

from __future__ import annotations

import sys

_AT_START = frozenset(sys.modules)  # what each Python process has
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # the directory of this file

import atexit
import ctypes
import gc
import importlib.machinery
import json
import os
import select
import signal
import socket
import struct
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

_PACKAGE = "_tf4slurm_preload"  # a name of its own, because the script's Python may have another tf4slurm
if __name__ == "__main__":
    sys.modules[_PACKAGE] = types.ModuleType(_PACKAGE)
    sys.modules[_PACKAGE].__path__ = [os.path.dirname(os.path.abspath(__file__))]
    __package__ = _PACKAGE

from .child import IGNORED_SIGNALS, Child
from .environ import compared, find_changes, find_differing, name_some, read_initial
from .keeper import Keeper, fork, prctl
from .messages import read_conditions, read_proc, receive, send
from .output import capture_output, close_output, flush_streams
from .replay import Refusal, Replay, find_top_level

if TYPE_CHECKING:
    from .child import Code

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REQUEST_SECONDS = 2.0
_HOLD_SECONDS = 60.0  # until the first agent holds a shared preloader
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_SURVIVING_THREADS = ("jemalloc_bg_thd",)  # its library does not need it in a fork

_state: set[str] = set()  # "child", "script", and "interrupted" after an uncaught KeyboardInterrupt


class Preloader:
    """Replays the script's beginning, and forks a keeper for each request."""

    def __init__(self, listener: socket.socket, settings: Mapping[str, Any], life: int) -> None:
        """Store the arguments.

        Args:
            listener: A listening socket.
            settings: "token", the text that each request must have, "script" and "module", of which one is None, and
                "is_shared" if this process ends with the last agent that holds it.
            life: File descriptor that is at its end when the process that started this one has ended. Not used if this
                process is shared.
        """
        self._listener = listener
        self._life = [life]
        self._holders: list[socket.socket] = []
        self._is_shared = settings.get("is_shared", False)
        if self._is_shared:
            os.close(self._life.pop())
        self._token = settings["token"]
        self._script: str | None = settings["script"]
        self._module: str | None = settings["module"]
        self._environ = read_initial()
        self._changes = find_changes(self._environ, os.environ)
        self._path = list(sys.path)
        self._refusal = ""
        self._replay = Replay()

    def load(self) -> None:
        """Import what the script imports at its beginning."""
        directory = os.getcwd()
        standard = {name.partition(".")[0] for name in sys.modules if name not in _AT_START} - {_PACKAGE}
        try:
            if sys.version_info < (3, 9):  # noqa: UP036 - this is the script's Python
                raise Refusal("Python is older than 3.9")
            if sys.gettrace() is not None or sys.getprofile() is not None:
                raise Refusal("a profiler or the measurement of coverage has started with Python")
            if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
                script = self._script
                self._path.insert(0, directory if script is None else os.path.dirname(os.path.realpath(script)))
            sys.path[:] = self._path
            self._replay.run(self._script if self._script is not None else _find_main(str(self._module)))
            if not any("tensorflow" in group.modules for group in self._replay.groups):
                raise Refusal(self._replay.stopped or "the script does not import TensorFlow at its top")
            replaced = [name for name in standard if find_top_level(name)[0] == "own"]
            if replaced:
                raise Refusal(f"the user's module {replaced[0]} replaces one of Python")
        except Refusal as refusal:
            self._refusal = str(refusal)
        except Exception as error:
            self._refusal = f"the preloader failed ({type(error).__name__}: {error})"
        os.chdir(directory)
        gc.collect()
        gc.freeze()  # so that a collection in a child does not copy all pages

    def serve(self) -> Code:
        """Handle requests until no process needs this one any more. Return only in a child: what it runs."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended keepers leave no zombies
        timeout: float | None = _HOLD_SECONDS if self._is_shared else None
        while True:
            waited: list[Any] = [self._listener, *self._life, *self._holders]
            ready, _, _ = select.select(waited, [], [], timeout)
            if self._listener in ready:
                connection, _ = self._listener.accept()
                connection.settimeout(_REQUEST_SECONDS)
                code = self._handle(connection)
                if code is not None:
                    return code
                if connection not in self._holders:
                    connection.close()
            for holder in [each for each in self._holders if each in ready]:  # it has ended
                self._holders.remove(holder)
                holder.close()
            if not ready or any(each in ready for each in self._life):
                os._exit(0)
            timeout = 0 if self._is_shared and not self._holders else None

    def _handle(self, connection: socket.socket) -> Code | None:
        """Read a request, and fork a keeper or send the reason why there is none. In a child, return what it runs.

        The connection of an agent that holds this process is kept.
        """
        descriptors: list[int] = []
        try:
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            request, descriptors = receive(connection) if user == os.getuid() else (None, [])
            if request is None or request.get("token") != self._token:
                return None
            if request.get("holds"):
                self._holders.append(connection)
                return None
            self._check(request)
            if fork() == 0:
                return self._run_keeper(connection, request, descriptors[0])
        except Refusal as refusal:
            _answer(connection, str(refusal))
        except Exception as error:
            if "child" in _state:
                raise
            _answer(connection, f"{type(error).__name__}: {error}")
        finally:
            for descriptor in descriptors if "child" not in _state else ():
                os.close(descriptor)
        return None

    def _check(self, request: Mapping[str, Any]) -> None:
        """Raise Refusal if a forked child would differ from one that is executed."""
        if self._refusal:
            raise Refusal(self._refusal)
        if (request["script"], request["module"]) != (self._script, self._module):
            raise Refusal("the task runs another program")
        names = find_differing(compared(request["environ"]), compared(self._environ))
        if names:
            raise Refusal(f"{name_some(names)} differ from those of the preloader")
        names = find_differing(request["conditions"], read_conditions())
        if names:
            raise Refusal(f"the {name_some(names)} of the task differ from those of the preloader")
        for path, source in self._replay.sources.items():
            with open(path, "rb") as file:
                if file.read() != source:
                    raise Refusal(f"{os.path.basename(path)} has changed")
        threads = find_threads()
        if threads:
            raise Refusal(f"an imported module has started the thread {threads[0]!r}")
        devices = find_devices()
        if devices:
            raise Refusal(f"an imported module has opened {devices[0]}")

    def _run_keeper(self, connection: socket.socket, request: dict[str, Any], output: int) -> Code:
        """Be the keeper of a child. Return only in the child: what it runs."""
        try:
            for each in (self._listener, *self._holders):
                each.close()
            for descriptor in self._life:
                os.close(descriptor)
            connection.settimeout(None)
            keeper = Keeper(connection)
            if keeper.start():
                return self._become_child(keeper, request, output)
            os.close(output)
            keeper.run()
        except OSError:
            if "child" in _state:
                raise
        os._exit(0)

    def _become_child(self, keeper: Keeper, request: dict[str, Any], output: int) -> Code:
        _state.add("child")
        child = Child(keeper, request, self._replay.groups)
        close_output()
        child.set_process_up(output)
        child.set_python_up(self._path, self._changes)
        for name in [each for each in sys.modules if each.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
        if request["script"] is not None:
            _state.add("script")
        return child.make_code(__file__)


def _answer(connection: socket.socket, refusal: str) -> None:
    try:
        send(connection, {"refusal": refusal})
    except OSError:
        pass


def _find_main(module: str) -> str:
    """Return the path of the file that `python -m MODULE` runs. Raise Refusal if there is none."""
    parts = module.split(".")
    path: Any = None
    for number in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: number + 1]), path)
        if spec is None:
            raise Refusal(f"there is no module {module}")
        path = spec.submodule_search_locations
    if path is not None:
        spec = importlib.machinery.PathFinder.find_spec(f"{module}.__main__", path)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise Refusal(f"the module {module} has no source")
    return spec.origin


def find_threads() -> list[str]:
    """Return the names of threads of this process that a fork would lose, except the main thread.

    A fork loses all of them, but OpenBLAS starts its threads again. They have the name of the process.
    """
    own = read_proc("comm").strip()
    found = [
        read_proc(f"task/{each}/comm").strip() for each in os.listdir("/proc/self/task") if int(each) != os.getpid()
    ]
    found = [name for name in found if name not in _SURVIVING_THREADS]
    for _ in range(min(found.count(own), _count_openblas_threads() if own in found else 0)):
        found.remove(own)
    return found


def _count_openblas_threads() -> int:
    """Return the number of threads that the loaded copies of OpenBLAS have started."""
    count = 0
    for path in {line.split(None, 5)[5].strip() for line in read_proc("maps").splitlines() if "openblas" in line}:
        library = ctypes.CDLL(path)
        names = [f"{begin}openblas_get_num_threads{end}" for begin in ("", "scipy_") for end in ("", "64_", "_64_")]
        functions = [getattr(library, name) for name in names if hasattr(library, name)]
        count += functions[0]() - 1 if functions else 0
    return count


def find_devices() -> list[str]:
    """Return the device files of GPUs that this process has opened."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink("/proc/self/fd/" + each))
        except OSError:
            pass
    return [path for path in found if path.startswith(_DEVICES)]


def print_uncaught(error: BaseException) -> None:
    """Print an uncaught exception as Python does, without the frames of this file."""
    if "script" in _state:
        flush_streams()
    trace = _hide_own_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as second:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, _hide_own_frames(second))
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)


def _hide_own_frames(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_DIRECTORY):
        trace = trace.tb_next
    error.__traceback__ = trace
    return trace


_DIRECTORY = os.path.dirname(__file__) + os.sep


def _end_by_interrupt() -> None:
    """After a KeyboardInterrupt that nothing has caught, end this process by SIGINT, as Python does."""
    if "interrupted" in _state:
        flush_streams()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def main(listener: int, pipe: int) -> Code:
    """Import modules, and serve requests. Return only in a child: what it runs.

    Args:
        listener, pipe: See the description of this file.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    atexit.register(_end_by_interrupt)  # before all others, so that it is called last
    capture_output()
    for descriptor in (listener, pipe):
        os.set_inheritable(descriptor, False)
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(pipe, 65536)
        if not data:
            os._exit(0)
        line += data
    settings = json.loads(line.decode())
    if not settings.get("is_shared"):
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if settings["has_own_group"]:
        os.setpgid(0, 0)
    preloader = Preloader(socket.socket(fileno=listener), settings, pipe)
    preloader.load()
    return preloader.serve()


if __name__ == "__main__":
    _error = None
    try:
        # Here, so that the script has one frame above its own. A variable would keep the script's namespace alive.
        exec(*main(int(sys.argv[1]), int(sys.argv[2])))  # noqa: S102
    except SystemExit:
        if "script" in _state:
            flush_streams()
        raise
    except BaseException as _found:
        if "child" not in _state:
            raise
        _error = _found
    if _error is not None:  # no exception is being handled when sys.excepthook is called
        print_uncaught(_error)
        if isinstance(_error, KeyboardInterrupt):
            _state.add("interrupted")
        sys.exit(1)
