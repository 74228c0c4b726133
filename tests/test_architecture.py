"""The promises of ARCHITECTURE.md that a machine can keep: floors, light imports, one reader of the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf4slurm
import tf4slurm.tensorflow

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tf4slurm"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

FLOORS = [
    ["errors", "roles", "output", "exec_child", "background"],
    ["cluster", "child", "guard", "input", "last_lines", "last_word", "program", "trust"],
    ["network", "placeholders", "placement", "profiles", "run_directory", "own_dictionary"],
    ["slurm"],
    ["control"],
    ["join", "loss", "script", "silence", "usage"],
    ["line"],
    ["agent", "agreement", "companion", "observe", "reports"],
    ["server_dictionary"],
    ["launch", "tensorflow", "ServerDictionary"],
    ["doctor"],
    ["cli", "shutdown", "DistributedTFQueueHook"],
    ["__main__", "job"],
]
"""A file imports from lower floors only."""

INSIDE = {
    "network": [
        ["answer", "interfaces", "isolation", "ports", "proof", "proxies", "traffic"],
    ],
    "slurm": [
        ["job", "layout", "nodelist", "queue", "slurmstepd"],
        ["variables", "grant", "site"],
        ["allocation", "step"],
        ["batch", "commands", "gpus"],
    ],
    "control": [
        ["credentials", "limits", "messages", "munge", "verdict"],
        ["record"],
        ["barriers"],
        ["state"],
        ["access"],
        ["client", "service"],
    ],
    "observe": [["environment", "events", "idle", "logs", "recorder", "registry"], ["status"]],
    "reports": [
        ["quantities", "drawing", "timeline", "curves"],
        ["needs", "lifelines", "chart"],
        ["advice"],
        ["story"],
        ["gallery"],
        ["report", "picture"],
        ["file", "web"],
    ],
    "launch": [
        ["plan", "requeue", "spawner"],
        ["submission", "spawn_local", "spawn_srun", "launcher"],
        ["request"],
        ["script", "snapshot", "self_hosted"],
        ["submit"],
    ],
    "tensorflow": [
        ["serving"],
        [
            *("checkpoints", "data_service", "evaluator", "files", "forming", "keras_limits"),
            *("leaving", "ledger", "resolver", "queues", "paths", "seat", "smoke"),
        ],
        ["local_cluster"],
        ["done", "mirrored", "muster", "steps", "strategy"],
        ["hooks"],
    ],
    "shutdown": [["method"], ["barrier", "queues"], ["choice"], ["ps", "worker"]],
    "doctor": [
        ["finding", "plain_smoke", "wire"],
        ["directory", "host", "reach", "scheduler", "software", "text"],
        ["here"],
        ["node"],
        ["nodes"],
    ],
    "cli": [
        ["jobs", "main", "options", "reporter", "recorded"],
        ["submission_options"],
        ["settings"],
        [
            *("cancel", "completion", "config", "doctor", "env", "list", "logs", "nodes", "report", "resume"),
            *("run", "script", "status", "submit", "task", "tensorboard", "wait"),
        ],
        ["test"],
    ],
}
"""The same inside each folder."""

USERS_OF_TENSORFLOW = {"shutdown.queues", "DistributedTFQueueHook"}
"""Those that import it through the room tensorflow."""

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
)


def floor_of(name: str, floors: list[list[str]]) -> int:
    return next(number for number, floor in enumerate(floors) if name in floor)


def imports_of(module: str) -> set[str]:
    """Return the modules of tf4slurm that a file imports anywhere, as "control.state"."""
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    inside = {name.removeprefix("tf4slurm.") for name in found if name.startswith("tf4slurm.")}
    return {match for name in inside for match in MODULES if name == match or name.startswith(match + ".")}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_from_lower_floors_only(module: str) -> None:
    room, _, file = module.partition(".")
    for imported in imports_of(module):
        other_room, _, other_file = imported.partition(".")
        if other_room == room:
            assert floor_of(other_file, INSIDE[room]) < floor_of(file, INSIDE[room]), f"{module} imports {imported}"
        else:
            assert floor_of(other_room, FLOORS) < floor_of(room, FLOORS), f"{module} imports {imported}"


def test_the_import_check_sees_imports() -> None:
    assert {"agent", "join"} <= imports_of("launch.self_hosted")
    assert "control.state" in imports_of("control.service")


@pytest.mark.parametrize("module", MODULES)
def test_the_page_names_every_file(module: str) -> None:
    assert f"`{module.rpartition('.')[2]}.py`" in PAGE


def test_the_page_names_no_file_that_is_not_there() -> None:
    files = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert set(re.findall(r"`(\w+\.py)`", PAGE)) <= files


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("slurm.")])
def test_only_the_room_slurm_reads_its_variables(module: str) -> None:
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text for text in texts if re.fullmatch(r"SLURMD?_[A-Z_]+", text)}
    named_in_errors = {"cli.run": {"SLURM_STEP_NUM_TASKS", "SLURM_HET_SIZE"}, "cli.doctor": {"SLURM_JOB_ID"}}
    assert names <= named_in_errors.get(module, set())


def imported_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_star_import_loads_no_tensorflow() -> None:
    assert "tensorflow" not in imported_by("from tf4slurm import *; get_server_dictionary")


def test_importing_the_package_is_light() -> None:
    loaded = imported_by("import tf4slurm")
    assert not loaded & {"tensorflow", "grpc", "asyncio", "click", "rich", "psutil"}


def test_importing_the_room_shutdown_is_light() -> None:
    loaded = imported_by("import tf4slurm; tf4slurm.shutdown.wait_for_workers; from tf4slurm import shutdown")
    assert "tf4slurm.shutdown.ps" in loaded
    assert not loaded & {"tensorflow", "grpc", "asyncio"}


def test_an_agent_never_loads_tensorflow_and_no_terminal_library() -> None:
    loaded = imported_by("import tf4slurm.agent, tf4slurm.cli.task")
    assert not loaded & {"tensorflow", "rich", "psutil", "tf4slurm.launch.launcher"}
    assert not imported_by("import tf4slurm.agent") & {"click", "cryptography"}


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("tensorflow.")])
def test_only_the_room_tensorflow_imports_it(module: str) -> None:
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    room = "tf4slurm.tensorflow" if module in USERS_OF_TENSORFLOW else "tf4slurm"
    assert not any("tensorflow" in ast.unparse(node).replace(room, "") for node in imports)


def test_writing_a_batch_script_is_light() -> None:
    assert not imported_by("import tf4slurm.cli.submit, tf4slurm.cli.script") & {
        "tensorflow",
        "grpc",
        "asyncio",
        "rich",
    }


def test_the_public_list_is_what_there_is() -> None:
    assert set(tf4slurm._LAZY) <= set(dir(tf4slurm))
    loads_tensorflow = {name for name, module in tf4slurm._LAZY.items() if "tensorflow" in module.split(".")}
    assert set(tf4slurm.__all__) == {"__version__", *tf4slurm._LAZY, *tf4slurm._ROOMS} - loads_tensorflow
    for name, module in tf4slurm._LAZY.items():
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    with pytest.raises(AttributeError, match="'tf4slurm' has no attribute 'get_nothing'"):
        _ = tf4slurm.get_nothing


def test_the_public_list_of_the_room_tensorflow_is_what_there_is() -> None:
    for name, module in tf4slurm.tensorflow._LAZY.items():
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    with pytest.raises(AttributeError, match=r"'tf4slurm\.tensorflow' has no attribute 'get_nothing'"):
        _ = tf4slurm.tensorflow.get_nothing
    assert "tensorflow" not in imported_by("import tf4slurm.tensorflow")


def test_the_version_is_one() -> None:
    assert re.search(rf"^## {re.escape(tf4slurm.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
