"""What Slurm's queue says of a job: a line of squeue, read, and its Reason in words."""

from __future__ import annotations

from dataclasses import dataclass

SQUEUE_FORMAT = "%i|%T|%r|%M|%l|%S|%D|%N"
ENDED_STATES = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)
_WORDS = {
    "AssocGrpCPUMinutesLimit": "your group has used the processor time it was given",
    "AssocGrpGRES": "your group's limit on GPUs is in use",
    "AssocMaxJobsLimit": "you have as many jobs running as your account allows",
    "BadConstraints": "no node can ever meet what is asked: look at -C, --mem, --gres and -N",
    "BeginTime": "it waits for the time it was asked to begin at, or for some minutes after a requeue",
    "Dependency": "it waits for the job it depends on",
    "DependencyNeverSatisfied": "the job it depends on has failed: it will never start; cancel it",
    "JobArrayTaskLimit": "as many elements of the array run as its limit allows",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "you hold it; scontrol release lets it go",
    "Licenses": "it waits for a licence",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition is down",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows; it will never start",
    "Priority": "jobs of higher priority are before it",
    "QOSMaxCpuPerUserLimit": "your processor limit in this QOS is in use",
    "QOSMaxGRESPerUser": "your GPU limit in this QOS is in use",
    "QOSMaxJobsPerUserLimit": "you have as many jobs running as this QOS allows",
    "ReqNodeNotAvail": "a node that it asks for is down, reserved or drained",
    "Reservation": "it waits for its reservation to begin",
    "Resources": "it is next, and waits for nodes to become free",
}


@dataclass(frozen=True)
class QueueEntry:
    """A job, or an element of a job array, as the queue has it. Times are Slurm's own text."""

    job_id: str
    state: str
    reason: str
    elapsed: str
    limit: str
    start: str
    num_nodes: str
    nodes: str

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def reason_in_words(self) -> str:
        """Why it waits: Slurm's word, and what that means where we know it."""
        if self.reason == "None":
            return "Slurm has not looked at it yet"
        word = self.reason.split(",")[0].strip("()").removesuffix("_")
        meaning = _WORDS.get(word)
        return f"{self.reason}: {meaning}" if meaning else self.reason


def parse_queue(text: str) -> list[QueueEntry]:
    """Read what squeue writes with `SQUEUE_FORMAT`; a line of another form is left out."""
    rows = (line.split("|") for line in text.splitlines())
    return [QueueEntry(*(field.strip() for field in row)) for row in rows if len(row) == 8]
