"""The child: a fork of a keeper that becomes what the execution of its command would have made."""

from __future__ import annotations

import builtins
import ctypes
import importlib.machinery
import mmap
import os
import signal
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .environ import apply_changes, compared, find_differing, name_some
from .keeper import Keeper, prctl
from .messages import read_proc
from .replay import Group

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_EXIT_KILLED = 137
_EXIT_CANNOT_RUN = 126
_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGXCPU", "SIGVTALRM", "SIGPROF")
IGNORED_SIGNALS = tuple(
    getattr(signal, name) for name in (*_NAMES, "SIGIO", "SIGPWR", "SIGSTKFLT") if hasattr(signal, name)
)
"""Signals that a preloader and its keepers ignore. Slurm may send them to every process of a job."""

if TYPE_CHECKING:
    Code = tuple[types.CodeType, dict[str, Any]]
    """What a child runs, and the namespace in which it runs."""


class Child:
    """Sets what a process inherits by exec, then what Python sets at its start."""

    def __init__(self, keeper: Keeper, request: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self._request = request
        self._note = keeper.note
        self._groups = groups
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper.process_id:
            os._exit(_EXIT_KILLED)
        os.setpgid(0, 0)

    def set_process_up(self, output: int) -> None:
        """Set what a process inherits. `output` becomes its standard output and error."""
        request = self._request
        ignored = request["ignored_signals"]
        for number in IGNORED_SIGNALS:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in ignored else default)
        for number in {*ignored} - {*IGNORED_SIGNALS}:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.umask(request["umask"])
        os.sched_setaffinity(0, request["affinity"])
        os.chdir(request["directory"])
        _show_command(request["command"], request["environ"])
        signal.pthread_sigmask(signal.SIG_SETMASK, request["signal_mask"])

    def set_python_up(self, path: Sequence[str], changes: Mapping[str, str | None]) -> None:
        """Set what Python sets at its start.

        Args:
            path: sys.path.
            changes: The changes that Python makes to the environment variables.
        """
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(self._request["environ"])
        apply_changes(changes)
        time.tzset()
        if hasattr(sys, "orig_argv"):
            sys.orig_argv[:] = self._request["command"]
        before = sys.modules["__main__"]
        main: Any = types.ModuleType("__main__")
        main.__builtins__ = builtins
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        for modules in (sys.modules, *(group.modules for group in self._groups)):
            for name in [name for name, module in modules.items() if module is before]:
                modules[name] = main  # multiprocessing has another name for it
        processes = self._find("multiprocessing.process")
        if processes is not None:
            processes.ORIGINAL_DIR = os.getcwd()
            processes.current_process().authkey = os.urandom(32)
        if self._groups:
            sys.meta_path.insert(0, _Finder(self._groups, self._execute))

    def _find(self, name: str) -> Any:
        found = (group.modules.get(name) for group in self._groups)
        return sys.modules.get(name) or next(filter(None, found), None)

    def make_code(self, own_file: str) -> Code:
        """Return what the child runs. `own_file` is the name of the file for frames that no traceback shows."""
        main: Any = sys.modules["__main__"]
        module, script = self._request["module"], self._request["script"]
        if module is not None:
            sys.argv[:] = ["-m", *self._request["arguments"]]
            main.__loader__ = importlib.machinery.BuiltinImporter
            code = compile(f"import runpy\nrunpy._run_module_as_main({module!r})", own_file, "exec")
            return code, {"__name__": "runpy", "__builtins__": builtins}
        sys.argv[:] = [script, *self._request["arguments"]]
        path = script if os.path.isabs(script) else os.path.join(os.getcwd(), script)
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        if sys.version_info < (3, 15):
            main.__cached__ = None
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True), vars(main)

    def _execute(self, reason: str) -> None:
        """Execute the command in place of this process. Only harmless statements of the script have run."""
        note = reason.encode(errors="replace")[: mmap.PAGESIZE]
        self._note[: len(note)] = note
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        command = self._request["command"]
        try:
            os.execvpe(command[0], command, self._request["environ"])
        except OSError as error:
            sys.stderr.write(f"tf4slurm: the program {command[0]!r} cannot be run: {error}.\n")
            os._exit(_EXIT_CANNOT_RUN)


class _Finder:
    """Hides the preloaded modules until the script imports one of them. An entry of sys.meta_path.

    The modules of earlier groups appear with those of a group.
    """

    def __init__(self, groups: Sequence[Group], execute: Callable[[str], None]) -> None:
        self._groups = list(groups)
        self._execute = execute
        for group in groups:
            for name in group.modules:
                sys.modules.pop(name, None)
        warnings.filters[:] = [  # type: ignore[index]
            each for each in warnings.filters if not any(each in group.filters for group in groups)
        ]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Show a hidden module. Return None if there is none with this name."""
        number = next((n for n, group in enumerate(self._groups) if name in group.modules), None)
        if number is None:
            return None
        self._check(self._groups[number])
        shown, self._groups = self._groups[: number + 1], self._groups[number + 1 :]
        if not self._groups:
            sys.meta_path.remove(self)
        for group in shown:
            _show(group)
        module = sys.modules.pop(name)  # the import machinery adds it again
        return importlib.machinery.ModuleSpec(name, _Loader(module), is_package=hasattr(module, "__path__"))  # type: ignore[arg-type]

    def _check(self, group: Group) -> None:
        """Execute the command if the import would have another result than in the preloader."""
        names = find_differing(compared(os.environ), compared(group.environ))
        if names:
            self._execute(f"it changes {name_some(names)} before it imports TensorFlow")
        if sys.path != group.path:
            self._execute("it changes sys.path before it imports TensorFlow")


def _show(group: Group) -> None:
    sys.modules.update(group.modules)
    sys.path[:] = group.path_after
    apply_changes(group.changes)
    warnings.filters[:0] = group.filters  # type: ignore[index]
    getattr(warnings, "_filters_mutated", getattr(warnings, "_filters_mutated_lock_held", int))()
    if group.output:
        os.write(2, group.output)
    if "numpy.random" in group.modules:
        group.modules["numpy.random"].seed()  # its global generator would be the same in all children


class _Loader:
    """Loads a module that exists."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._spec = getattr(module, "__spec__", None)

    def create_module(self, spec: Any) -> Any:
        return self._module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._spec


_shown: list[Any] = []  # the memory that _show_command has filled


def _show_command(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let ps, top and pgrep show a command and its environment variables for this process.

    On a kernel that does not allow this they show those of the preloader.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    buffer = ctypes.create_string_buffer(words + variables, len(words) + len(variables))
    fields = [int(each) for each in read_proc("stat").rpartition(")")[2].split()[1:]]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    start = ctypes.addressof(buffer)
    middle, end = start + len(words), start + len(words) + len(variables)
    # struct prctl_mm_map of linux/prctl.h, most of it as it is
    addresses = (*fields[22:24], *fields[41:44], libc.sbrk(0), fields[24], start, middle, middle, end)
    layout = struct.pack("=11QQIi", *addresses, 0, 0, -1)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0)
    _shown.append(buffer)
