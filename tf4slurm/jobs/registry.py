"""Register each job of this user in a small file, so that its id or name finds it from any directory.

The files are in $XDG_STATE_HOME/tf4slurm/jobs (by default ~/.local/state/tf4slurm/jobs), mode 0700. Beyond 1,000 files
the oldest are deleted. A job that cannot be registered still runs, and is found by the path of its run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from tf4slurm.errors import RunDirectoryError, SchemaVersionError, UnknownJobError, UntrustedFileError
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import JobFile, Process, read_file, to_versioned_json
from tf4slurm.network.ports import format_ranges
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.options import did_you_mean, nearest
from tf4slurm.spec.points import ArrayElement
from tf4slurm.system.directories import make_directories, user_directory
from tf4slurm.system.files import replacing
from tf4slurm.system.trusted_files import TRUST, check_trusted, is_owned_by, read_trusted

logger = logging.getLogger(__name__)

_MAX_JOBS = 1_000
_MOST_LISTED = 3
_LOCK, _LOCK_SECONDS, _LOCK_POLL_SECONDS = "jobs.lock", 5.0, 0.02  # beside the directory of the entries
_MAX_DIGITS = 9  # of the index of an element
_INSTEAD = "Or give the path of a run directory."
_START_TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?(_\d+)?\Z")  # in the name of a local job, a sweep or its element
_LATER_RUN = re.compile(r"(?P<name>.+)-(?P<number>\d+)", re.DOTALL)


@dataclass(frozen=True)
class KnownEnd:
    """The end of a job without a result, or the equal ends of several elements of a job array.

    Attributes:
        job_id: Slurm's id of what has ended so, such as "4711" or "4711_[3-5]".
        state: For example "FAILED".
        exit_code: The exit code.
        reason: How it ended, in words.
    """

    job_id: str = ""
    state: str = ""
    exit_code: int = 1
    reason: str = ""


@dataclass(frozen=True)
class KnownJob:
    """A submitted or started job, or an element of a job array: its id, its name and the place of its files.

    Attributes:
        job_id: Slurm's job id, such as "4711", or "4711_3" for an element of an array; None for a local job.
        name: Name of its run directory. The later ones of a requeued job are NAME-2, NAME-3 and so on. A whole array
            has no run directory: the name of one of its elements is NAME_k.
        runs_directory: Parent of its run directories.
        started: When the job was submitted or started, in seconds since 1970.
        owner: User ID of the job's user; None for this user.
        array: The elements of a job array or local sweep. Empty for any other job, and for one element.
        cancelled: The id of what was cancelled while it was pending, such as "4711_[3-5]"; empty for nothing. Slurm
            forgets a job some minutes after its end.
        labels: Names and values of the varied arguments, for an element of an array.
        process: The process that starts the elements of a local sweep; None for any other job.
        outputs: Paths of the files that Slurm writes for the batch script, with Slurm's patterns %A, %a and %j: that of
            --output, and that of --error if it is given. Empty if unknown.
        ends: The ends without a result that Slurm or this job's files have shown, of the job or of elements.
    """

    job_id: str | None = None
    name: str = ""
    runs_directory: str = ""
    started: float = 0.0
    owner: int | None = None
    array: tuple[ArrayElement, ...] = ()
    cancelled: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    process: Process | None = None
    outputs: tuple[str, ...] = ()
    ends: tuple[KnownEnd, ...] = ()

    @property
    def slurm_id(self) -> JobId | None:
        """Slurm's job id, or None for a local job."""
        return JobId.parse(self.job_id) if self.job_id is not None else None

    @property
    def batch_script(self) -> Path:
        """Path at which `submit` keeps the batch script, that of the whole array. The file need not exist."""
        return Path(self.runs_directory) / f"{self.whole_name}.sh"

    @property
    def whole_name(self) -> str:
        """The name of the job. For an element of a Slurm array it is the name of the array."""
        index = None if self.slurm_id is None else self.slurm_id.element
        return self.name if index is None else self.name.removesuffix(f"_{index}")

    @property
    def given_name(self) -> str:
        """The name that was given with --name or comes from the script: `whole_name` without the id or start time."""
        if self.slurm_id is not None:
            return self.whole_name.removesuffix(f"-{self.slurm_id.number}")
        return _START_TIME.sub("", self.whole_name)

    @property
    def elements(self) -> tuple[KnownJob, ...]:
        """The elements of a job array or local sweep, each as a job of its own. Empty for any other job."""
        whole = self.slurm_id.whole if self.slurm_id is not None else None  # parsed once: 19_[0-9999] is long
        return tuple(self._element(whole, each) for each in self.array)

    def element(self, index: int) -> KnownJob:
        """Return an element of this job array as a job of its own.

        Raises:
            UnknownJobError: The job is no array, or has no such element.
        """
        for each in self.array:
            if each.index == index:
                return self._element(self.slurm_id.whole if self.slurm_id is not None else None, each)
        if not self.array:
            raise UnknownJobError(f"{self.name} is no job array, so it has no element {index}.", job=self.name)
        indices = format_ranges([each.index for each in self.array])
        text = f"The array {self.name} has the elements {indices}, and no element {index}."
        raise UnknownJobError(text, job=f"{self.name}_{index}")

    def with_elements(self, indices: Iterable[int]) -> KnownJob:
        """Return this job array with these elements as well. Nothing is known of them but their indices."""
        found = {each.index: each for each in self.array}
        for index in indices:
            found.setdefault(index, ArrayElement(index))
        return replace(self, array=tuple(found[index] for index in sorted(found)))

    def _element(self, whole: JobId | None, element: ArrayElement) -> KnownJob:
        return replace(
            self,
            job_id=None if whole is None else str(replace(whole, elements=(element.index,))),
            name=element.name or f"{self.name}_{element.index}",
            runs_directory=element.runs_directory or self.runs_directory,
            array=(),
            labels=element.labels,
        )

    @property
    def run_directories(self) -> list[RunDirectory]:
        """The job's run directories, oldest first.

        A pending job has none, and a requeued job has several. Other users may write to the parent. So only directories
        of the job's user, this user or root are listed.
        """
        (found,) = find_run_directories([self])
        return found


def find_run_directories(jobs: Sequence[KnownJob]) -> list[list[RunDirectory]]:
    """Return the `run_directories` of each job. Each parent directory is listed once, also for 10,000 elements."""
    listed: dict[str, dict[str, list[tuple[int, str]]]] = {}
    found = []
    for job in jobs:
        if job.job_id is None:  # NAME-2 is the run directory of another local job, started in the same second
            runs = [(1, job.name)]
        else:
            if job.runs_directory not in listed:
                listed[job.runs_directory] = _list_runs(job.runs_directory)
            runs = sorted(listed[job.runs_directory].get(job.name, ()))
        paths = [Path(job.runs_directory) / name for _, name in runs]
        found.append([RunDirectory(path) for path in paths if _owns(job, path)])
    return found


def _owns(job: KnownJob, path: Path) -> bool:
    """Return whether a path is a directory of the job's user, this user or root."""
    try:
        return path.is_dir() and is_owned_by(os.getuid() if job.owner is None else job.owner, path)
    except OSError:  # this user may not read it
        return False


def _list_runs(directory: str) -> dict[str, list[tuple[int, str]]]:
    """Return the names in a directory, each with its number, by the name of the job whose run directory it may be."""
    found: dict[str, list[tuple[int, str]]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            found.setdefault(name, []).append((1, name))
            if match := _LATER_RUN.fullmatch(name):
                found.setdefault(match["name"], []).append((int(match["number"]), name))
    return found


def register_job(
    name: str,
    runs_directory: Path,
    environ: Mapping[str, str],
    job_id: str | None = None,
    array: Sequence[ArrayElement] = (),
    process: Process | None = None,
    outputs: Sequence[str] = (),
) -> KnownJob:
    """Register the job whose run directory is `runs_directory`/`name`, which need not exist. Return the job.

    An element of a registered array is not registered.

    Args:
        array: The elements of a job array or of a local sweep.
        process: The process that starts the elements of a local sweep.
        outputs: See `KnownJob`. If they are not given, those of an earlier registration of the job are kept.
    """
    place, now = str(runs_directory.absolute()), round(time.time(), 6)
    job = KnownJob(job_id, name, place, now, array=tuple(array), process=process, outputs=tuple(outputs))
    with contextlib.suppress(OSError):
        if job.whole_name != name and (_directory(environ) / _file_name(job.runs_directory, job.whole_name)).exists():
            return job
    with _locked(environ):
        entry = None if outputs or job_id is None else _read_registered(job, environ)
        if entry is not None and entry.job_id == job_id:  # the launcher of a submitted job
            job = replace(job, outputs=entry.outputs)
        _write_registered(job, environ)
    return job


def register_cancelled(job: KnownJob, cancelled: JobId, environ: Mapping[str, str]) -> KnownJob:
    """Note in the entry of a job or array what was cancelled while it was pending. Return the job with this note."""

    def note(known: KnownJob) -> KnownJob:
        before = JobId.parse(known.cancelled).elements if known.cancelled else ()
        elements = tuple(sorted({*before, *cancelled.elements}))
        return replace(known, cancelled=str(replace(cancelled, elements=elements)))

    with _locked(environ):
        entry = _read_registered(job, environ)
        if entry is not None and entry.name == job.whole_name and _has_valid_ids(entry):
            _write_registered(note(entry), environ)
    return note(job)


def read_known_ends(job: KnownJob, environ: Mapping[str, str]) -> dict[JobId, KnownEnd]:
    """Return the ends in the entry of a job, or of its job array, by the id of the job or element."""
    entry = _read_registered(job, environ)
    found: dict[JobId, KnownEnd] = {}
    for end in entry.ends if entry is not None else ():
        with contextlib.suppress(ValueError):  # damaged
            job_id = JobId.parse(end.job_id)
            found.update({replace(job_id, elements=(index,)): end for index in job_id.elements} or {job_id: end})
    return found


def register_known_ends(job: KnownJob, ends: Mapping[JobId, KnownEnd], environ: Mapping[str, str]) -> None:
    """Add ends to the entry of a job or job array, because Slurm forgets them. Later ends replace earlier ones.

    `ends` has the ends by the id of the job or element. A job that is not registered gets no entry.
    """
    with _locked(environ):
        entry = _read_registered(job, environ)
        if entry is None:
            return
        equal: dict[KnownEnd, list[JobId]] = {}
        for job_id, end in {**read_known_ends(job, environ), **ends}.items():
            equal.setdefault(replace(end, job_id=""), []).append(job_id)
        found = []
        for end, ids in equal.items():
            elements = tuple(sorted(index for job_id in ids for index in job_id.elements))
            found.append(replace(end, job_id=str(replace(ids[0], elements=elements))))
        _write_registered(replace(entry, ends=tuple(found)), environ)


def _read_registered(job: KnownJob, environ: Mapping[str, str]) -> KnownJob | None:
    """Return the entry of the array that a job belongs to, or else of the job. Return None without a valid one."""
    for name in dict.fromkeys((job.whole_name, job.name)):
        with contextlib.suppress(OSError, UntrustedFileError, SchemaVersionError):
            path = _directory(environ) / _file_name(job.runs_directory, name)
            entry = read_file(path, KnownJob, functools.partial(read_trusted, instead=_INSTEAD))
            if entry is not None and (entry.name, entry.runs_directory) == (name, job.runs_directory):
                return entry
    return None


def register_end(job: KnownJob, environ: Mapping[str, str]) -> KnownJob:
    """Note in the entry of a local sweep that its process starts no more elements. Return the sweep with this note."""
    assert job.process is not None
    process = replace(job.process, id=0, start_ticks=0)
    with _locked(environ):
        _write_registered(replace(_read_registered(job, environ) or job, process=process), environ)
    return replace(job, process=process)


@contextlib.contextmanager
def _locked(environ: Mapping[str, str]) -> Iterator[None]:
    """Hold the lock of the registry while an entry is read and written. Go on without it after 5 s, or if it fails."""
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            path = _directory(environ).with_name(_LOCK)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            deadline = time.monotonic() + _LOCK_SECONDS
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _write_registered(job: KnownJob, environ: Mapping[str, str]) -> None:
    try:
        directory = _directory(environ)
        make_directories(directory, 0o700)
        with replacing(directory / _file_name(job.runs_directory, job.name)) as draft:
            draft.write(to_versioned_json(job).encode())
            check_trusted(Path(draft.name), _INSTEAD)
        for path in sorted(directory.glob("*.json"), key=_modified_at)[:-_MAX_JOBS]:
            path.unlink(missing_ok=True)
    except (OSError, UntrustedFileError) as error:
        logger.info("this job is not registered: %s", error)


def _modified_at(path: Path) -> float:
    """Return when a file was modified, or 0 if it is gone: another job may remove it at the same time."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _file_name(runs_directory: str, name: str) -> str:
    """Return the name of the file that registers a job.

    The name contains a hash of the run directory's path, because local jobs in two directories may have the same name.
    """
    path = os.fsencode(f"{runs_directory}/{name}")
    readable = re.sub(r"[^\w.-]", "_", name)[:200]
    return f"{readable}-{hashlib.sha256(path).hexdigest()[:16]}.json"


def registered_jobs(environ: Mapping[str, str]) -> list[KnownJob]:
    """Return all registered jobs, latest first.

    Entries that another user could have written, or that a newer tf4slurm wrote, are left out with a warning.
    Entries of elements that started before their array was registered are left out without one.
    """
    jobs, refused = [], []
    with contextlib.suppress(OSError):
        for path in _directory(environ).glob("*.json"):
            try:
                job = read_file(path, KnownJob, functools.partial(read_trusted, instead=_INSTEAD))
            except (UntrustedFileError, SchemaVersionError) as error:
                refused.append(error)
            else:
                if job is not None and job.name and job.runs_directory and _has_valid_ids(job):
                    jobs.append(job)
    if refused:
        logger.warning("%d registered jobs are left out. The first: %s", len(refused), refused[0])
    arrays = {(job.name, job.runs_directory) for job in jobs if job.array}
    jobs = [job for job in jobs if job.array or (job.whole_name, job.runs_directory) not in arrays]
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def _has_valid_ids(job: KnownJob) -> bool:
    try:
        ids = [JobId.parse(text) for text in (job.job_id, job.cancelled) if text]
        return bool(ids) or not job.array or job.process is not None  # a local sweep has a process
    except ValueError:
        return False


def find_job(text: str | None, environ: Mapping[str, str]) -> KnownJob:
    """Return the job with this Slurm job id, name or run directory path. None stands for the latest registered job.

    A name without id or start time (`KnownJob.given_name`) stands for the latest registered job of that name. ID_k and
    NAME_k stand for an element of a job array, and ID_[3-9] for several. A component of a heterogeneous job (ID+1)
    stands for the whole job.

    A `text` without a slash may be the name of a directory that another user has made. It is used only if no registered
    job has this id or name.

    Raises:
        UnknownJobError: No job matches, or this user has no registered job.
        SchemaVersionError: A newer version of tf4slurm wrote the run directory.
    """
    if text is None:
        if jobs := registered_jobs(environ):
            return jobs[0]
        raise UnknownJobError("This user has not started any job. Start one: tf4slurm run --help")
    by_path = _find_by_path(text)
    if by_path is not None and (os.sep in text or by_path.owner in (os.getuid(), 0)):
        return by_path
    jobs = registered_jobs(environ)
    found = _find_by_name(text, jobs)
    if found is None:
        with contextlib.suppress(ValueError):
            found = _find_by_id(JobId.parse(text), jobs)
    if found is None:
        found = next(_find_by_given_name(text, jobs), None)
    if found is not None:
        return found
    if by_path is not None:
        return by_path
    words = [word for job in jobs for word in (job.job_id, job.name) if word]
    known = did_you_mean(nearest(text, words)) or f" The latest are {', '.join(words[:_MOST_LISTED])}."
    if not jobs:
        known = " This user has not started any job."
    raise UnknownJobError(
        f"There is no job {text!r}.{known} Give a Slurm job id, a name (train-4711, or train for the latest one) or a "
        'run directory; "tf4slurm list" shows them.',
        job=text,
    )


def _find_by_name(text: str, jobs: Sequence[KnownJob]) -> KnownJob | None:
    for job in jobs:
        if job.name == text:
            return _with_parts(job, jobs)
    name, _, index = text.rpartition("_")
    named = {text: (), name: (int(index),)} if index.isdecimal() and len(index) <= _MAX_DIGITS else {text: ()}
    for job in jobs:
        if job.slurm_id is None and job.array and job.name == name and index.isdecimal():  # a local sweep
            return job.element(int(index))
        if job.slurm_id is not None and job.whole_name in named:
            whole = _with_parts(job, jobs) if job.name == job.whole_name else _find_by_id(job.slurm_id.whole, jobs)
            assert whole is not None
            return _select(whole, named[job.whole_name])
    return None


def find_jobs(text: str, environ: Mapping[str, str]) -> list[KnownJob]:
    """Return all jobs for which `text` may stand, the latest first. The first one is the result of `find_job`.

    There are several only if `text` is a name without id or start time, or NAME_k. Exceptions are those of `find_job`.
    """
    first = find_job(text, environ)
    found = [first]
    with contextlib.suppress(UnknownJobError):  # another job of this name without an element k
        jobs = _find_by_given_name(text, registered_jobs(environ))
        found += [job for job in jobs if (job.name, job.runs_directory) != (first.name, first.runs_directory)]
    is_one = first.name == text or os.sep in text or first.given_name not in (text, text.rpartition("_")[0])
    return [first] if is_one else found


def _find_by_given_name(text: str, jobs: Sequence[KnownJob]) -> Iterator[KnownJob]:
    """Yield the jobs that were given this name, or of them the element k, if `text` is NAME_k. The latest is first."""
    name, _, index = text.rpartition("_")
    for job in jobs:
        found = None
        if job.given_name == text:
            found = _find_by_name(job.whole_name, jobs)
        elif job.given_name == name and index.isdecimal() and len(index) <= _MAX_DIGITS:
            found = _find_by_name(f"{job.whole_name}_{index}", jobs)
        if found is not None:
            yield found


def _find_by_id(job_id: JobId, jobs: Sequence[KnownJob]) -> KnownJob | None:
    same = [job for job in jobs if job.slurm_id is not None and job.slurm_id.number == job_id.number]
    for job in same:
        if job.slurm_id == job_id.whole:
            return _select(_with_parts(job, jobs), job_id.elements)
    for job in same:
        if job.slurm_id == job_id:
            return job
    parts = [job for job in same if job.slurm_id is not None and job.slurm_id.elements]
    if not parts:
        return None
    first = replace(parts[0], job_id=str(job_id.whole), name=parts[0].whole_name, labels={}, cancelled="")
    return _select(_add_parts(first, parts), job_id.elements)


def _with_parts(job: KnownJob, jobs: Sequence[KnownJob]) -> KnownJob:
    """Return a job with those elements that registered themselves, if it was registered without its elements."""
    if job.array or job.slurm_id is None or job.slurm_id.elements:
        return job
    place = (job.name, job.runs_directory)
    return _add_parts(
        job, [each for each in jobs if each is not job and (each.whole_name, each.runs_directory) == place]
    )


def _add_parts(whole: KnownJob, parts: Iterable[KnownJob]) -> KnownJob:
    """Return a job array with elements that registered themselves, because it was submitted without tf4slurm."""
    found: dict[int, ArrayElement] = {}
    for part in parts:
        assert part.slurm_id is not None
        index = part.slurm_id.elements[0]
        found.setdefault(index, ArrayElement(index, part.labels, part.name, part.runs_directory))
    return replace(whole, array=tuple(found[index] for index in sorted(found)))


def _select(job: KnownJob, indices: Sequence[int]) -> KnownJob:
    """Return a job, or the elements of it with these indices, if there are some.

    Of an array whose elements registered themselves, a pending element is not known yet. So it may have any index.
    """
    if not indices:
        return job
    is_complete = not job.array or not any(each.name for each in job.array)
    whole = job if is_complete else job.with_elements(indices)
    found = {each.index: each for each in whole.array}
    for index in indices:
        if index not in found or len(indices) == 1:
            return whole.element(index)  # or its error
    job_id = str(replace(JobId.parse(str(job.job_id)), elements=tuple(indices)))
    return replace(whole, job_id=job_id, array=tuple(found[index] for index in indices))


def _find_by_path(text: str) -> KnownJob | None:
    """Return the job with this run directory, or None if `text` is not the path of a run directory."""
    names = ("logs", "job.json", "events.jsonl", "result.json")  # one is enough: some may be deleted
    if not any(os.path.exists(os.path.join(text, name)) for name in names):
        return None
    path = Path(text).absolute()  # fails if the working directory was removed
    file = RunDirectory(path).read(JobFile) or JobFile()
    facts = path.stat()
    started = facts.st_mtime
    if file.job_id is not None and not _has_valid_ids(KnownJob(file.job_id)):
        raise RunDirectoryError(
            f"{str(path / 'job.json')!r} has the job id {file.job_id!r}, which is not Slurm's: the file was changed.",
            path=str(path),
        )
    with contextlib.suppress(ValueError):
        started = datetime.strptime(file.started or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return KnownJob(file.job_id, path.name, str(path.parent), started, facts.st_uid, labels=file.labels)


def latest_run(job: KnownJob) -> RunDirectory:
    """Return the latest run directory of a job.

    Raises:
        RunDirectoryError: The job has no run directory that belongs to its user.
    """
    if job.array:
        text = f"{job.name} is a job array. Give one element, such as {job.elements[0].name}."
        raise RunDirectoryError(text, path=str(Path(job.runs_directory) / job.name))
    runs = job.run_directories
    if runs:
        return runs[-1]
    path = str(Path(job.runs_directory) / job.name)
    if os.path.lexists(path):
        text = (
            f"The run directory {path!r} belongs to another user, not to you: add it to {TRUST} if you trust that user."
        )
        raise RunDirectoryError(text, path=path)
    raise RunDirectoryError(
        f"The job {job.name!r} has no run directory: {path!r} does not exist. The job has not created it, or the "
        f"directory was moved or deleted. To find out: tf4slurm status {job.job_id or job.name}",
        path=path,
    )


def _directory(environ: Mapping[str, str]) -> Path:
    directory = user_directory(environ, "XDG_STATE_HOME", ".local/state")
    if directory is None:
        raise FileNotFoundError("this user has no home directory; set HOME or XDG_STATE_HOME")
    return directory / "jobs"
