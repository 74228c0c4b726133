"""Execute a notebook in a copy of TUTORIALS, as a reader would, and remove traces of this machine from its outputs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from tests.slurm.lab import SlurmLab

TUTORIALS = Path(__file__).parents[2] / "TUTORIALS"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
CELL_SECONDS = 300  # a whole notebook takes less than 180 s on two idle cores
HOME = "/home/you"
"""Replaces the directory of the execution in the outputs."""

_KEPT_METADATA = ("tags", "jupyter", "mystnb")
"""Metadata of cells that pages and JupyterLab use: what to fold, and the alternative text of a picture."""

_CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
_PACKAGES = re.compile(r"/[\w./-]+(?=/lib/python3)")
_ADDRESS_IN_MEMORY = re.compile(r" at 0x[0-9a-f]+")


class NotebookError(Exception):
    """A cell raised."""


def lay_out(directory: Path) -> Path:
    """Copy TUTORIALS into `directory`, with a virtual environment `tf` in the copy, and return the path of the copy."""
    copy = directory / "TUTORIALS"
    shutil.copytree(TUTORIALS, copy, ignore=shutil.ignore_patterns("runs", "__pycache__", ".ipynb_checkpoints"))
    activate = copy / "tf" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    return copy


def environment(directory: Path) -> dict[str, str]:
    """Return the variables that keep a notebook from reading or writing the settings of this user."""
    return {
        "HOME": str(directory),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(directory / ".config"),
        "XDG_STATE_HOME": str(directory / ".state"),
        "IPYTHONDIR": str(directory / ".ipython"),
        "JUPYTER_RUNTIME_DIR": str(directory / ".jupyter"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }


def runs_on_slurm(path: Path) -> bool:
    """Return whether a notebook itself uses Slurm, so that its kernel runs on the login host of a lab."""
    return path.name.startswith("13-")


class _Kernels(AsyncKernelManager):
    """Starts the kernel by `prefix`, the words before its command."""

    prefix: tuple[str, ...] = ()

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        return [*self.prefix, *super().format_kernel_cmd(extra_arguments)]


def execute(path: Path, directory: Path, lab: SlurmLab | None = None) -> Any:
    """Execute a notebook of `directory`/TUTORIALS from top to bottom in its own kernel, and return it with its outputs.

    `lab` has the login host on which the kernel runs. Without it, the kernel runs here.

    Raises:
        NotebookError: A cell raised; the text holds the output of all cells and the traceback.
        nbclient.exceptions.CellTimeoutError: A cell took longer than CELL_SECONDS.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as sockets:  # another process could take a TCP port before the kernel
        prefix, environ = ((), {}) if lab is None else lab.on_login_host()
        client = NotebookClient(
            notebook,
            kernel_manager_class=type("Kernels", (_Kernels,), {"prefix": prefix}),
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
        )
        try:
            client.execute(env={**os.environ, **environ, **environment(directory)})
        except CellExecutionError as error:
            raise NotebookError(f"{text_of(notebook)}\n{error}") from error
    return notebook


def text_of(notebook: Any) -> str:
    """Return all text in the outputs of an executed notebook."""
    texts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            # a busy kernel may send a line in two outputs of its stream
            texts.append(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n")
    return "".join(texts)


def console_blocks(notebook: Any) -> list[str]:
    """Return the text of each block marked `console`."""
    return [text for cell in notebook.cells if cell.cell_type == "markdown" for text in _CONSOLE.findall(cell.source)]


def replace_console_blocks(notebook: Any, replacement: Callable[[str], str]) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _CONSOLE.sub(lambda block: f"```console\n{replacement(block[1])}```", cell.source)


def digest(notebook: Any) -> str:
    """Return a hash of what is executed: the code, and the commands of the console blocks."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    lines = [line for block in console_blocks(notebook) for line in block.splitlines() if line.startswith("$ ")]
    return hashlib.sha256("\n".join([*code, *lines]).encode()).hexdigest()[:16]


def alternative_text(cell: Any) -> str:
    """Return the alternative text of the pictures of a cell."""
    return str(cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""))


def clean(notebook: Any, directory: Path, seconds: float) -> None:
    """Remove from the outputs what identifies this machine or changes with each execution.

    Cells with the tag `remove-stderr` lose their standard error, as on the pages: TensorFlow's import writes to it.
    Record what was executed, and in how many seconds.
    """
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {name: value for name, value in cell.metadata.items() if name in _KEPT_METADATA}
        for output in cell.get("outputs", ()):
            output.pop("metadata", None) if output["output_type"] == "stream" else output.update(metadata={})
            if "text" in output:
                output["text"] = clean_text(output["text"], directory)
            for kind, data in output.get("data", {}).items():
                if isinstance(data, str) and kind != "image/png":
                    output["data"][kind] = clean_text(data, directory)
        if cell.cell_type == "code":
            is_quiet = "remove-stderr" in cell.metadata.get("tags", ())
            kept = [output for output in cell["outputs"] if not (is_quiet and output.get("name") == "stderr")]
            cell["outputs"] = _joined(kept)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "tf4slurm": {"executed": digest(notebook), "seconds": round(seconds)},
    }


def clean_text(text: str, directory: Path) -> str:
    text = text.replace(str(directory), HOME).replace(str(Path(sys.executable).parent), f"{HOME}/tf/bin")
    text = text.replace(str(TUTORIALS.parent), f"{HOME}/tf4slurm")
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "pc", text)
    return _ADDRESS_IN_MEMORY.sub("", _PACKAGES.sub(f"{HOME}/tf", text))


def _joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs with adjacent pieces of the same stream joined, because their boundaries are random."""
    joined: list[Any] = []
    for output in outputs:
        if (
            joined
            and output["output_type"] == "stream" == joined[-1]["output_type"]
            and (output["name"] == joined[-1]["name"])
        ):
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined
