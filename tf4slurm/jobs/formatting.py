"""Format times, durations, bytes, numbers and tables for people, and replace invisible characters."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LATEST_TIME = 1e11  # in seconds since 1970; time.localtime fails for much later ones


def make_visible(text: object) -> str:
    """Replace control, invisible and text direction characters by U+FFFD. Tabs and line feeds are kept."""
    return _INVISIBLE.sub("\ufffd", str(text))


def without_colors(text: str) -> str:
    """Return the text without the codes by which programs, such as IPython, color a terminal."""
    return _COLOR.sub("", text)


def as_sentence(text: str) -> str:
    """Return the text with a full stop at its end, unless it is empty or ends with one, "!" or "?"."""
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def format_seconds(seconds: float) -> str:
    """Return a duration such as "0.4 s", "12 s", "3 min 20 s", "2 h 05 min" or "3 d 4 h"."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_elapsed(seconds: float) -> str:
    """Return a duration in squeue's format, such as "0:11" or "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_time(seconds: float | None) -> str:
    """Return a time in seconds since 1970 as local date and time. None and 0 are "an unknown time"."""
    if seconds is None or not 0 < seconds < _LATEST_TIME:
        return "an unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_bytes(count: float) -> str:
    """Return a number of bytes in decimal units, such as "0 B", "830 kB" or "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{format_number(count)} {unit}"
        count /= 1000
    return f"{format_number(count)} TB"


def format_number(value: float) -> str:
    """Return a number as text, such as "0", "0.0123", "4.56", "1,234" or "4.60e+12".

    Numbers from 100 to 1e9 are rounded to an integer, all others to three significant digits.
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e9 or size < 1e-4:
        return f"{value:.2e}"
    if size >= 100:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(size))
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def format_count(count: int, role: str) -> str:
    """Return a count with its noun, such as "1 chief", "2 ps" or "1,000 workers"."""
    return f"{count:,} {role}{'s' if count != 1 and not role.endswith('s') else ''}"


def format_list(words: Sequence[str], most: int) -> str:
    """Join words as "a, b". If there are more than `most`, return the first ones as "a, b and 1,000 more"."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns. All rows have the same number of columns.

    The library rich is not used, because it takes 0.4 s for 1,000 tasks.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shorten_in_the_middle(text: str, max_characters: int) -> str:
    """Return `text`, with its middle replaced by "…" if it has more than `max_characters` characters."""
    if len(text) <= max_characters:
        return text
    head = (max_characters - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - max_characters :]}"
