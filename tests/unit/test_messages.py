"""Messages survive encoding; any other bytes raise only MessageError."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import random
import typing
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.control.messages import (
    HEARTBEAT,
    MAX_STATE_BYTES,
    BarrierArrival,
    DesiredState,
    Message,
    ObservedState,
    Registration,
    ScriptState,
    TaskState,
    Usage,
    cluster_from_entries,
    cluster_to_entries,
    decode,
    decode_cluster,
    encode,
    encode_cluster,
    is_encoded_cluster,
    shrink,
)
from tf4slurm.errors import MessageError

KINDS: tuple[type[Message], ...] = typing.get_args(Message)
REGISTRATION = Registration(3, "n1", "10.0.0.1", 4000, "17-ab", "0.1.0")
MANY = cluster_from_entries(
    (0, "worker", index, f"node{index:05}", f"10.1.{index >> 8}.{index & 255}", 40001) for index in range(10_000)
)

WORDS = st.text(max_size=8)
NUMBER = st.integers(-(2**63), 2**63)
ENTRY = st.tuples(NUMBER, WORDS, NUMBER, WORDS, WORDS, NUMBER)
STATE = st.sampled_from(typing.get_args(TaskState))
STATUSES = st.builds(
    ObservedState,
    state=STATE,
    start_count=NUMBER,
    process_id=st.none() | NUMBER,
    returncode=st.none() | NUMBER,
    detail=st.none() | WORDS,
    tail=st.lists(WORDS, max_size=3).map(tuple),
    stop_signal=st.sampled_from([None, "SIGTERM", "SIGINT"]),
    script=st.builds(ScriptState, step=st.none() | NUMBER, has_saved=st.booleans()),
    usage=st.builds(Usage, NUMBER),
)
MESSAGES = st.one_of(
    st.builds(Registration, NUMBER, WORDS, WORDS, NUMBER, WORDS, WORDS, st.none() | WORDS),
    STATUSES,
    st.builds(DesiredState, NUMBER, NUMBER, st.booleans(), grace_period_seconds=st.floats(allow_nan=False)),
)
CLUSTERS = st.lists(ENTRY, min_size=1, max_size=5).map(cluster_from_entries)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


def decode_any(payload: bytes) -> Message:
    """Decode a message of the kind named in it."""
    name = json.loads(payload)[0]
    return decode(payload, next(kind for kind in KINDS if kind.__name__ == name))


@given(MESSAGES)
def test_message_survives_encoding(message: Message) -> None:
    assert decode_any(encode(message)) == message


@given(STATUSES, STATUSES)
def test_status_survives_as_its_differences_from_the_one_before(before: ObservedState, status: ObservedState) -> None:
    assert decode(encode(status, before), ObservedState, before) == status


def test_unchanged_fields_are_not_encoded() -> None:
    before = ObservedState("running", start_count=2, process_id=7, script=ScriptState(step=1, handles_stop=True))
    after = dataclasses.replace(before, script=ScriptState(step=2, handles_stop=True), process_id=None)
    assert encode(after, before) == b'["ObservedState",{"process_id":null,"script":{"step":2,"handles_stop":true}}]'
    assert encode(after, after) == b'["ObservedState",{}]'


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (ObservedState(), b'["ObservedState",{}]'),
        (
            ObservedState("exited", start_count=1, process_id=7, returncode=-9, tail=("a", "b")),
            b'["ObservedState",{"state":"exited","start_count":1,"process_id":7,"returncode":-9,"tail":["a","b"]}]',
        ),
    ],
)
def test_message_is_encoded_as_json(message: Message, wire: bytes) -> None:
    assert encode(message) == wire


def test_cluster_converts_to_entries_and_back() -> None:
    cluster = Cluster(
        (
            Member(0, Task("chief", 0), "n1", Address("10.0.0.1", 4000)),
            Member(1, Task("ps", 0), "n2", Address("fd00::2", 4001)),
            Member(5, Task("worker", 3), "n3", Address("10.0.0.3", 4002)),
        )
    )
    entries = cluster_to_entries(cluster)
    assert entries == [
        (0, "chief", 0, "n1", "10.0.0.1", 4000),
        (0, "ps", 0, "n2", "fd00::2", 4001),
        (3, "worker", 3, "n3", "10.0.0.3", 4002),
    ]
    assert cluster_from_entries(entries) == cluster


@pytest.mark.parametrize(
    "message", [REGISTRATION, ObservedState(), ScriptState(), DesiredState()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("kind", KINDS)
def test_message_of_another_kind_is_refused(message: Message, kind: type[Message]) -> None:
    if isinstance(message, kind):
        assert decode(encode(message), kind) == message
    else:
        with pytest.raises(MessageError, match=f"expected {kind.__name__}"):
            decode(encode(message), kind)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", DesiredState),
        (b"\xff\xfe", DesiredState),
        (b"[" * 100_000, DesiredState),
        (b"9" * 10_000, DesiredState),
        (b"null", DesiredState),
        (b"3", DesiredState),
        (b'"Or"', DesiredState),
        (b'["DesiredState"]', DesiredState),
        (b'["DesiredState",{},{}]', DesiredState),
        (b'["DesiredState",[]]', DesiredState),
        (b'["DesiredState",null]', DesiredState),
        (b'[["DesiredState"],{}]', DesiredState),
        (b'["Bogus",{}]', DesiredState),
        (b'["DesiredState",{"more":1}]', DesiredState),
        (b'["Registration",{}]', Registration),
        (b'["ObservedState",{"state":"dead"}]', ObservedState),
        (b'["ObservedState",{"state":["registered"]}]', ObservedState),
        (b'["ObservedState",{"state":null}]', ObservedState),
        (b'["ObservedState",{"start_count":"1"}]', ObservedState),
        (b'["ObservedState",{"start_count":1.0}]', ObservedState),
        (b'["ObservedState",{"start_count":true}]', ObservedState),
        (b'["ObservedState",{"tail":"ab"}]', ObservedState),
        (b'["ObservedState",{"tail":["a",1]}]', ObservedState),
        (b'["ObservedState",{"detail":1}]', ObservedState),
        (b'["Cluster",{"members":[]}]', DesiredState),
        (b'["ScriptState",{"metrics":[["loss",1,2]]}]', ScriptState),
        (b'["ScriptState",{"metrics":[["loss"]]}]', ScriptState),
        (b'["ScriptState",{"metrics":{}}]', ScriptState),
        (b'["ScriptState",{"barrier":{"name":"loaded"}}]', ScriptState),
        (b'["DesiredState",{"terminate":1}]', DesiredState),
        (b'["DesiredState",{"terminate":null}]', DesiredState),
        (b'["DesiredState",{"grace_period_seconds":"5"}]', DesiredState),
    ],
)
def test_other_bytes_are_refused_with_an_explanation(payload: bytes, kind: type[Message]) -> None:
    with pytest.raises(MessageError, match="is not a control message of this version of tf4slurm") as caught:
        decode(payload, kind)
    assert len(str(caught.value)) < 1000


@given(payload=st.binary() | JSON.map(lambda value: json.dumps(value).encode()), kind=st.sampled_from(KINDS))
def test_any_bytes_decode_or_raise_message_error(payload: bytes, kind: type[Message]) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(decode(payload, kind), kind)


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_fields_decode_and_survive_or_raise_message_error(kind: type[Message], data: st.DataObject) -> None:
    names = st.sampled_from([*kind.__dataclass_fields__, "more"])
    fields = data.draw(st.dictionaries(names, JSON | STATE | st.lists(ENTRY.map(list), max_size=2), max_size=4))
    payload = json.dumps([kind.__name__, fields]).encode()
    with contextlib.suppress(MessageError):
        message = decode(payload, kind)
        assert repr(decode(encode(message), kind)) == repr(message)  # repr: NaN is not equal to itself


@given(message=MESSAGES, data=st.data())
def test_damaged_message_decodes_or_raises_message_error(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        assert isinstance(decode(bytes(payload), type(message)), type(message))


# The cluster spec


@given(NUMBER, CLUSTERS)
def test_cluster_survives_encoding(attempt: int, cluster: Cluster) -> None:
    assert decode_cluster(encode_cluster(attempt, cluster)) == (attempt, cluster)


@given(CLUSTERS | st.just(MANY), MESSAGES)
def test_encoded_cluster_differs_from_other_messages(cluster: Cluster, message: Message) -> None:
    assert is_encoded_cluster(encode_cluster(1, cluster))
    assert not is_encoded_cluster(encode(message))
    assert not is_encoded_cluster(HEARTBEAT)


def test_cluster_of_10_000_tasks_with_equal_ports_is_smaller_than_200_kb() -> None:
    payload = encode_cluster(1, MANY)
    assert decode_cluster(payload) == (1, MANY)
    assert len(payload) < 200_000


def test_cluster_of_100_000_tasks_survives_encoding() -> None:
    chance = random.Random(7)
    cluster = cluster_from_entries(
        (
            0,
            "worker",
            index,
            f"node{index:05}.cluster.example.org",
            f"fd00::{index:x}",
            chance.randrange(32_768, 61_000),
        )
        for index in range(100_000)
    )
    payload = encode_cluster(1, cluster)
    assert decode_cluster(payload) == (1, cluster)
    assert len(payload) < 16 * 2**20  # the limit of a task


ENTRY_TEXT = b'[0,"ps",0,"n","h",4]'


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        encode_cluster(1, MANY)[:-10],
        zlib.compress(b"[" * 100),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b"\xff\xfe"),
        zlib.compress(encode(DesiredState())),
        zlib.compress(b'[1,[[0,"ps",0,"n","h"]]]'),
        zlib.compress(b'[1,[[0,"ps",0,"n","h",4,5]]]'),
        zlib.compress(b"[1,[" + ENTRY_TEXT + b',[1,"ps","1","n","h",4]]]'),
        zlib.compress(b'[1,[[0,"ps",true,"n","h",4]]]'),
        zlib.compress(b'[1,[[0,"ps",0.0,"n","h",4]]]'),
        zlib.compress(b'[1,[[0,"ps",0,3,"h",4]]]'),
        zlib.compress(b'[1,[[0,"ps",0,"n",["h"],4]]]'),
        zlib.compress(b'[1,[[0,"ps",0,"n","h",null]]]'),
        zlib.compress(b'["1",[' + ENTRY_TEXT + b"]]"),
        zlib.compress(b"[true,[" + ENTRY_TEXT + b"]]"),
        zlib.compress(b"[1,[" + ENTRY_TEXT + b"],2]"),
        zlib.compress(b"[1]"),
        zlib.compress(b"[1,[]]"),
        zlib.compress(b"[1,7]"),
        zlib.compress(b'{"attempt":1}'),
        zlib.compress(b'{"attempt":1,"entries":[]}'),
        zlib.compress(b"null"),
        zlib.compress(b"9" * 10_000),
        zlib.compress(bytes(100 * 2**20)),  # 100 MB in 100 KB
        zlib.compress(b"[1,[" + b",".join([ENTRY_TEXT] * 2_000_000) + b"]]"),
    ],
    ids=[
        *("nothing", "no zlib", "truncated", "no JSON", "nested", "no UTF-8", "order", "a field too few"),
        *("a field too many", "text for an index", "true for an index", "float for an index", "number for a node"),
        *("list for a host", "null for a port", "text for an attempt", "true for an attempt", "a column too many"),
        *("no entries", "no tasks", "number for entries", "an object", "an object of two", "null", "a long number"),
        *("bomb of zeros", "bomb of entries"),
    ],
)
def test_bytes_that_are_no_cluster_are_refused_with_an_explanation(payload: bytes) -> None:
    with pytest.raises(MessageError, match="is not a cluster spec of this version of tf4slurm") as caught:
        decode_cluster(payload)
    assert len(str(caught.value)) < 1000


@given(st.binary() | JSON.map(lambda value: zlib.compress(json.dumps(value).encode())))
def test_any_bytes_are_a_cluster_or_raise_message_error(payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(decode_cluster(payload)[1], Cluster)


@given(cluster=CLUSTERS, data=st.data())
def test_damaged_cluster_decodes_or_raises_message_error(cluster: Cluster, data: st.DataObject) -> None:
    payload = bytearray(encode_cluster(1, cluster))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        assert isinstance(decode_cluster(bytes(payload))[1], Cluster)


# The longest status


METRICS = tuple((f"metric-{number}", float(number)) for number in range(60_000))
LINES = ("\U0001f600" * 10_000,) * 30


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def status_of_bytes(size: int) -> ObservedState:
    """Return a status whose message has exactly this many bytes, all but few of them in its tail."""
    rest = len(encode(ObservedState(tail=("",))))
    return ObservedState(tail=("x" * (size - rest),))


def test_status_within_the_limit_is_not_shrunk(caplog: pytest.LogCaptureFixture) -> None:
    status = status_of_bytes(MAX_STATE_BYTES)
    assert len(encode(status)) == MAX_STATE_BYTES
    assert shrink(status) is status
    assert warnings_in(caplog) == []


def test_status_one_byte_above_the_limit_is_shrunk_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert shrink(status_of_bytes(MAX_STATE_BYTES + 1)) == ObservedState()
    assert len(warnings_in(caplog)) == 1


def test_log_lines_are_left_out_before_metrics_and_the_last_lines_are_kept() -> None:
    status = ObservedState(
        "exited", returncode=3, script=ScriptState(step=9, metrics=METRICS[:1000]), tail=(*LINES, "last")
    )
    found = shrink(status)
    assert len(encode(found)) <= MAX_STATE_BYTES
    assert found == dataclasses.replace(status, tail=found.tail)
    assert found.tail
    assert status.tail[-len(found.tail) :] == found.tail


def test_metrics_are_left_out_from_the_end_once_there_are_no_log_lines() -> None:
    waiting = BarrierArrival("loaded", "token", 3.0, ("worker",))
    script = ScriptState(step=9, metrics=METRICS, has_saved=True, completion="failed", barrier=waiting)
    status = ObservedState("exited", start_count=2, process_id=7, returncode=3, detail="why", tail=LINES, script=script)
    found = shrink(status)
    assert len(encode(found)) <= MAX_STATE_BYTES
    kept = found.script.metrics
    assert kept
    assert kept == METRICS[: len(kept)]
    assert found == dataclasses.replace(status, tail=(), script=dataclasses.replace(script, metrics=kept))


@given(STATUSES, st.lists(st.text(max_size=300), max_size=8), st.integers(0, 40), st.integers(500, 3000))
def test_shrunk_status_fits_and_keeps_the_rest(
    status: ObservedState, lines: list[str], metrics: int, max_bytes: int
) -> None:
    script = dataclasses.replace(status.script, metrics=METRICS[:metrics])
    status = dataclasses.replace(status, tail=tuple(lines), script=script)
    found = shrink(status, max_bytes)
    assert len(encode(found)) <= max_bytes
    assert status.tail[len(status.tail) - len(found.tail) :] == found.tail
    assert METRICS[: len(found.script.metrics)] == found.script.metrics
    script = dataclasses.replace(script, metrics=found.script.metrics)
    assert found == dataclasses.replace(status, tail=found.tail, script=script)
