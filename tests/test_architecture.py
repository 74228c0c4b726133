"""The rules of ARCHITECTURE.md: layers, imports that load few modules, one reader of Slurm's variables."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tf4slurm
import tf4slurm.tensorflow

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tf4slurm"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

ROWS = re.findall(r"^\| (`[^|]*`) \|", PAGE, re.MULTILINE)
LAYERS = [[name.rstrip("/") for name in re.findall(r"`([^`]+)`", row)] for row in ROWS]
"""Packages and modules, as the table of ARCHITECTURE.md has them: each imports from earlier rows, or its own row."""

USERS_OF_TENSORFLOW = {"shutdown", "DistributedTFQueueHook", "clusters.base", "clusters.launcher_process"}
"""Those that import it through the package tensorflow."""

OLD_HOOKS = "script_client.old_python.tf4slurm.DistributedTFQueueHook"
"""Imports TensorFlow itself: it runs with a Python that lacks the package tensorflow."""

PRELOADED = {path.stem for path in (PACKAGE / "preload").glob("*.py")}

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
)


def imports_of(module: str) -> set[str]:
    """Return the modules of tf4slurm that a file imports anywhere, as "control.state"."""
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.partition(".")[0]
            # The files of the preloader run with a Python that may have another tf4slurm, or none.
            assert node.level == (package == "preload" and node.module in PRELOADED), f"{module}: imports are absolute"
            assert node.module is not None
            name = f"tf4slurm.{package}.{node.module}" if node.level else node.module
            found.update(f"{name}.{alias.name}" for alias in node.names)
    inside = {name.removeprefix("tf4slurm.") for name in found if name.startswith("tf4slurm.")}
    return {match for name in inside for match in MODULES if name == match or name.startswith(match + ".")}


def test_every_package_is_in_the_table_once() -> None:
    names = [name for row in LAYERS for name in row]
    assert sorted(names) == sorted({module.partition(".")[0] for module in MODULES})


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_from_earlier_rows_of_the_table(module: str) -> None:
    layers = {name: number for number, row in enumerate(LAYERS) for name in row}
    package = module.partition(".")[0]
    for imported in imports_of(module):
        other = imported.partition(".")[0]
        assert layers[other] <= layers[package], f"{module} imports {imported}"


def test_no_import_cycle() -> None:
    graphlib.TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()


def test_import_check_finds_imports() -> None:
    assert {"control.state", "jobs.run_directory"} <= imports_of("launch.hosting")
    assert "control.state" in imports_of("control.service")


def test_page_names_existing_files_only() -> None:
    files = {path.name for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).parts[0].startswith(".")}
    assert set(re.findall(r"`(\w+\.py)`", PAGE)) <= files


def test_table_of_changes_names_existing_files_only() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| change |")[2].partition("\n## ")[0]
    paths = re.findall(r"`(\w+(?:/\w+)*(?:/|\.py|\.html))`", table)
    assert len(paths) > 50
    assert [path for path in paths if not any((parent / path).exists() for parent in (PACKAGE, ROOT / "tests"))] == []


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("slurm.")])
def test_only_package_slurm_reads_slurm_variables(module: str) -> None:
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text for text in texts if re.fullmatch(r"SLURMD?_[A-Z_]+", text)}
    named_in_errors = {"launch.start": {"SLURM_STEP_NUM_TASKS", "SLURM_HET_SIZE"}, "doctor.nodes": {"SLURM_JOB_ID"}}
    passed_on = {"submission.submit": {"SLURM_CLUSTERS", "SLURM_CONF", "SLURM_JWT"}}
    assert names <= {**named_in_errors, **passed_on}.get(module, set())


def imported_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_star_import_loads_no_tensorflow() -> None:
    assert "tensorflow" not in imported_by("from tf4slurm import *; get_server_dictionary")


def test_importing_the_package_loads_few_modules() -> None:
    loaded = imported_by("import tf4slurm")
    assert not loaded & {"tensorflow", "grpc", "asyncio", "click", "rich", "psutil", "jinja2"}


def test_importing_shutdown_loads_few_modules() -> None:
    loaded = imported_by("import tf4slurm; tf4slurm.shutdown.wait_for_workers; from tf4slurm import shutdown")
    assert "tf4slurm.shutdown" in loaded
    assert not loaded & {"tensorflow", "grpc", "asyncio"}


def test_agent_loads_neither_tensorflow_nor_a_terminal_library() -> None:
    loaded = imported_by("import tf4slurm.agent.agent, tf4slurm.cli.run")
    assert not loaded & {"tensorflow", "rich", "psutil", "jinja2", "tf4slurm.launch.launcher"}
    assert not imported_by("import tf4slurm.agent.agent") & {"click", "cryptography"}


@pytest.mark.parametrize(
    "module", [module for module in MODULES if not module.startswith("tensorflow.") and module != OLD_HOOKS]
)
def test_only_package_tensorflow_imports_tensorflow(module: str) -> None:
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    allowed = "tf4slurm.tensorflow" if module in USERS_OF_TENSORFLOW else "tf4slurm"
    assert not any("tensorflow" in ast.unparse(node).replace(allowed, "") for node in imports)


def test_importing_the_options_of_a_job_loads_few_modules() -> None:
    loaded = imported_by("import tf4slurm.spec.job_spec, tf4slurm.spec.batch_spec, tf4slurm.spec.settings")
    assert not loaded & {"asyncio", "click", "grpc", "rich", "tensorflow"}


def test_importing_job_loads_few_modules() -> None:
    assert not imported_by("from tf4slurm import Job") & {"asyncio", "click", "grpc", "rich", "ssl", "tensorflow"}


def test_writing_a_batch_script_loads_few_modules() -> None:
    assert not imported_by("import tf4slurm.cli.submit") & {
        "tensorflow",
        "grpc",
        "asyncio",
        "rich",
    }


@pytest.mark.parametrize("package", [tf4slurm, tf4slurm.tensorflow], ids=["tf4slurm", "tensorflow"])
def test_public_names_exist(package: types.ModuleType) -> None:
    path = Path(str(package.__file__))
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: str(node.module) for node in imports for alias in node.names}
    others = ("tf4slurm", "tf4slurm.tensorflow.versions", "typing")
    lazy = {name: module for name, module in typed.items() if module not in others}
    assert lazy == package._MODULE_OF
    assert lazy.keys() <= {*dir(package), "SlurmClusterResolver"}
    for name, module in lazy.items():
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert not (path.parent / f"{name}.py").exists()  # importing such a module would hide the name
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'get_nothing'"):
        _ = package.get_nothing


def test_star_import_gives_the_public_names_but_the_resolver() -> None:
    names = {"__version__", *tf4slurm._MODULES, *tf4slurm._MODULE_OF} - {"SlurmClusterResolver"}
    assert set(tf4slurm.__all__) == names <= set(dir(tf4slurm))
    assert "tensorflow" not in imported_by("import tf4slurm.tensorflow")


def test_version_is_the_same_everywhere() -> None:
    assert re.search(rf"^## {re.escape(tf4slurm.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_first_line_of_a_docstring_has_one_fact(module: str) -> None:
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    assert [text for text in texts if ";" in re.sub(r"`[^`]*`|\"[^\"]*\"", "", text.partition("\n")[0])] == []
