"""Format durations, bytes, numbers and axis ticks for people, and replace invisible characters."""

from __future__ import annotations

import math
import re

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_TIME_STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def make_visible(text: object) -> str:
    """Return text with U+FFFD in place of control characters, text direction marks and unpaired surrogates."""
    return _INVISIBLE.sub("\ufffd", str(text))


def format_seconds(seconds: float) -> str:
    """Return "0.4 s", "12 s", "3 min 20 s", "2 h 05 min" or "3 d 4 h"."""
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


def format_bytes(count: float) -> str:
    """Return "0 B", "830 kB" or "1.2 GB": decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{format_number(count)} {unit}"
        count /= 1000
    return f"{format_number(count)} TB"


def format_number(value: float) -> str:
    """Return three significant digits: "0", "0.0123", "4.56", "78.9", "1,230", "4.60e+12"."""
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
    """Return "1 chief", "2 ps" or "1,000 workers"."""
    return f"{count:,} {role}{'s' if count != 1 and not role.endswith('s') else ''}"


def number_ticks(low: float, high: float, limit: int) -> list[float]:
    """Return at most about `limit` round numbers from `low` to `high` for an axis of numbers."""
    return _multiples(low, high, _round_up((high - low) / max(limit - 1, 1), (1, 2, 2.5, 5, 10)))


def time_ticks(low: float, high: float, limit: int) -> list[tuple[float, str]]:
    """Return at most about `limit` round times in seconds for an axis of time, with their labels."""
    raw = (high - low) / max(limit - 1, 1)
    if raw <= 10:
        step = _round_up(raw, (1, 2, 5, 10))
    elif raw <= 86400:
        step = next(each for each in _TIME_STEPS if raw <= each)
    else:
        step = 86400 * _round_up(raw / 86400, (1, 2, 5, 10))
    return [(seconds, _format_time(seconds, step)) for seconds in _multiples(low, high, step)]


def _format_time(seconds: float, step: float) -> str:
    """Return a time on an axis whose ticks are `step` seconds apart: "90 s", "2 min", "2:00 h" or "3 d"."""
    if step >= 86400:
        return f"{seconds / 86400:g} d"
    if step >= 3600 or abs(seconds) >= 7200:
        sign, whole = ("-" if seconds < 0 else ""), abs(round(seconds))
        return f"{sign}{whole // 3600}:{whole % 3600 // 60:02} h"
    if step >= 60:
        return f"{seconds / 60:g} min"
    return f"{seconds:g} s"


def _round_up(raw: float, leading_digits: tuple[float, ...]) -> float:
    """Return the smallest of `leading_digits` times a power of ten that is at least `raw`; 1 if `raw` <= 0."""
    if raw <= 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(digit for digit in (*leading_digits, 100.0) if digit * power >= raw * (1 - 1e-9)) * power


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, min(last, first + 100) + 1)]
