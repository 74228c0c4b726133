"""Let the workers of a running ParameterServerStrategy change, if TensorFlow's version allows it.

TensorFlow's coordinator, in the chief (tensorflow/python/distribute/coordinator/cluster_coordinator.py):

    script ── schedule() ──> closure queue      _queue_lock
                                  │ get()
    thread per worker      Worker._process_closure, _process_resource_closure
                                  │ in WorkerPreemptionHandler.wait_on_failure; if the worker has failed:
                                  │ put_back(), _is_dead_with_error = error, set _cluster_due_for_update_or_finish,
                                  │ wait for _worker_up_cond; then _on_worker_recovery() creates its datasets again
    update thread          WorkerPreemptionHandler._preemption_handler, under _cluster_update_lock:
                           wait for _cluster_due_for_update_or_finish, Context.update_server_def(all servers), notify

`update_server_def` returns when all servers answer. So TensorFlow alone cannot add a worker, let one leave or take
another address, or use one again while another one is missing.

**As long as nothing needs that, TensorFlow works alone**: its handler, workers, coordinator and strategy are its own.
Two things differ. The update thread waits for missing workers in Python, not in C++, so that the wait can end
(`_update_when_all_answer`). The index of a worker is a tensor in the chief (`WorkerIndex`).

**Then `_switch` makes the workers elastic**, for the rest of the process. The reason is one of three: the agent sends
other workers than the first ones, a failed worker has answered again for 10 s while another worker is missing, or a ps
is lost while the update thread waits for a worker. The update thread ends. In its place, the thread of `WorkerWatch`
calls `ElasticWorkers`, which updates the workers that answer.

These modules use the following words for a worker:

    failed         a closure on it ended with an error which shows that its server had ended or did not answer;
                   TensorFlow's word is dead
    missing        its server does not answer now
    connected      TensorFlow's ServerDef has its address; the opposite is disconnected ("left out" in the log)
    in use         it is connected, and may take closures
    out            it is not in use, and runs no closure: it has failed, is released, or is not connected yet
    joined         it is not one of the first workers, with which the strategy was created

A ps is lost if a new connection to its address fails or ends, or if what answers there is not an HTTP/2 server. If the
connection or the answer times out, the ps is only silent, not lost (`network.reachability.is_answering`).

    elastic               the time before the switch, and the switch
    elastic_workers       the time after it: which workers are in use, and the threads of the others
    elastic_states        the states of a worker, and the events that change them
    elastic_resources     datasets, tables and variables of joined workers
    elastic_connections   which servers answer, and how RPCs to the others end
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tf4slurm.cluster import Address
from tf4slurm.scripts.channel import ScriptChannel
from tf4slurm.tensorflow.elastic_connections import check_servers
from tf4slurm.tensorflow.elastic_resources import WorkerIndex
from tf4slurm.tensorflow.versions import ELASTIC_WORKERS

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 10.0  # workers that were lost together return at about the same time
_MAX_UNUSABLE = 50  # in one message

_PRIVATE_NAMES = {
    "coordinator": {
        "_cluster": "its workers, closure queue and failure handler",
        "_create_per_worker_resources": "find new datasets and tables, which a joined worker needs, too",
        "_create_per_worker_variables": "the same for variables on workers",
    },
    "cluster": {
        "workers": "append joined workers",
        "closure_queue": "put back the closure of a worker that is not in use",
        "resource_cancellation_mgr": "create resources on joined workers",
        "failure_handler": "see there",  # the next part of this table
    },
    "failure_handler": {
        "_server_def": "recognize the calls of the update thread; the servers at the start",
        "_cluster_due_for_update_or_finish": "end the update thread",
        "_cluster_update_lock": "notify the threads of failed workers",
        "_worker_up_cond": "notify the threads of failed workers",
        "_should_preemption_thread_run": "end with the cluster",
        "_validate_preemption_failure": "let a joined worker leave on which the first closure fails",
    },
    "worker": {
        "_process_closure": "run no closure on a worker that is not in use",
        "_process_resource_closure": "the same",
        "_on_worker_recovery": "wait until the worker is in use; create its resources again",
        "_is_dead_with_error": "find failed workers; mark disconnected ones",
        "_resource_tracking_lock": "mark the resources of a disconnected worker as lost",
        "_resource_remote_value_refs": "the same; find resources that are older than a joined worker",
        "_set_resources_aborted": "mark the resources of a disconnected worker as lost",
        "_register_and_schedule_resource_closure": "create resources on joined workers",
    },
    "queue": {
        "clear_tag_unlocked": "create no resource on a disconnected worker",
        "_queue_lock": "the same",
        "_cancellation_mgr": "tell cancelled closures from failed ones",
    },
}
"""By class, the private attributes of TensorFlow that the modules `elastic*` use, and the use of each."""


def let_workers_change(coordinator: Any, cluster: Mapping[str, Sequence[str]], channel: ScriptChannel | None) -> None:
    """Let workers join and leave when the agent requests it, and let failed workers return one by one.

    The chief reports the workers in use to the agent, or the reason why they cannot change. If they cannot change,
    TensorFlow's own recovery remains: it waits until all failed workers are back.

    Args:
        coordinator: A new ClusterCoordinator, which has scheduled nothing yet.
        cluster: The cluster spec with which the coordinator's strategy has connected.
        channel: The connection to the agent. With None, the workers of `cluster` are used, and nothing is reported.
    """
    reason = _find_obstacle(coordinator)
    if not reason:
        WorkerWatch(coordinator, cluster, channel).start()
    elif channel is not None:
        channel.send(workers_error=reason)


class WorkerWatch:
    """Reports the workers in use to the agent, and makes the workers elastic when that is needed."""

    def __init__(self, coordinator: Any, cluster: Mapping[str, Sequence[str]], channel: ScriptChannel | None) -> None:
        """Let TensorFlow call `_update_when_all_answer` in place of `Context.update_server_def`.

        The arguments are those of `let_workers_change`.
        """
        self._coordinator = weakref.ref(coordinator)  # its destructor ends the cluster
        self._cluster = coordinator._cluster
        self._handler = self._cluster.failure_handler
        self._workers = _parse(enumerate(cluster["worker"]))
        self._ps = _parse(enumerate(cluster["ps"]))
        self._channel = channel
        self._reported: dict[str, object] = {}
        self._reason = ""  # why the workers must become elastic
        self._elastic: Any = None  # the ElasticWorkers
        self._update_server_def = context.context().update_server_def
        context.context().update_server_def = self._update_when_all_answer
        for worker in self._cluster.workers:
            worker.worker_index = WorkerIndex(worker.worker_index)

    def start(self) -> None:
        """Report the workers in use. Start the thread that reports each change and updates elastic workers."""
        self._report()
        threading.Thread(target=self._run, name="tf4slurm-workers", daemon=True).start()

    def _run(self) -> None:
        while self._handler._should_preemption_thread_run and threading.main_thread().is_alive():
            # The agent sends no workers until some have changed. Then the first workers are to be used.
            workers = _parse(self._channel.desired.workers if self._channel is not None else ()) or self._workers
            if workers != self._workers:
                self._reason = self._reason or "other workers are to be used"
            if self._elastic is not None:
                self._elastic.update(workers)
            elif self._reason:
                self._switch()
            self._report()
            time.sleep(_POLL_SECONDS)

    def _switch(self) -> None:
        """Make the workers elastic. The first call of `ElasticWorkers.update` comes 0.2 s later.

        From now on, a thread that registers a function on the workers holds `_context_lock`. In the 0.2 s, threads that
        began a registration before, without the lock, can finish it. This time is a guess, not a guarantee: TensorFlow
        sends the function to each worker, and does not wait for the answers. If a registration takes longer, and a
        worker is disconnected meanwhile, the registration fails, and the script gets the error.
        """
        from tf4slurm.tensorflow.elastic_workers import ElasticWorkers  # subclasses private classes of TensorFlow

        coordinator = self._coordinator()
        if coordinator is not None:
            logger.info("TensorFlow's workers become elastic: %s", self._reason)
            self._elastic = ElasticWorkers(coordinator, self._cluster, self._workers, self._ps, self._update_server_def)
            self._handler._cluster_due_for_update_or_finish.set()  # the update thread ends in its update

    def _report(self) -> None:
        if self._channel is None:
            return
        if self._elastic is not None:
            workers, unusable = self._elastic.needed, tuple(self._elastic.unusable.items())
        else:
            workers, unusable = self._workers.keys() - self._find_failed(), ()
        # other unusable workers follow when the first have left
        changes: dict[str, object] = {"workers": tuple(sorted(workers)), "unusable_workers": unusable[:_MAX_UNUSABLE]}
        if changes != self._reported:
            self._reported = changes
            self._channel.send(**changes)

    def _find_failed(self) -> set[int]:
        return {index for index, worker in enumerate(self._cluster.workers) if worker._is_dead_with_error}

    def _update_when_all_answer(self, server_def: Any) -> None:
        """Wait until all servers answer, and call TensorFlow's `update_server_def`, which would wait for them in C++.

        TensorFlow's update thread calls this method. In the wait, one of these cases holds:

        * A ps is lost: the workers must become elastic, so that the wait ends.
        * All workers and ps answer: update, and return.
        * All workers answer, but a ps does not: wait.
        * Each failed worker is missing: wait.
        * Some failed workers are back, but others, or workers that have not failed, are missing: wait 10 s for these.
          Then the workers must become elastic.

        If the workers must become elastic for any reason, or the cluster has been stopped, end the update thread. If
        `server_def` is that of another strategy, which connects now, call TensorFlow's function at once.
        """
        if server_def is not self._handler._server_def:  # another strategy connects
            self._update_server_def(server_def)
            return
        back_since = time.monotonic()
        while self._handler._should_preemption_thread_run and not self._reason:
            failed = {index: self._workers[index] for index in self._find_failed()}
            missing = _find_missing(failed) or _find_missing(self._workers)  # failed ones, or without these any others
            ps = check_servers(self._ps)
            if None in ps.values():
                self._reason = "a ps is lost, which ends the wait for workers"
            elif not missing and all(ps.values()):
                self._update_server_def(server_def)
                return
            elif not missing or failed.keys() <= set(missing):
                back_since = time.monotonic()  # no failed worker is back, or all are and a ps is silent
            elif time.monotonic() - back_since > _PATIENCE_SECONDS:
                self._reason = f"worker/{missing[0]} is missing, but another worker is back"
            time.sleep(_POLL_SECONDS)
        raise SystemExit  # ends a thread without a message, and releases its locks


def _find_missing(servers: Mapping[int, Address]) -> list[int]:
    """Return the indices of the servers that do not answer, whatever the reason."""
    return [index for index, answer in check_servers(servers).items() if not answer]


def _find_obstacle(coordinator: Any) -> str:
    """Return why the workers of a coordinator cannot change, or "" if they can. The text has no full stop."""
    if not ELASTIC_WORKERS.includes(tf.__version__):
        first, last = ELASTIC_WORKERS.first, ELASTIC_WORKERS.last
        return f"TensorFlow {tf.__version__} is not one of the versions whose workers can change: {first} to {last}"
    cluster: Any = getattr(coordinator, "_cluster", None)
    handler = getattr(cluster, "failure_handler", None)
    if type(handler).__name__ != "WorkerPreemptionHandler":  # TF_PSS_ENABLE_COORDINATION_SERVICE selects another one
        return f"TensorFlow handles failures by its {type(handler).__name__}"
    parts = {"coordinator": coordinator, "cluster": cluster, "failure_handler": handler}
    parts |= {"worker": cluster.workers[0], "queue": cluster.closure_queue}
    for part, names in _PRIVATE_NAMES.items():
        for name in names:
            if not hasattr(parts[part], name):
                return f"The {part} of TensorFlow {tf.__version__} has no {name}"
    return ""


def _parse(texts: Iterable[tuple[int, str]]) -> dict[int, Address]:
    return {index: Address.from_text(text) for index, text in texts}
