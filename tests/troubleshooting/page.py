"""The entries of docs/troubleshooting/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "troubleshooting"
_ENTRY = re.compile(
    r"^## (?P<ticks>`+) ?(?P<message>.+?) ?(?P=ticks)\n(?P<text>.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Entry:
    """One message of a page: `…` stands for any text."""

    message: str
    text: str

    def is_in(self, output: str) -> bool:
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.message.split("…")]
        return re.search(".*?".join(parts), output, re.DOTALL) is not None


def read_entries() -> list[Entry]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md")))
    return [Entry(found["message"], found["text"].strip()) for found in _ENTRY.finditer(text)]
