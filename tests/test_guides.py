"""README and the pages of docs/ that people read: their code blocks run in order, as one bash session for each page.

The comment above a block says what to do with it; without one a `bash` block runs, and other languages are not allowed:

    <!-- file: train.py -->         write the block to this file, which later commands use
    <!-- output -->                 the session prints these lines; "…" stands for any text
    <!-- any exit code -->          run the block, which may fail here, such as a check of the host
    <!-- drawing -->                do nothing
    <!-- not run: needs a GPU -->   the block cannot run in a test, for this reason

`<!-- session: lab -->` at the top of a page runs its session on the login host of the Slurm lab instead of this host.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*(page for name in ("start", "guides", "sites", "concepts") for page in (DOCS / name).glob("*.md"))])
PAGES += [DOCS / "administrators.md", ROOT / "README.md"]
QUICK = (
    "docs/administrators.md",
    *(f"docs/sites/{name}.md" for name in ("finisterrae", "leonardo", "lumi", "marenostrum5", "nersc")),
    "README.md",
)
"""The pages whose sessions `make test` runs; `make test-long` runs the others."""
NOT_RUN = 8
"""The number of blocks that no test runs. Raise it only for a block that needs something that a test cannot have."""
ANY_EXIT_CODE = "any exit code"
SECONDS = 900
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>[\w-]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One code block of a page, and the comment above it."""

    line: int
    language: str
    note: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start()) + 1, found["language"], found["note"] or "", found["text"])
        for found in BLOCK.finditer(text)
    ]


def session_of(page: Path) -> str:
    """Return the page's session as a script, which names the line of the block that fails."""
    parts = ["set -eE", f"trap 'echo \"{name_of(page)}, block at line $block_line: $BASH_COMMAND\" >&2' ERR"]
    for block in blocks_of(page):
        if block.note.startswith("file: "):
            path = block.note.removeprefix("file: ")
            parts.append(f"cat > {path} <<'END_OF_FILE'\n{block.text}END_OF_FILE")
        elif block.note == ANY_EXIT_CODE:
            parts.append(f"set +eE\n{block.text}set -eE")
        elif block.language == "bash" and not block.note:
            parts.append(f"block_line={block.line}\n{block.text}")
    return "\n".join(parts)


def expected_lines(page: Path) -> list[str]:
    return [line for block in blocks_of(page) if block.note == "output" for line in block.text.splitlines() if line]


def is_printed(expected: str, output: str) -> bool:
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in expected.split("…"))
    return any(re.search(pattern, " ".join(line.split())) for line in output.splitlines())


SESSIONS = [page for page in PAGES if any(block.language == "bash" and not block.note for block in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_runs_or_names_the_reason(page: Path) -> None:
    for block in blocks_of(page):
        known = block.note in ("output", "drawing", ANY_EXIT_CODE) or re.match(r"(file|not run): \S", block.note)
        assert known or (block.language == "bash" and not block.note), f"{name_of(page)}:{block.line}"


def test_number_of_blocks_that_do_not_run_is_known() -> None:
    not_run = [
        f"{name_of(page)}:{block.line} {block.note}"
        for page in PAGES
        for block in blocks_of(page)
        if block.note.startswith("not run")
    ]
    assert len(not_run) == NOT_RUN, "\n".join(not_run)


@pytest.mark.keras
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[] if name_of(page) in QUICK else [pytest.mark.long])
        for page in SESSIONS
    ],
)
def test_session_of_page_succeeds(tmp_path: Path, request: pytest.FixtureRequest, page: Path) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("pip install tensorflow-cpu, or tf4slurm[cpu]")
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "TUTORIALS").symlink_to(ROOT / "TUTORIALS")
    script = tmp_path / "session.sh"
    script.write_text(session_of(page))
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = ("bash", str(script))
    if "<!-- session: lab -->" in page.read_text(encoding="utf-8"):
        lab: SlurmLab = request.getfixturevalue("lab")
        done = lab.run(*command, timeout_seconds=SECONDS, env=environ, cwd=directory, check=False)
    else:
        done = run_here(command, directory, environ)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    missing = [line for line in expected_lines(page) if not is_printed(line, output)]
    assert not missing, f"{missing} not in:\n{output}"


def run_here(command: tuple[str, ...], directory: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
