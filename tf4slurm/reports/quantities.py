"""Seconds, bytes and other numbers as a person reads them."""

from __future__ import annotations

import math


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
    """Return "0 B", "830 kB", "1.2 GB": thousands, not 1,024s."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{format_number(count)} {unit}"
        count /= 1000
    raise AssertionError


def format_number(value: float) -> str:
    """Return three figures: "0", "0.0123", "4.56", "78.9", "1,230", "4.6e+12"."""
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
    """Return "1 chief", "2 ps", "1,000 workers"."""
    return f"{count:,} {role}{'s' if count != 1 and not role.endswith('s') else ''}"


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return up to `most` round numbers between two numbers, both included if they are round."""
    step = _nice_step((high - low) / max(most - 1, 1), (1, 2, 2.5, 5, 10))
    return _steps(low, high, step)


def time_ticks(low: float, high: float, most: int) -> list[float]:
    """The same for seconds: round numbers of seconds, minutes, hours or days."""
    raw = (high - low) / max(most - 1, 1)
    for step in (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400):
        if 30 < raw <= step:
            return _steps(low, high, step)
    if raw <= 30:
        return _steps(low, high, _nice_step(raw, (1, 2, 5, 10)) if raw <= 10 else (15 if raw <= 15 else 30))
    return _steps(low, high, 86400 * _nice_step(raw / 86400, (1, 2, 5, 10)))


def format_tick(seconds: float, step: float) -> str:
    """Return a time on an axis whose ticks are `step` seconds apart: "90 s", "1:30 min", "2:00 h", "3 d"."""
    if step >= 86400:
        return f"{seconds / 86400:g} d"
    if step >= 3600 or abs(seconds) >= 7200:
        sign, whole = ("-" if seconds < 0 else ""), abs(round(seconds))
        return f"{sign}{whole // 3600}:{whole % 3600 // 60:02} h"
    if step >= 60:
        return f"{seconds / 60:g} min"
    return f"{seconds:g} s"


def _nice_step(raw: float, steps: tuple[float, ...]) -> float:
    if raw <= 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step for step in (*steps, 100.0) if step * power >= raw * (1 - 1e-9)) * power


def _steps(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, min(last, first + 100) + 1)]
