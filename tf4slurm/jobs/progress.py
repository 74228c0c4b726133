"""Show the progress of a job, and notices, on the terminal or in a notebook."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator

_LINE_SECONDS = 5.0


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text, the progress of a job, on the terminal or in the notebook."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console()
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        with contextlib.closing(_Lines()) as lines:
            yield lines.show
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("")
        yield lambda text: progress.update(bar, description=text)


def print_notice(text: str) -> None:
    """Print a sentence on standard error for a user of the library, who sees no log messages."""
    print(f"tf4slurm: {text}", file=sys.stderr, flush=True)


class _Lines:
    """Shows the progress of a job as lines: prints a changed text at most every 5 s, and the last one by `close`."""

    def __init__(self) -> None:
        self._shown = self._latest = ""
        self._next_at = 0.0

    def show(self, text: str) -> None:
        self._latest = text
        if time.monotonic() >= self._next_at:
            self.close()

    def close(self) -> None:
        if self._latest != self._shown:
            print(self._latest, flush=True)
            self._shown, self._next_at = self._latest, time.monotonic() + _LINE_SECONDS
