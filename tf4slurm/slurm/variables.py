"""Slurm's variables, each read into what it means or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

from tf4slurm.errors import NodelistError, SlurmEnvironmentError
from tf4slurm.network.ports import parse_ports
from tf4slurm.slurm.nodelist import MAX_NODES, expand_nodelist

_NUMBER = re.compile(r"[0-9]{1,9}")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class Variables:
    """An environment, asked for one variable at a time; one that is absent or unreadable is a SlurmEnvironmentError."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def has(self, variable: str) -> bool:
        """Whether it is set to anything but nothing."""
        return bool(self._environ.get(variable))

    def text(self, variable: str) -> str:
        value = self._environ.get(variable)
        if not value:
            raise SlurmEnvironmentError(
                f"{variable} is not set: this process is not a task of a Slurm step. Start it with srun, or use "
                '"tf4slurm run", which starts local processes where there is no Slurm.',
                variable=variable,
            )
        return value

    def optional_text(self, variable: str) -> str | None:
        return self._environ.get(variable) or None

    def number(self, variable: str) -> int:
        text = self.text(variable)
        if not _NUMBER.fullmatch(text):
            self.refuse(variable, "a number")
        return int(text)

    def optional_number(self, variable: str) -> int | None:
        return self.number(variable) if self.has(variable) else None

    def numbers(self, variable: str) -> tuple[int, ...]:
        """Read "0,3,4"."""
        items = self.text(variable).split(",")
        if not all(map(_NUMBER.fullmatch, items)):
            self.refuse(variable, 'numbers such as "0,3,4"')
        return tuple(map(int, items))

    def counts(self, variable: str) -> tuple[int, ...]:
        """Read "3,1(x2)", which is 3, 1, 1."""
        counts: list[int] = []
        for item in self.text(variable).split(","):
            match = _COUNT.fullmatch(item)
            if match is None or len(counts) + int(match[2] or 1) > MAX_NODES:
                self.refuse(variable, 'counts such as "3,1(x2)"')
            counts += [int(match[1])] * int(match[2] or 1)
        return tuple(counts)

    def nodes(self, variable: str) -> tuple[str, ...]:
        try:
            return expand_nodelist(self.text(variable))
        except NodelistError as error:
            self.refuse(variable, str(error), error)

    def ports(self, variable: str) -> tuple[int, ...]:
        """Read "23000-23149,23500"; empty if it is not set."""
        try:
            return parse_ports(self.text(variable)) if self.has(variable) else ()
        except ValueError as error:
            self.refuse(variable, str(error), error)

    def refuse(self, variable: str, expected: str, cause: Exception | None = None) -> NoReturn:
        """Raise the error that says what the variable is and what it should be; `cause` says it itself."""
        value = self.text(variable)
        said = expected if cause else f"expected {expected}"
        raise SlurmEnvironmentError(
            f"{variable} is {value!r}: {said}. Something has changed what Slurm set.", variable=variable, value=value
        ) from cause
