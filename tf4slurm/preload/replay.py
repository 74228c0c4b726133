"""The replay of the beginning of a script: its imports of installed packages, and harmless statements between them.

A statement is harmless if it has no effect outside of the process, so that it may be executed again. The replay reads
the user's own modules, and never imports them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from .environ import find_changes
from .output import flush_output, read_output

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_EFFECTS = (ast.Await, ast.Yield, ast.YieldFrom, getattr(ast, "NamedExpr", ast.Await))
_STANDARD_PATHS = tuple(os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("stdlib", "platstdlib"))
_HARMLESS_BUILTINS = (
    *(bool, int, float, str, bytes, len, list, tuple, dict, set, frozenset, range, min, max, sum, sorted),
    *(repr, abs, round, isinstance, hasattr, getattr, zip, enumerate, os.getenv, os.getcwd, os.getpid),
    *(property, staticmethod, classmethod),
)
_HARMLESS_MODULES = (
    *("posixpath", "genericpath", "warnings", "logging", "json", "json.decoder", "json.encoder", "re"),
    *("pathlib", "pathlib._local", "pathlib._abc"),
    *("collections", "typing", "dataclasses", "enum", "functools", "datetime", "time", "contextlib", "abc"),
)
_HARMLESS_METHODS = ("resolve", "absolute", "joinpath", "with_suffix", "as_posix", "expanduser", "exists")  # of paths
# These count as installed, also in a checkout of the sources.
_OWN_NAMES = ("tf4slurm", "tf4slurm_client", "tf4slurm_channel", "tf4slurm_sidecar")
_NO_IMPORT = "is not an import"


class Refusal(Exception):  # noqa: N818 - it is no failure
    """Why no child can be forked. Its agent then executes the command. The text is a clause."""


class Stop(Exception):  # noqa: N818 - it is no failure
    """Why a statement is not replayed. The text is a clause."""


class Group:
    """What one import statement has loaded.

    Attributes:
        modules: The loaded modules by name.
        environ: The environment variables before the import.
        path: sys.path before the import.
        path_after: sys.path after the import.
        changes: The environment variables that the import has changed.
        filters: The filters of warnings that the import has added.
        output: What the import has printed.
    """

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self._modules_before = set(sys.modules)
        self._filters_before = list(warnings.filters)
        self._output_start = flush_output()
        self.modules: dict[str, Any] = {}

    def finish(self) -> None:
        """Note what the import has changed."""
        self.modules = {name: sys.modules[name] for name in set(sys.modules) - self._modules_before}
        self.path_after = list(sys.path)
        self.changes = find_changes(self.environ, os.environ)
        self.filters = [each for each in warnings.filters if each not in self._filters_before]
        self.output = read_output(self._output_start)


class Replay:
    """Replays a script up to the first statement that may have an effect outside of its process.

    Attributes:
        groups: What the imports of installed packages have loaded, in their order.
        sources: The content of each file that was read, by path.
        stopped: Why the replay has stopped, as a clause, or "".
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.sources: dict[str, bytes] = {}
        self.stopped = ""
        self._own_modules: set[str] = set()

    def run(self, path: str) -> None:
        """Replay the script at `path`.

        Raises:
            Refusal: An installed package imports a file of the user.
        """
        try:
            self._run_file(path, "__main__", "")
        except ImportError as error:
            self.stopped = f"an import fails ({error})"
        except Stop as stop:
            self.stopped = str(stop)

    def _run_file(self, path: str, name: str, package: str) -> None:
        try:
            with open(path, "rb") as file:
                self.sources[path] = source = file.read()
            tree = ast.parse(source, path)
        except (OSError, ValueError, SyntaxError) as error:
            raise Stop(f"{os.path.basename(path)} cannot be read ({error})") from None
        frame = _Frame(path, name, package)
        for node in tree.body:
            _check(node, frame)
            self._run(node, frame)

    def _run(self, node: ast.stmt, frame: _Frame) -> None:
        """Execute a statement that `_check` has allowed. Definitions are not executed: nothing may call them."""
        frame.line = node.lineno
        if isinstance(node, ast.Import):
            is_own = [self._import(alias.name, (), frame) for alias in node.names]
            if not any(is_own):  # names of the user's modules are not bound
                frame.execute(node)
        elif isinstance(node, ast.ImportFrom):
            name = frame.absolute_name(node)
            if not self._import(name, [alias.name for alias in node.names], frame):
                frame.execute(node)
        elif isinstance(node, ast.If):
            for each in node.body if frame.evaluate(node.test) else node.orelse:
                self._run(each, frame)
        elif isinstance(node, ast.Try):
            self._run_try(node, frame)
        elif not isinstance(node, _DEFINITIONS):
            frame.execute(node)

    def _run_try(self, node: ast.Try, frame: _Frame) -> None:
        try:
            for each in node.body:
                self._run(each, frame)
        except ImportError as error:
            for handler in node.handlers:
                if handler.type is None or isinstance(error, frame.evaluate(handler.type)):
                    for each in handler.body:
                        self._run(each, frame)
                    return
            raise
        for each in node.orelse:
            self._run(each, frame)

    def _import(self, name: str, attributes: Sequence[str], frame: _Frame) -> bool:
        """Import a module, or replay it if it is the user's own. Return whether it is."""
        place, spec = find_top_level(name.partition(".")[0])
        if place == "own":
            self._run_own(name, attributes, spec, frame)
        elif place == "installed" and name not in sys.modules:
            self._load(name, frame)
        return place == "own"

    def _load(self, name: str, frame: _Frame) -> None:
        group = Group()
        self.groups.append(group)
        try:
            importlib.import_module(name)
        except ImportError:
            raise
        except BaseException as error:
            raise Stop(frame.describe(f"fails ({type(error).__name__})")) from None
        finally:
            group.finish()
        for module, each in group.modules.items():
            if each is sys.modules["__main__"]:
                continue
            path = getattr(each, "__file__", None)
            if isinstance(path, str) and find_place(path) == "own" and module.partition(".")[0] not in _OWN_NAMES:
                raise Refusal(f"{name} imports the user's file {path}")

    def _run_own(
        self, name: str, attributes: Sequence[str], spec: importlib.machinery.ModuleSpec | None, frame: _Frame
    ) -> None:
        parts = name.split(".")
        path: Any = None
        for number in range(len(parts)):
            module = ".".join(parts[: number + 1])
            if number:
                spec = importlib.machinery.PathFinder.find_spec(module, path)
            if spec is None:
                raise Stop(frame.describe("imports a module that does not exist"))
            path = spec.submodule_search_locations
            self._run_module(module, spec, frame)
        for attribute in attributes if path is not None else ():
            inner = importlib.machinery.PathFinder.find_spec(f"{name}.{attribute}", path)
            if inner is not None:
                self._run_module(f"{name}.{attribute}", inner, frame)

    def _run_module(self, name: str, spec: importlib.machinery.ModuleSpec, frame: _Frame) -> None:
        if name in self._own_modules or spec.origin in (None, "namespace"):
            return
        self._own_modules.add(name)
        assert spec.origin is not None
        if not spec.origin.endswith(".py"):
            raise Stop(frame.describe(f"imports the user's module {name}, which has no source"))
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        self._run_file(spec.origin, name, package)


class _Frame:
    """The state of the replay of one file: its namespace, and the line of the statement that is replayed."""

    def __init__(self, path: str, name: str, package: str) -> None:
        self.line = 0
        self._path = path
        self._package = package
        self._namespace = {"__name__": name, "__file__": path, "__package__": package}

    def describe(self, what: str) -> str:
        return f"line {self.line} of {os.path.basename(self._path)} {what}"

    def absolute_name(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self._package.rsplit(".", node.level - 1)[0] if node.level > 1 else self._package
        return ".".join(filter(None, (package, node.module)))

    def evaluate(self, node: ast.expr) -> Any:
        """Evaluate an expression that `_check_values` has allowed. Raise Stop if that fails."""
        try:
            return self._evaluate(node)
        except Exception as error:
            raise Stop(self.describe(f"cannot be evaluated ({type(error).__name__})")) from None

    def _evaluate(self, node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), self._path, "eval"), self._namespace)  # noqa: S307

    def execute(self, node: ast.stmt) -> None:
        """Execute a statement that `_check` has allowed. Raise ImportError, or Stop if it fails otherwise."""
        if isinstance(node, ast.Expr) and self._opens_files(node.value):
            return
        try:
            module = ast.parse("")
            module.body.append(node)
            exec(compile(module, self._path, "exec"), self._namespace)  # noqa: S102
        except ImportError:
            raise
        except Exception as error:
            raise Stop(self.describe(f"cannot be evaluated ({type(error).__name__})")) from None

    def _opens_files(self, node: ast.expr) -> bool:
        """Return whether an allowed call may open a file (logging.basicConfig), so that only the child makes it."""
        return isinstance(node, ast.Call) and getattr(self._find(node.func), "__module__", "") == "logging"

    def _find(self, node: ast.expr) -> Any:
        """Return the value of an expression, or None if it has none here."""
        try:
            return self._evaluate(node)
        except Exception:
            return None

    def is_environ(self, node: ast.expr) -> bool:
        return self._find(node) is os.environ

    def is_standard_class(self, node: ast.expr) -> bool:
        module = getattr(self._find(node), "__module__", None)
        return isinstance(module, str) and find_top_level(module.partition(".")[0])[0] == "standard"

    def is_harmless(self, node: ast.expr) -> bool:
        """Return whether a call of the function has no effect outside of the process."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        if any(isinstance(each, ast.Call) and not self.is_harmless(each.func) for each in ast.walk(node)):
            return False
        function = self._find(node)
        owner = getattr(function, "__self__", None)
        if owner is os.environ or isinstance(owner, (str, bytes, dict, list, tuple, set, int)):
            return True
        if isinstance(owner, os.PathLike):
            return getattr(function, "__name__", "") in _HARMLESS_METHODS
        return function in _HARMLESS_BUILTINS or getattr(function, "__module__", None) in _HARMLESS_MODULES


def _check(node: ast.stmt, frame: _Frame) -> None:
    """Raise Stop if the statement may have an effect outside of the process, or is of an unknown kind."""
    frame.line = node.lineno
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        _check_values([*node.args.defaults, *filter(None, node.args.kw_defaults)], frame)
        _check_decorators(node.decorator_list, frame)
    elif isinstance(node, ast.ClassDef):
        _check_class(node, frame)
    elif isinstance(node, ast.Expr):
        _check_values([node.value], frame)
    elif isinstance(node, (ast.Assign, ast.Delete)):
        _check_targets(node.targets, frame)
        _check_values([node.value] if isinstance(node, ast.Assign) else [], frame)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        _check_targets([node.target], frame)
        _check_values(filter(None, [node.value]), frame)
    elif isinstance(node, ast.If):
        _check_values([node.test], frame)
        if {"environ", "getenv"} & {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node.test)}:
            raise Stop(frame.describe("depends on the environment"))
        for each in node.body + node.orelse:
            _check(each, frame)
    elif isinstance(node, ast.Try) and not node.finalbody:
        for each in [*node.body, *(each for handler in node.handlers for each in handler.body), *node.orelse]:
            _check(each, frame)
    else:
        raise Stop(frame.describe(_NO_IMPORT))


def _check_class(node: ast.ClassDef, frame: _Frame) -> None:
    bases = [*node.bases, *(each.value for each in node.keywords)]
    _check_values(bases, frame)
    _check_decorators(node.decorator_list, frame)
    if not all(map(frame.is_standard_class, bases)):
        raise Stop(frame.describe("has a base class that is not one of Python"))
    for each in node.body:
        _check(each, frame)


def _check_targets(targets: Iterable[ast.expr], frame: _Frame) -> None:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            _check_targets(target.elts, frame)
        elif isinstance(target, ast.Subscript) and frame.is_environ(target.value):
            _check_values([target.slice], frame)
        elif not isinstance(target, ast.Name):
            raise Stop(frame.describe(_NO_IMPORT))


def _check_decorators(nodes: Iterable[ast.expr], frame: _Frame) -> None:
    for node in nodes:
        _check_values([node], frame)
        if not frame.is_harmless(node.func if isinstance(node, ast.Call) else node):
            raise Stop(frame.describe("has a decorator that is not one of Python"))


def _check_values(nodes: Iterable[ast.expr], frame: _Frame) -> None:
    """Raise Stop if the evaluation of an expression may have an effect outside of the process."""
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and not frame.is_harmless(each.func):
                raise Stop(frame.describe("calls a function"))
            if isinstance(each, _EFFECTS):
                raise Stop(frame.describe(_NO_IMPORT))
            if isinstance(each, ast.Attribute) and each.attr == "argv":
                raise Stop(frame.describe("depends on the arguments"))


def find_top_level(name: str) -> tuple[str, importlib.machinery.ModuleSpec | None]:
    """Return where a top-level module is, "standard", "installed" or "own", and its spec.

    A module that does not exist counts as installed. Its import fails.
    """
    if name in sys.builtin_module_names:
        return "standard", None
    spec = importlib.machinery.FrozenImporter.find_spec(name) or importlib.machinery.PathFinder.find_spec(name)
    if spec is None:
        return "installed", None
    if spec.origin in ("built-in", "frozen"):
        return "standard", spec
    is_namespace = spec.origin in (None, "namespace")
    places = list(spec.submodule_search_locations or ()) if is_namespace else [str(spec.origin)]
    return (find_place(places[0]) if places and name not in _OWN_NAMES else "installed"), spec


def find_place(path: str) -> str:
    """Return "installed", "standard" or "own" for the path of a module."""
    parts = os.path.abspath(path).split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return "installed"
    return "standard" if os.path.realpath(path).startswith(_STANDARD_PATHS) else "own"
