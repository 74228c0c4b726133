"""Messages survive the wire, and whatever is not one is a MessageError and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.cluster import Address, Cluster, Member, Task
from tf4slurm.control.messages import (
    Hello,
    Map,
    Message,
    Order,
    Refusal,
    Report,
    Status,
    TaskState,
    Usage,
    decode,
    encode,
)
from tf4slurm.errors import MessageError

KINDS: tuple[type[Message], ...] = typing.get_args(Message)
HELLO = Hello(3, "n1", "10.0.0.1", 4000, "17-ab", "0.1.0")

WORDS = st.text(max_size=8)
NUMBER = st.integers(-(2**63), 2**63)
ENTRY = st.tuples(WORDS, NUMBER, WORDS, WORDS, NUMBER)
STATE = st.sampled_from(typing.get_args(TaskState))
STATUSES = st.builds(
    Status,
    state=STATE,
    starts=NUMBER,
    process_id=st.none() | NUMBER,
    returncode=st.none() | NUMBER,
    detail=st.none() | WORDS,
    tail=st.lists(WORDS, max_size=3).map(tuple),
    stop_signal=st.sampled_from([None, "SIGTERM", "SIGINT"]),
    report=st.builds(Report, step=st.none() | NUMBER, has_saved=st.booleans()),
    usage=st.builds(Usage, NUMBER),
)
MESSAGES = st.one_of(
    st.builds(Hello, NUMBER, WORDS, WORDS, NUMBER, WORDS, WORDS, st.none() | WORDS),
    STATUSES,
    st.builds(Map, NUMBER, st.lists(ENTRY, max_size=3).map(tuple)),
    st.builds(Order, NUMBER, NUMBER, st.booleans(), st.floats(allow_nan=False)),
    st.builds(Refusal, WORDS),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


def decode_any(payload: bytes) -> Message:
    """Decode a message of whatever kind it says it is."""
    name = json.loads(payload)[0]
    return decode(payload, next(kind for kind in KINDS if kind.__name__ == name))


@given(MESSAGES)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode_any(encode(message)) == message


@given(STATUSES, STATUSES)
def test_a_status_survives_as_what_differs_from_the_one_before(before: Status, status: Status) -> None:
    assert decode(encode(status, before), Status, before) == status


def test_what_has_not_changed_is_not_said_again() -> None:
    before = Status("running", starts=2, process_id=7, report=Report(step=1, heeds_stop=True))
    after = dataclasses.replace(before, report=Report(step=2, heeds_stop=True), process_id=None)
    assert encode(after, before) == b'["Status",{"process_id":null,"report":{"step":2,"heeds_stop":true}}]'
    assert encode(after, after) == b'["Status",{}]'


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (Status(), b'["Status",{}]'),
        (
            Status("exited", starts=1, process_id=7, returncode=-9, tail=("a", "b")),
            b'["Status",{"state":"exited","starts":1,"process_id":7,"returncode":-9,"tail":["a","b"]}]',
        ),
        (
            Map(1, (("ps", 0, "n1", "h", 4000),)),
            b'["Map",{"attempt":1,"entries":[["ps",0,"n1","h",4000]]}]',
        ),
    ],
)
def test_the_form_on_the_wire(message: Message, wire: bytes) -> None:
    assert encode(message) == wire


def test_a_map_is_a_cluster_and_back() -> None:
    cluster = Cluster(
        (
            Member(0, Task("chief", 0), "n1", Address("10.0.0.1", 4000)),
            Member(1, Task("ps", 0), "n2", Address("fd00::2", 4001)),
        )
    )
    assert Map.from_cluster(2, cluster) == Map(
        2, (("chief", 0, "n1", "10.0.0.1", 4000), ("ps", 0, "n2", "fd00::2", 4001))
    )
    assert Map.from_cluster(2, cluster).to_cluster() == cluster


def test_one_of_several_kinds_may_be_expected() -> None:
    either: tuple[type[Map | Status], ...] = (Map, Status)
    assert decode(encode(Status()), either) == Status()
    with pytest.raises(MessageError, match="Order is not expected here"):
        decode(encode(Order()), either)


@pytest.mark.parametrize("message", [HELLO, Status(), Map(1, ()), Order()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_expected_kind_is_read(message: Message, kind: type[Message]) -> None:
    if isinstance(message, kind):
        assert decode(encode(message), kind) == message
    else:
        with pytest.raises(MessageError, match=f"{type(message).__name__} is not expected here"):
            decode(encode(message), kind)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", Order),
        (b"\xff\xfe", Order),
        (b"[" * 100_000, Order),
        (b"9" * 10_000, Order),
        (b"null", Order),
        (b"3", Order),
        (b'"Or"', Order),
        (b'["Order"]', Order),
        (b'["Order",{},{}]', Order),
        (b'["Order",[]]', Order),
        (b'["Order",null]', Order),
        (b'[["Order"],{}]', Order),
        (b'["Bogus",{}]', Order),
        (b'["Order",{"more":1}]', Order),
        (b'["Hello",{}]', Hello),
        (b'["Status",{"state":"dead"}]', Status),
        (b'["Status",{"state":["joined"]}]', Status),
        (b'["Status",{"state":null}]', Status),
        (b'["Status",{"starts":"1"}]', Status),
        (b'["Status",{"starts":1.0}]', Status),
        (b'["Status",{"starts":true}]', Status),
        (b'["Status",{"tail":"ab"}]', Status),
        (b'["Status",{"tail":["a",1]}]', Status),
        (b'["Status",{"detail":1}]', Status),
        (b'["Map",{"attempt":1,"entries":[["ps",0,"n1","h"]]}]', Map),
        (b'["Map",{"attempt":1,"entries":[["ps",0,"n1","h",1,2]]}]', Map),
        (b'["Map",{"attempt":1,"entries":{}}]', Map),
        (b'["Map",{"attempt":1}]', Map),
        (b'["Order",{"leave":1}]', Order),
        (b'["Order",{"leave":null}]', Order),
        (b'["Order",{"leave_seconds":"5"}]', Order),
    ],
)
def test_what_is_no_message_is_refused_with_words(payload: bytes, kind: type[Message]) -> None:
    with pytest.raises(MessageError, match="is not a control message of this version of tf4slurm") as caught:
        decode(payload, kind)
    assert len(str(caught.value)) < 1000


@given(payload=st.binary() | JSON.map(lambda value: json.dumps(value).encode()), kind=st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_a_message_error(payload: bytes, kind: type[Message]) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(decode(payload, kind), kind)


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_fields_are_a_message_that_survives_or_a_message_error(kind: type[Message], data: st.DataObject) -> None:
    names = st.sampled_from([*kind.__dataclass_fields__, "more"])
    fields = data.draw(st.dictionaries(names, JSON | STATE | st.lists(ENTRY.map(list), max_size=2), max_size=4))
    payload = json.dumps([kind.__name__, fields]).encode()
    with contextlib.suppress(MessageError):
        message = decode(payload, kind)
        assert repr(decode(encode(message), kind)) == repr(message)  # repr: NaN is not equal to itself


@given(message=MESSAGES, data=st.data())
def test_a_damaged_message_is_a_message_or_a_message_error(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        assert isinstance(decode(bytes(payload), type(message)), type(message))
