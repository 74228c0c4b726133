"""Explain why Linux does not start a program whose arguments or variables are too long (E2BIG)."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Mapping, Sequence

MAX_TEXT_BYTES = 32 * resource.getpagesize()
"""Maximum size of an argument, or of a variable with its name, including the final null byte.

Source: MAX_ARG_STRLEN in linux/binfmts.h.
"""


def explain_too_long(error: OSError, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return which argument or variable of `command` is too long for Linux, or an empty text for another error."""
    if error.errno != errno.E2BIG:
        return ""
    sizes = list(_sizes(command, environ))
    size, name = max(sizes)
    if size > MAX_TEXT_BYTES:
        return f"{name} has {size:,} bytes, and Linux allows {MAX_TEXT_BYTES:,} for each. Shorten it."
    total = sum(size for size, _ in sizes)
    return (
        f"its arguments and variables have {total:,} bytes, more than Linux allows with this stack limit (a quarter of "
        f"ulimit -s). The longest is {name} with {size:,} bytes. Shorten it, or unset variables."
    )


def _sizes(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the size in bytes, including the final null byte, and the name of each argument and variable."""
    for word in command:
        yield len(os.fsencode(word)) + 1, f"the argument {word[:30]!r}…"
    for variable, value in environ.items():
        yield len(os.fsencode(f"{variable}={value}")) + 1, f"the variable {variable}"
