"""Submit a job with sbatch in a clean environment, and keep its batch script beside its run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tf4slurm.errors import CommandError, LaunchError, OptionError, RefusedError, RunDirectoryError, Tf4SlurmError
from tf4slurm.jobs.registry import KnownJob, register_job
from tf4slurm.jobs.run_directory import make_parent
from tf4slurm.jobs.slurm_output import DEFAULT_ARRAY_OUTPUT, DEFAULT_OUTPUT
from tf4slurm.launch.checks import check_command, check_program_source, check_script, warn_of_resolver
from tf4slurm.network.ports import format_ranges
from tf4slurm.slurm.commands import find_jobs_with_comment, has_no_cluster, query_site, run_program
from tf4slurm.slurm.environ import VISIBLE_DEVICES, SlurmAllocation
from tf4slurm.slurm.job_id import JobId
from tf4slurm.spec.batch_spec import MEMORY_OPTIONS, BatchSpec
from tf4slurm.spec.points import ArrayElement
from tf4slurm.submission.batch_script import make_sbatch_options, make_script
from tf4slurm.submission.environment_check import check_environment, check_venv
from tf4slurm.submission.snapshot import place_snapshot, take_snapshot
from tf4slurm.system.directories import make_directories
from tf4slurm.system.trusted_files import read_trusted
from tf4slurm.system.variables import AGENT_VARIABLES, ANSWER_VARIABLE, RUN_NAME_VARIABLE, SCRIPT_VARIABLES

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 60.0  # without a controller, sbatch fails after several MessageTimeouts of 10 s
# Variables for Slurm's commands: the configuration file, the cluster and the user's credentials
_KEPT = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"))
# With these, a task would join the outer job, and a launcher would write to the outer job's answer file.
_OUTER_JOB = frozenset((*AGENT_VARIABLES, *SCRIPT_VARIABLES, ANSWER_VARIABLE, RUN_NAME_VARIABLE))
_OTHER_NAMES = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE"}
_ARRAY_LIMIT = re.compile(r"^#SBATCH --array=\S*%(?P<limit>\d+)", re.MULTILINE)
_OPTION = re.compile(r"^#SBATCH --(?P<name>[a-z0-9-]+)(=(?P<value>.*))?$", re.MULTILINE)
_NAME_PATTERN = re.compile(r"%\d*(?P<letter>[%xu])")  # the number only pads numbers
_OPTION_LINE = re.compile(r"^#SBATCH --([a-z0-9-]+)", re.MULTILINE)
_JOB_ID = re.compile(r"^(?P<job_id>\d+)(;(?P<cluster>\S+))?[ \t\r]*$", re.MULTILINE)  # sbatch --parsable
_OWN_COMMENT = re.compile(r"^#SBATCH --com", re.MULTILINE)  # sbatch accepts abbreviations
# A site's wrapper may run sbatch under another name.
_SBATCH_LINE = re.compile(r"^[\w.-]*sbatch[\w.-]*: (?:error: )?(.*)$", re.MULTILINE)
_CLUSTERS = re.compile(r"^#SBATCH (?:--cl[a-z]*[= ]|-M ?)(\S+)", re.MULTILINE)
# slurm_errno.h: the request may have reached the controller, but the answer did not come back.
_NO_ANSWER = re.compile(
    r"timed out|Zero Bytes were transmitted|Unable to contact slurm controller|Unexpected message received"
    r"|[Cc]onnection|Message (send|receive) failure|Communication shutdown failure|Broken pipe",
)
_FIND_SECONDS, _FIND_PAUSE_SECONDS = 10.0, 0.5


def submit(spec: BatchSpec, environ: Mapping[str, str]) -> KnownJob:
    """Submit a job in `environ` without the variables of an outer job. See `api.submit`."""
    placed = place_snapshot(spec)
    text, environ = _prepare(placed, environ)  # refuses a job before anything is created
    with contextlib.ExitStack() as made:  # after an error, what this call has made is removed
        if placed.snapshot != "none" and placed.directory is not None:
            is_fixed = spec.directory is not None
            snapshot = take_snapshot(spec.snapshot, Path.cwd(), placed.directory, spec.command_words, is_fixed=is_fixed)
            made.callback(shutil.rmtree, snapshot, ignore_errors=True)
            placed = dataclasses.replace(placed, directory=snapshot)
            text = make_script(placed)
        draft = _write_draft(placed, text)
        made.callback(draft.unlink, missing_ok=True)
        make_output_directory(placed.sbatch_options, Path.cwd())
        kept = made.pop_all()  # from here on, Slurm may accept the job, even if this process is interrupted
    try:
        job_id = submit_script(text, environ)
    except Tf4SlurmError as error:
        if isinstance(error, RefusedError) and error.may_be_queued:
            logger.warning("the batch script is kept as %s", draft)
        else:
            kept.close()
        if isinstance(error, RefusedError) and spec.elements and (limit := _find_array_limit(error)) is not None:
            raise limit from error
        raise
    name, outputs = f"{spec.name}-{job_id}", find_outputs(placed)
    job = register_job(name, placed.runs_directory, environ, str(job_id), spec.elements, outputs=outputs)
    try:
        os.link(draft, job.batch_script)  # never overwrites a file
        draft.unlink()
    except OSError as error:
        logger.warning("the script of job %s is kept as %s: %s", job_id, draft, error.strerror)
    return job


def submit_again(job: KnownJob, directory: Path, environ: Mapping[str, str], elements: Sequence[int] = ()) -> KnownJob:
    """Submit the kept batch script of a job again, with `directory` as its working directory. Return the new job.

    Of a job array, submit only `elements`, as a new array with the same limit of elements that run at once.

    Raises:
        UntrustedFileError: Another user could have written the script.
        RefusedError, LaunchError: As for `submit_script`.
    """
    script = job.batch_script
    content = read_trusted(script, "Start the job again with the command you used.")
    text = content.decode("utf-8", errors="surrogateescape")
    environ = submit_environment(environ, text)
    written = _read_options(text)
    make_output_directory(written, directory)
    limit = f"%{match['limit']}" if (match := _ARRAY_LIMIT.search(text)) else ""
    options = (f"--array={format_ranges(elements)}{limit}",) if elements else ()
    job_id = submit_script(text, environ, directory, options)
    labels = {each.index: each.labels for each in job.array}
    array = [ArrayElement(index, labels.get(index, job.labels)) for index in elements]
    name = f"{job.given_name}-{job_id}"
    again = register_job(name, script.parent, environ, str(job_id), array, outputs=_find_outputs(written, directory))
    with contextlib.suppress(OSError):
        os.link(script, again.batch_script)
    return again


def estimate(spec: BatchSpec, environ: Mapping[str, str]) -> str:
    """Return Slurm's sentence about when and where the job would start, without submitting it."""
    done = _run(("sbatch", "--test-only"), *_prepare(spec, environ))
    return "\n".join(_SBATCH_LINE.findall(done.stderr)) or done.stderr.strip()


def _prepare(spec: BatchSpec, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Check a job. Return its batch script and the environment variables of sbatch."""
    _check_command(spec)
    if not spec.single:
        warn_of_resolver(spec.command_words)
    spec.warn_of_mistakes()
    text = make_script(spec)
    environ = submit_environment(environ, text)
    _check_known(spec.after, environ)
    check_environment(spec, environ, runs_tf4slurm=not spec.single)
    return text, environ


def _check_command(spec: BatchSpec) -> None:
    """Check that the command does not read standard input, and that its files exist.

    With an environment, only the script is checked, because the program may exist only there. Lines of --load-env and
    --prologue, and an option of Slurm, may change the directory of the script.
    """
    for command in spec.commands:
        check_program_source(command)
    if not spec.has_environment:
        check_command(spec)
    elif spec.check_env and not (spec.load_env or spec.prologue or spec.container or "chdir" in spec.sbatch_options):
        for command in spec.commands:
            check_script(command)


def warn_of_missing_files(spec: BatchSpec) -> None:
    """Log a warning of the command's files and of the virtual environment for which `submit` would refuse the job."""
    for check in (_check_command, check_venv):
        try:
            check(spec)
        except (CommandError, OptionError) as error:
            logger.warning("%s", error)


def submit_environment(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment variables for sbatch and the job, without those of a job that this process is in.

    SBATCH_* variables would override options in the batch script. Outside of a job, those whose option is in the script
    are removed. Inside a job, all SBATCH_* variables and those that assign GPUs are removed. `script` is the text of
    the batch script.
    """
    if SlurmAllocation.from_environ(environ) is not None:
        removed = {name for name in environ if name.startswith("SBATCH_")} | set(VISIBLE_DEVICES)
    else:
        options = set(_OPTION_LINE.findall(script))
        if options & set(MEMORY_OPTIONS):  # each overrides the variables of all three
            options.update(MEMORY_OPTIONS)
        removed = {f"SBATCH_{_OTHER_NAMES.get(name) or name.upper().replace('-', '_')}" for name in options}
    removed |= _OUTER_JOB
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name.startswith(("SLURM_", "SLURMD_")) or name in removed)
    }


def submit_script(
    text: str, environ: Mapping[str, str], directory: Path | None = None, options: Sequence[str] = ()
) -> JobId:
    """Submit a batch script, from `directory` or the current directory. Log sbatch's warnings. Return the job's id.

    `options` are options of sbatch that override those in the script.

    A unique comment marks the job, unless the script sets a comment. If sbatch fails or does not print exactly one id,
    squeue is queried for the job with this comment. A site's wrapper may hide the id, and Slurm may accept a job after
    sbatch has timed out.

    Raises:
        RefusedError: sbatch refused the script, or with `may_be_queued` it is unknown whether Slurm accepted the job.
        LaunchError: sbatch cannot be started.
    """
    comment = "" if _OWN_COMMENT.search(text) else f"tf4slurm-{secrets.token_hex(8)}"
    command = ("sbatch", "--parsable", *([f"--comment={comment}"] if comment else []), *options)
    clusters = match[1] if (match := _CLUSTERS.search(text)) else environ.get("SBATCH_CLUSTERS")
    queue = {**environ, "SLURM_CLUSTERS": clusters} if clusters else environ
    try:
        done = _run(command, text, environ, directory)
    except RefusedError as error:
        is_refusal = _is_refusal(error)
        job_id = _find_submitted(comment, queue, str(error), is_expected=not is_refusal)
        if job_id is None and is_refusal:
            raise
        if job_id is None:
            raise _unknown_submission(error, comment, clusters) from error
        _warn_of_other_cluster(clusters, environ)
        return job_id
    if done.stderr.strip():
        logger.warning("%s", done.stderr.strip())
    answers = list({match["job_id"]: match for match in _JOB_ID.finditer(done.stdout)}.values())
    if len(answers) == 1:
        _warn_of_other_cluster(answers[0]["cluster"], environ)
        return JobId.parse(answers[0]["job_id"])
    what = f"sbatch exited with code 0, but did not print one job id: {done.stdout[-300:]!r}."
    job_id = _find_submitted(comment, queue, what, is_expected=True)
    if job_id is None and answers:  # earlier ones may be digits in a site's greeting
        job_id = JobId.parse(answers[-1]["job_id"])
    if job_id is None:
        unclear = RefusedError(what, command=command, returncode=0, stderr=done.stderr)
        raise _unknown_submission(unclear, comment, clusters)
    _warn_of_other_cluster(clusters, environ)
    return job_id


def _find_array_limit(error: RefusedError) -> RefusedError | None:
    """Return `error` with Slurm's MaxArraySize added, if sbatch refused the array. Otherwise return None."""
    if "array" not in error.stderr.lower() or error.may_be_queued:
        return None
    try:
        size = int(query_site().settings.get("MaxArraySize", ""))
    except (LaunchError, ValueError):
        return None
    text = (
        f"Slurm's limit here is MaxArraySize={size}: the largest index is {size - 1}. Divide the grid or the file of "
    )
    text += "arguments, or vary fewer arguments."
    return RefusedError(f"{error}\n{text}", command=error.command, returncode=error.returncode, stderr=error.stderr)


def _is_refusal(error: RefusedError) -> bool:
    """Return whether Slurm certainly did not accept the job, because sbatch has printed a reason."""
    has_reason = _SBATCH_LINE.search(error.stderr) is not None
    return error.returncode > 0 and has_reason and _NO_ANSWER.search(error.stderr) is None


def _find_submitted(comment: str, environ: Mapping[str, str], what: str, *, is_expected: bool) -> JobId | None:
    """Return the id of the job with this comment, and log it. Return None if squeue does not show one within 10 s.

    Args:
        comment: The comment. An empty one finds no job.
        what: Why the id is unknown, for the log.
        is_expected: Whether Slurm may have accepted the job, so that squeue is queried until it shows the job. If not,
            squeue is queried once.
    """
    deadline = time.monotonic() + _FIND_SECONDS
    while comment and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(LaunchError):
            found = find_jobs_with_comment(comment, environ, timeout_seconds=left)
            if found:
                logger.warning("squeue shows the job as %s, although:\n%s", found[0], what)
                return found[0]
        if not is_expected:
            break
        time.sleep(_FIND_PAUSE_SECONDS)
    return None


def _unknown_submission(error: RefusedError, comment: str, clusters: str | None) -> RefusedError:
    why = f"squeue shows no job with the comment {comment}" if comment else "the job has a comment of its own"
    squeue = f"squeue --me --clusters={clusters}" if clusters else "squeue --me"
    text = f"It is unknown whether Slurm accepted the job: {why}. Check with {squeue} before you submit again."
    return RefusedError(
        f"{error}\n{text}",
        command=error.command,
        returncode=error.returncode,
        stderr=error.stderr,
        may_be_queued=True,
    )


def _warn_of_other_cluster(cluster: str | None, environ: Mapping[str, str]) -> None:
    if cluster and "SLURM_CLUSTERS" not in environ:
        text = "the job is on cluster %s: with export SLURM_CLUSTERS=%s, tf4slurm and Slurm's commands find it"
        logger.warning(text, cluster, cluster)


def _check_known(job_ids: Iterable[str], environ: Mapping[str, str]) -> None:
    """Refuse a dependency on a job that Slurm does not know, because sbatch would treat it as satisfied."""
    for job_id in job_ids:
        try:
            _run(("scontrol", "--oneliner", "show", "job", job_id), "", environ)
        except RefusedError as error:
            if "Invalid job id" not in error.stderr:  # the controller did not answer
                raise
            raise RefusedError(
                f"--after {job_id}: {error.stderr.strip()}. Slurm does not know that job: check its id. Slurm forgets "
                "a job some minutes after its end; if it succeeded, omit --after.",
                command=error.command,
                returncode=error.returncode,
                stderr=error.stderr,
            ) from error


def _run(
    command: tuple[str, ...], text: str, environ: Mapping[str, str], directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs with `text` as its input, for at most 60 s.

    Raises:
        RefusedError: The program failed or timed out.
        LaunchError: The program cannot be started.
    """
    try:
        return run_program(command, _TIMEOUT_SECONDS, environ=environ, text=text, directory=directory)
    except LaunchError as error:
        if isinstance(error.__cause__, OSError):
            kind: type[LaunchError] = LaunchError
            message = f'{error} Submit from a host that has them, or submit the output of "tf4slurm script" there.'
        elif has_no_cluster(error.stderr):
            kind, message = LaunchError, f"{error} To run the job on this host: tf4slurm run."
        elif error.returncode < 0:
            kind, message = RefusedError, str(error)
        else:
            words = error.stderr.strip() or "it wrote no error message"
            kind, message = RefusedError, f"{command[0]} exited with code {error.returncode}:\n{words}"
        raise kind(message, command=command, returncode=error.returncode, stderr=error.stderr) from error


def _read_options(text: str) -> dict[str, str]:
    """Return the options of sbatch in a batch script that `submit` has written, of its first component, by name."""
    found = {}
    for match in _OPTION.finditer(text.partition("\n#SBATCH hetjob\n")[0]):
        with contextlib.suppress(ValueError, IndexError):  # a person has changed the script
            found[match["name"]] = shlex.split(match["value"])[0] if match["value"] else ""
    return found


def make_output_directory(options: Mapping[str, str], place: Path) -> None:
    """Create the directory of --output, because without it the job fails without a message.

    A directory whose name has a pattern such as %j is not created. `options` are those of sbatch, and `place` is its
    working directory.

    Raises:
        RunDirectoryError: The directory cannot be created.
    """
    parent = Path(_without_escapes(options.get("output", ""))).parent
    if "%" in str(parent):
        return
    directory = place / options.get("chdir", "") / parent
    try:
        make_directories(directory, 0o755)
    except OSError as error:
        raise RunDirectoryError(
            f"The directory of --output, {str(directory)!r}, cannot be created: {error.strerror}. Choose a file in a "
            "directory that you may write.",
            path=str(directory),
        ) from error


def find_outputs(spec: BatchSpec) -> tuple[str, ...]:
    """Return the paths of the files that Slurm will write for the batch script, as in `KnownJob.outputs`.

    They are absolute. Slurm's patterns %x and %u are filled in, others are kept.
    """
    return _find_outputs(make_sbatch_options(spec)[0], Path.cwd())


def _find_outputs(options: Mapping[str, str], place: Path) -> tuple[str, ...]:
    """Return `find_outputs` of a job with these options of sbatch, whose working directory is `place`."""
    default = DEFAULT_ARRAY_OUTPUT if "array" in options else DEFAULT_OUTPUT
    paths = [options.get("output", default), *(options[name] for name in ("error",) if name in options)]
    known = {"x": options["job-name"].replace("%", "%%")} if "job-name" in options else {}
    with contextlib.suppress(OSError, KeyError):  # the host has no name for this user
        known["u"] = getpass.getuser().replace("%", "%%")
    filled = [
        _without_escapes(path).replace("%", "%%")  # Slurm fills in no pattern if there is a backslash
        if "\\" in path
        else _NAME_PATTERN.sub(lambda match: known.get(match["letter"], match[0]), path)
        for path in paths
    ]
    directory = os.path.join(place, options.get("chdir", ""))
    return tuple(os.path.join(directory.replace("%", "%%"), path) for path in filled)


def _without_escapes(path: str) -> str:
    return re.sub(r"\\(.?)", r"\1", path)


def _write_draft(spec: BatchSpec, text: str) -> Path:
    """Write the text of the batch script to a new file in the runs directory, and return the path.

    This is done before the submission, so that a job whose script cannot be kept is not submitted. After the submission
    `submit` moves the file to `KnownJob.batch_script`.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    draft = spec.runs_directory / f"{spec.name}-{secrets.token_hex(4)}.draft"
    try:
        make_parent(spec.runs_directory)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        raise RunDirectoryError(
            f"The script cannot be kept in {str(spec.runs_directory)!r}: {error.strerror}. Choose a directory that you "
            "may write, on a file system that all hosts of the job share, with --runs-directory.",
            path=str(draft),
        ) from error
    return draft
