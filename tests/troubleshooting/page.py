"""The entries of docs/troubleshooting.md."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_ENTRY = re.compile(
    r"^### (?P<ticks>`+) ?(?P<message>.+?) ?(?P=ticks)\n(?P<text>.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Entry:
    """One message of the page: `…` stands for any text."""

    message: str
    text: str

    @property
    def first_words(self) -> str:
        """At most 70 characters of the message, without the variable part at its beginning."""
        whole = self.message.lstrip("… ")
        short = textwrap.shorten(whole, 70, placeholder="")
        return whole if short == whole else f"{short.rstrip(' …')} …"

    @property
    def anchor(self) -> str:
        """The anchor that GitHub and MyST give to the heading."""
        return re.sub(r"[^\w\- ]", "", self.message.lower()).replace(" ", "-")

    def is_in(self, output: str) -> bool:
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.message.split("…")]
        return re.search(".*?".join(parts), output, re.DOTALL) is not None


def read_entries() -> list[Entry]:
    text = PAGE.read_text(encoding="utf-8")
    return [Entry(found["message"], found["text"].strip()) for found in _ENTRY.finditer(text)]


def read_index() -> list[tuple[str, str]]:
    """Return the first words and the anchor of each line of the index."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## ")[2].partition("\n## ")[0]
    found = re.findall(r"^\* \[(`+) ?(.+?) ?\1\]\(#([^)]*)\)$", text, re.MULTILINE)
    return [(words, anchor) for _, words, anchor in found]
