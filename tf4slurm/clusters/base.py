"""The interface of all clusters whose chief is this process, such as a notebook, and the chief's part in the job.

A cluster is a job with --external-chief: its launcher starts ps and workers, and this process joins it as the chief.
The chief's agent is a sidecar of this process (`joining/chief_program.py`), which reports the end of this process.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import escape

from tf4slurm.clusters.notices import NoticePrinter
from tf4slurm.control.messages import cluster_from_entries
from tf4slurm.control.rules import RESTART_SECONDS
from tf4slurm.errors import (
    OptionError,
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
    Tf4SlurmError,
    UnknownJobError,
)
from tf4slurm.jobs.formatting import as_sentence, format_count
from tf4slurm.jobs.progress import print_notice
from tf4slurm.jobs.run_directory import RunDirectory
from tf4slurm.jobs.schema import ResultFile
from tf4slurm.script_client.tf4slurm_sidecar import send_end, start_sidecar, wait_for_exit
from tf4slurm.scripts.channel import find_script_channel, replace_script_channel
from tf4slurm.scripts.sidecar_process import read_answer
from tf4slurm.system.versions import explain_difference, read_versions
from tf4slurm.tensorflow.running_cluster import (
    connected_cluster,
    running_cluster,
    set_connected_cluster,
    set_running_cluster,
)

if TYPE_CHECKING:
    from tf4slurm.job import Job
    from tf4slurm.jobs.status import JobStatus

_CONTROL_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 15.0  # after the timeout for the cluster, which the launcher reports
_END_SECONDS = 15.0
_ATTACH_SECONDS = 600.0
_Cluster = TypeVar("_Cluster", bound="NotebookCluster")


class NotebookCluster(abc.ABC):
    """ps and workers whose chief is this process, from `start` to `close`, or during a `with` block.

    The tasks belong to an ordinary job, with logs and a report in its `run_directory`. They end with this process, also
    if it is killed. Variables and models can be used in all cells until `close`. TensorFlow can connect a process to
    one cluster only: for another one, restart the notebook's kernel.

    Attributes:
        cluster: The cluster spec, such as {"chief": ["127.0.0.1:40123"], "ps": […], "worker": […]}. Empty before
            `start`.
        run_directory: The run directory of the job, or None before `start`.
    """

    def __init__(self, start_timeout_seconds: float) -> None:
        self.cluster: dict[str, list[str]] = {}
        self.run_directory: RunDirectory | None = None
        self._timeout_seconds = start_timeout_seconds
        self._sidecar: subprocess.Popen[str] | None = None
        self._process = os.getpid()
        self._outer_channel: str | None = None  # of the job in whose script this process runs
        self._is_closed = False
        self._is_leaving = False
        self._advice = ""  # after `restart`
        self._has_compared = False  # the versions of TensorFlow and Python

    # The job of the cluster

    @abc.abstractmethod
    def _launch(self) -> RunDirectory:
        """Start the job. Return its run directory, as soon as it exists."""

    @abc.abstractmethod
    def _has_launcher_ended(self) -> bool:
        """Return whether the launcher has exited or is lost, as far as this is known."""

    @abc.abstractmethod
    def _end_launcher(self, *, is_started: bool) -> None:
        """Wait for the end of the job. End it, if it does not end by itself or the cluster has not started."""

    @abc.abstractmethod
    def _describe_launch(self) -> str:
        """Return the launcher's last output, for the error message of a failed start."""

    @abc.abstractmethod
    def _scale(self, num_added: int) -> None:
        """Add workers, or remove added ones, so that there are `num_added` besides those of the start."""

    # The public interface

    def start(self: _Cluster) -> _Cluster:
        """Start the tasks, and join them as their chief. Return this object. Idempotent until `close`.

        The servers of the tasks may still import TensorFlow: `strategy` and `wait_until_ready` wait for them.

        Raises:
            RendezvousError: The job could not be started, or ended at once. The message has the reason. Or the cluster
                is closed, or this process is the chief of another cluster.
            RendezvousTimeoutError: The job did not start in time.
        """
        if self._is_closed:
            raise RendezvousError(self._advice or f"The cluster is closed: make a new {type(self).__name__}.")
        if self.cluster:
            return self
        _check_free()
        try:
            self.run_directory = self._launch()
            self._join(self.run_directory)
        except BaseException as error:
            self._is_closed = True
            if self._sidecar is not None:
                send_end(self._sidecar, "")
            self._end_launcher(is_started=False)
            if isinstance(error, RendezvousError):
                lines = [line for line in self._describe_launch().splitlines() if line not in str(error)]
                raise type(error)("\n".join([str(error), *lines])) from error
            raise
        self._begin()
        return self

    def restart(self, *, timeout_seconds: float = _ATTACH_SECONDS) -> None:
        """Start all ps and workers again in the same allocation, for another chief. Print what to do next.

        This process is no chief any more, and the variables of the cluster are lost. Restart the notebook's kernel, and
        call `attach` of this class there. `Checkpoints` and `fit(checkpoints=…)` resume the training.

        The method is also for a kernel that must be restarted for other reasons. After the loss of a ps, the job waits
        300 s for this call.

        Args:
            timeout_seconds: Timeout in seconds for another chief to attach (default 600). The job then ends with exit
                code 6.

        Raises:
            ValueError: `timeout_seconds` is not positive.
            RendezvousError: The cluster was not started, is closed, stops or has ended. The message has the reason.
        """
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds is {timeout_seconds!r}: give a positive number of seconds.")
        self._check_running(is_failure_allowed=True)
        assert self._sidecar is not None
        self._is_leaving = True
        send_end(self._sidecar, json.dumps(float(timeout_seconds)))
        try:
            read_answer(self._sidecar, _ANSWER_SECONDS)
        except RendezvousError as error:
            self._leave(f"The cluster could not be restarted, and has ended or will end. {error}")
            raise RendezvousError(self._advice) from error
        self._leave(
            f"The cluster waits {timeout_seconds:g} s for another chief. Restart the kernel, and call "
            f"{self._attach_call} there."
        )
        print(self._advice)

    def close(self) -> None:
        """End all tasks: the job is COMPLETED. Idempotent.

        Its variables and models cannot be used any more. This method is also called when the process or the notebook's
        kernel exits.
        """
        self._close(0)

    def __enter__(self: _Cluster) -> _Cluster:
        """Start the tasks. The errors are those of `start`."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all tasks. After an exception the job is FAILED, with the exception as its cause."""
        self._close(0 if error is None else 1, error)

    def strategy(self, *, placement: str = "bytes", **options: Any) -> Any:
        """Return a tf.distribute.ParameterServerStrategy for this cluster. `options` are its further arguments.

        Args:
            placement: As for `parameter_server_strategy`.

        Raises:
            ValueError: `placement` is unknown.
            RendezvousError: The cluster was not started, is closed or has ended. The message has the reason.
            RendezvousTimeoutError: Servers did not start in time. The message names them and a log file.
        """
        directory = self._check_running()
        self.wait_until_ready()
        from tf4slurm.tensorflow.running_cluster import make_strategy

        set_connected_cluster(self)
        return make_strategy(self.cluster, directory, self._timeout_seconds, placement, options)

    def wait_until_ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the servers of all ps and workers answer, at most `timeout_seconds` (default: the start timeout).

        Print a notice if the tasks have another version of TensorFlow or Python than this process.

        Raises:
            RendezvousError: The cluster was not started, is closed or has ended. The message has the reason.
            RendezvousTimeoutError: Servers, which the message names, did not answer in time.
        """
        directory = self._check_running()
        from tf4slurm.tensorflow.servers import describe_missing, wait_for_servers

        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if missing := wait_for_servers(self.cluster, seconds):
            self._check_running()
            raise RendezvousTimeoutError(describe_missing(missing, directory, seconds))
        if not self._has_compared:
            self._has_compared = True
            versions = directory.read_trusted_job().versions
            if difference := explain_difference(read_versions(sys.executable), versions):
                print_notice(f"{difference}: training may fail or hang. Use one environment for both.")

    def scale(self, workers: int) -> None:
        """Change the number of workers: add some, or remove some that were added. Return at once.

        A new worker takes part in training as soon as its server answers. One that leaves ends its running closure
        first. `fit`, `run_steps` and `run_shards` go on meanwhile.

        Args:
            workers: The new number of workers. Those with which the cluster has started stay until its end.

        Raises:
            OptionError: `workers` is less than the number of workers with which the cluster has started.
            RendezvousError: The cluster was not started, is closed or has ended. The message has the reason.
        """
        self._check_running()
        first = len(self.cluster["worker"])
        if type(workers) is not int or workers < first:
            raise OptionError(
                f"workers={workers!r}: {self._name} has started with {format_count(first, 'worker')}, and these stay "
                f"until its end. Give {first} or more. For fewer: close it, restart the kernel, start another cluster.",
                option="workers",
            )
        self._scale(workers - first)

    @property
    def job(self) -> Job:
        """The job of this cluster, with its report and its plot. It can be read after `close`, too.

        Raises:
            UnknownJobError: The cluster was not started.
        """
        if self.run_directory is None:
            raise UnknownJobError("This cluster was not started yet: call start(), or use it in a with block.")
        from tf4slurm.job import Job

        return Job.find(str(self.run_directory.path))

    def status(self) -> JobStatus:
        """Return the state of the job and its tasks. The errors are those of `job`."""
        return self.job.status()

    def logs(self, *tasks: str) -> str:
        """Return the output of tasks such as "ps/0" or "worker/*", by default of all tasks, sorted by time.

        Raises:
            UnknownTaskError: No task matches.
            UnknownJobError: The cluster was not started.
        """
        return self.job.logs(*tasks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}: {self._state})"

    def _repr_html_(self) -> str:
        try:
            return self.job._repr_html_()
        except UnknownJobError:
            return f"<pre>{escape(repr(self))}</pre>"

    def find_end(self, timeout_seconds: float) -> str:
        """Return why the variables are lost, and what to do. Return "" if they are not lost within the timeout.

        They are lost with the cluster, which has ended, or with a ps.
        """
        if self._is_closed:
            return self._advice or "The cluster is closed. Restart the kernel, and start a new cluster."
        if end := self._find_end(timeout_seconds):
            return f"The cluster has ended. {end} Close it, restart the kernel, and start a new cluster."
        channel = find_script_channel() if self._sidecar is not None else None
        if channel is None or not channel.desired.failure_reason:
            return ""
        return (
            f"{channel.desired.failure_reason} Call restart() on the cluster within {RESTART_SECONDS:g} s: it starts "
            f"ps and workers again in the same allocation. Then restart the kernel, and call {self._attach_call} there."
        )

    def _find_end(self, timeout_seconds: float) -> str:
        """Return why the cluster has ended, as a sentence. Return "" if it has not ended within the timeout.

        Return at once if it has failed and waits for `restart`.
        """
        channel = find_script_channel() if self._sidecar is not None else None
        if channel is not None and channel.is_open:
            channel.wait_until(
                lambda: bool(channel.desired.terminate_reason or channel.desired.failure_reason) or not channel.is_open,
                timeout_seconds,
            )
        result = None if self.run_directory is None else self.run_directory.read(ResultFile)
        if result is not None:
            return result.reason
        if channel is not None and channel.desired.terminate_reason:
            return channel.desired.terminate_reason
        if self._sidecar is not None and self._sidecar.poll() is not None:
            return self._explain_loss()
        return ""

    def _explain_loss(self) -> str:
        """Return why the launcher has not written the result, as a sentence. For example, Slurm killed it."""
        with contextlib.suppress(Tf4SlurmError):
            status = self.status()
            if status.reason and not status.can_change:
                return as_sentence(status.reason)
        return "The launcher of its job is lost."

    # The chief

    @property
    def _name(self) -> str:
        return "a new cluster" if self.run_directory is None else self.run_directory.path.name

    @property
    def _attach_call(self) -> str:
        return f"tf4slurm.{type(self).__name__}.attach({self._name!r})"

    @property
    def _state(self) -> str:
        if self._is_closed:
            return "left" if self._advice else "closed"
        if not self.cluster:
            return "not started"
        return "ended" if self._find_end(0) else "running"

    def _begin(self) -> None:
        """Let this process be the chief of this cluster until `close` or `restart`."""
        set_running_cluster(self)
        atexit.register(self._close_at_exit)
        channel = find_script_channel()
        if channel is not None and self.run_directory is not None:
            printer = NoticePrinter(self.run_directory, channel, self.find_end, self._has_left)
            threading.Thread(target=printer.run, name="tf4slurm-cluster", daemon=True).start()

    def _has_left(self) -> bool:
        return self._is_closed or self._is_leaving

    def _attach(self, directory: RunDirectory) -> None:
        """Join a running job as its next chief.

        Raises:
            JobStateError: The job waits for no chief.
            RendezvousError, RendezvousTimeoutError: As for `start`.
        """
        from tf4slurm.joining.attach import explain_refusal

        _check_free()
        self.run_directory = directory
        try:
            self._join(directory)
        except BaseException as error:
            self._is_closed = True
            if self._sidecar is not None:
                send_end(self._sidecar, "")
                wait_for_exit(self._sidecar, _END_SECONDS)
            if isinstance(error, RendezvousClosedError):
                raise explain_refusal(self._name, error) from error
            raise
        self._begin()

    def _join(self, directory: RunDirectory) -> None:
        """Join the job as its chief. Return when the cluster has formed."""
        from tf4slurm.clusters.network import check_service  # imported here: these import asyncio
        from tf4slurm.joining.join import check_network, wait_for_control

        seconds = self._timeout_seconds
        if not wait_for_control(
            directory, seconds, poll_seconds=_CONTROL_POLL_SECONDS, has_ended=self._has_launcher_ended
        ):
            if self._has_launcher_ended():
                raise RendezvousError("The cluster could not be started:")
            raise RendezvousTimeoutError(f"{str(directory.control)!r} was not written within {seconds:g} s.")
        check_network(directory.path.name, directory.read_trusted_job().process)
        check_service(directory)
        request = {"run_directory": str(directory.path)}
        self._sidecar = start_sidecar("joining.chief_program", request, in_own_session=True)
        answer = read_answer(self._sidecar, seconds + _ANSWER_SECONDS)
        self.cluster = cluster_from_entries(answer["entries"]).to_dictionary()
        self._outer_channel = replace_script_channel(answer["channel"])

    def _check_running(self, *, is_failure_allowed: bool = False) -> RunDirectory:
        """Return the run directory. Raise RendezvousError if the cluster does not run, or has failed.

        `is_failure_allowed` is for a call that restarts a cluster that has failed.
        """
        if self._is_closed:
            raise RendezvousError(self.find_end(0))
        if self.run_directory is None or not self.cluster:
            raise RendezvousError("The cluster is not running. Call start(), or use it in a with block.")
        if end := (self._find_end(0) if is_failure_allowed else self.find_end(0)):
            raise RendezvousError(f"The cluster has ended. {end}" if is_failure_allowed else end)
        return self.run_directory

    def _close_at_exit(self) -> None:
        # `last_value` is an uncaught exception, which does not end an interactive interpreter (`ps1`).
        error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
        self._close(0 if error is None else 1, error)

    def _leave(self, advice: str) -> None:
        """Forget the job, which this process has left. `advice` is the message of each later call."""
        assert self._sidecar is not None
        self._is_closed, self._advice = True, advice
        atexit.unregister(self._close_at_exit)
        set_running_cluster(None)
        replace_script_channel(self._outer_channel)
        wait_for_exit(self._sidecar, _END_SECONDS)

    def _close(self, returncode: int, error: BaseException | None = None) -> None:
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        if self._sidecar is None:
            return
        set_running_cluster(None)
        replace_script_channel(self._outer_channel)
        end = [returncode, *(("", "") if error is None else (type(error).__name__, " ".join(str(error).split())))]
        send_end(self._sidecar, json.dumps(end))
        self._end_launcher(is_started=True)
        wait_for_exit(self._sidecar, _END_SECONDS)


def _check_free() -> None:
    """Raise RendezvousError if this process cannot be the chief of another cluster."""
    other = running_cluster()
    if isinstance(other, NotebookCluster):
        raise RendezvousError(f"This process is the chief of {other._name} already. Close that cluster first.")
    connected = connected_cluster()
    if isinstance(connected, NotebookCluster):
        raise RendezvousError(
            f"TensorFlow has connected this process to {connected._name}, and can connect to one cluster only. "
            "Restart the kernel, or the process, for another cluster."
        )
