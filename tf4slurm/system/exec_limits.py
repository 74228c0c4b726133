"""Explain why Linux does not start a program whose arguments or environment variables are too long (E2BIG)."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Mapping, Sequence

MAX_TEXT_BYTES = 32 * resource.getpagesize()
"""Maximum size in bytes of an argument or of a "NAME=value" of the environment, with the final null byte.

Source: MAX_ARG_STRLEN in linux/binfmts.h.
"""


def explain_too_long(error: OSError, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return sentences that name the argument or variable that is too long, and the limit of Linux.

    The text is empty if `error` has another cause than E2BIG.
    """
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
    """Yield the size in bytes, with the final null byte, and a description of each argument and variable."""
    for word in command:
        yield len(os.fsencode(word)) + 1, f"the argument {word[:30]!r}…"
    for variable, value in environ.items():
        yield len(os.fsencode(f"{variable}={value}")) + 1, f"the variable {variable}"
