"""`JobId`: the id of a Slurm job, in each notation of Slurm's programs."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from tf4slurm.network.ports import format_ranges

_JOB_ID = re.compile(
    r"(?P<number>\d{1,10})(_(?P<element>\d{1,9})|_\[(?P<elements>[^\]]*)\]|\+(?P<component>\d{1,3}))?(;(?P<cluster>\S+))?"
)
_RANGE = re.compile(r"(?P<first>\d{1,9})(-(?P<last>\d{1,9})(:(?P<step>[1-9]\d{0,8}))?)?(%\d{1,9})?")
MAX_INDEX = 4_000_000
"""The largest index of an array's element: Slurm's MaxArraySize is at most 4,000,001 (manual of slurm.conf)."""


@dataclass(frozen=True)
class JobId:
    """The id of a job, of elements of a job array, or of a component of a heterogeneous job.

    ==============  ==========================================  ==============================
    notation        meaning                                     printed by
    ==============  ==========================================  ==============================
    4711            a job, a whole array, or a whole het job    all programs
    4711_3          element 3 of array 4711                     squeue, sacct, scontrol
    4711_[3-9%2]    elements of an array, pending together      squeue without --array, sacct
    4712+1          component 1 of heterogeneous job 4712       squeue, sacct, scontrol
    4711;north      a job on the cluster "north"                sbatch --parsable
    ==============  ==========================================  ==============================

    Slurm also gives each element and each component a number of its own, SLURM_JOB_ID. The first component, and one
    element, have the number of the whole job. So that number does not say which element is meant.

    Attributes:
        number: The number of the job, of the whole array, or of the heterogeneous job.
        elements: Indices of elements of the array. Empty for the whole job.
        component: Number of the component of a heterogeneous job; None for the whole job.
        cluster: Name of the cluster, if the notation contained it. Two ids are compared without it.
    """

    number: int
    elements: tuple[int, ...] = ()
    component: int | None = None
    cluster: str | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Parse the notation of one of Slurm's programs, or of a person.

        Raises:
            ValueError: The text is in none of the notations.
        """
        match = _JOB_ID.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not the id of a Slurm job, such as 4711, 4711_3 or 4711+1")
        elements: tuple[int, ...] = ()
        if match["element"]:
            elements = (int(match["element"]),)
        elif match["elements"] is not None:
            elements = parse_indices(match["elements"])
        component = int(match["component"]) if match["component"] else None
        return cls(int(match["number"]), elements, component, match["cluster"])

    @property
    def element(self) -> int | None:
        """The index of the element, if this is the id of one element."""
        return self.elements[0] if len(self.elements) == 1 else None

    @property
    def whole(self) -> JobId:
        """The id of the whole array or heterogeneous job."""
        return JobId(self.number)

    def covers(self, other: JobId) -> bool:
        """Return whether `other` is this job, or an element or component of it."""
        if self.number != other.number:
            return False
        if self.elements and not (other.elements and set(other.elements) <= set(self.elements)):
            return False
        return self.component is None or self.component == other.component

    def __str__(self) -> str:
        """Return the id in the notation that squeue, scontrol, scancel and sacct read, without the cluster."""
        if self.element is not None:
            return f"{self.number}_{self.element}"
        if self.elements:
            return f"{self.number}_[{format_ranges(self.elements)}]"
        return str(self.number) if self.component is None else f"{self.number}+{self.component}"


def parse_indices(text: str) -> tuple[int, ...]:
    """Return the indices of array elements in ascending order, from a text such as "0-9:3%2,20" (0, 3, 6, 9 and 20).

    The limit of elements that run at once, which follows "%", is left out.

    Raises:
        ValueError: The text is not numbers and ranges, has too large an index, or is shortened ("1,3,..."), as squeue
            does with long ones.
    """
    ranges: list[range] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (0, -1)
        if match is None or last < first:
            raise ValueError(f"{text!r} is not numbers and ranges, such as 0-9%2")
        if last > MAX_INDEX:
            raise ValueError(f"{text!r}: Slurm's largest index is {MAX_INDEX}")
        ranges.append(range(first, last + 1, int(match["step"] or 1)))
    if sum(map(len, ranges)) > MAX_INDEX + 1:  # from a file that another user wrote, it would take all memory
        raise ValueError(f"{text[:100]!r} repeats indices: Slurm has {MAX_INDEX + 1} at most")
    return tuple(sorted(set(itertools.chain(*ranges))))
