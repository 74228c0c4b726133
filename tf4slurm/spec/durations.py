"""Read times that people type: seconds with or without a unit, and Slurm's time limits."""

from __future__ import annotations

import contextlib
import math
import re

EXAMPLES = "90s, 5m, 2h or 1d12h"
"""Valid times with units, for error messages and help texts."""

_SLURM_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_WITH_UNITS = re.compile(r"\s*(?:\d+(?:\.\d+)?[dhms])+\s*")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_UNIT_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_ORDER = re.compile(r"d?h?m?s?")


def parse_seconds(text: str) -> float:
    """Convert a time such as "90", "90s", "1.5m", "2h" or "1d12h" to seconds. A number without a unit is in seconds.

    Raises:
        ValueError: The text is not a time.
    """
    seconds = _with_units(text)
    if seconds is None:
        with contextlib.suppress(ValueError):
            seconds = float(text)
    if seconds is None or not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a time. Expected seconds, or a time with units, such as {EXAMPLES}.")
    return seconds


def parse_time_limit(text: str) -> str:
    """Convert a time limit such as "90m", "8h" or "1d12h" to Slurm's format. Slurm's own formats are kept.

    Raises:
        ValueError: The text is not a time limit.
    """
    if not text or _SLURM_LIMIT.fullmatch(text):
        return text
    found = _with_units(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not a time limit. Expected Slurm's format, such as 90 (minutes), 1:30:00 or 2-12:00:00, or "
            "such as 90m, 8h or 2d."
        )
    minutes, seconds = divmod(math.ceil(found), 60)  # 0 would be no limit
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours}:{minutes:02}:{seconds:02}"


def _with_units(text: str) -> float | None:
    """Return the seconds of a time with units, the largest first, such as "1d12h". Return None for another text."""
    if not _WITH_UNITS.fullmatch(text):
        return None
    parts = _PART.findall(text)
    if not _ORDER.fullmatch("".join(unit for _, unit in parts)):
        return None
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
