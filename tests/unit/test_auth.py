"""What is sealed opens once, in its order, in its direction, with its key: and nothing else does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf4slurm.control.auth import NONCE_BYTES, TO_SERVICE, TO_TASK, Seal, connection_key, new_nonce, new_secret
from tf4slurm.errors import AuthenticationError

KEY = b"k" * 32
NONCES = (b"c" * 16, b"s" * 16)


def test_secrets_and_nonces_are_long_and_never_the_same() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(bytes.fromhex(new_secret())) == 32
    assert len({new_nonce() for _ in range(100)}) == 100
    assert len(new_nonce()) == NONCE_BYTES == 16


def test_secret_and_both_nonces_make_the_key() -> None:
    keys = [
        connection_key(secret, client, service)
        for secret, client, service in itertools.product(("one", "two"), NONCES, NONCES)
    ]
    assert len(set(keys)) == 8
    assert connection_key("one", *NONCES) == connection_key("one", *NONCES)


@pytest.mark.parametrize(
    ("client", "service"),
    [(b"", b"s" * 16), (b"c" * 16, b""), (b"c" * 15, b"s" * 17), (b"c" * 17, b"s" * 16), (b"c" * 10_000, b"s" * 16)],
)
def test_a_nonce_of_another_length_is_refused(client: bytes, service: bytes) -> None:
    with pytest.raises(AuthenticationError, match="expected a nonce of 16 bytes"):
        connection_key("secret", client, service)


@given(st.lists(st.binary(), max_size=5))
def test_what_is_sealed_opens_in_its_order(payloads: list[bytes]) -> None:
    sender, receiver = Seal(KEY, TO_TASK), Seal(KEY, TO_TASK)
    assert [receiver.open(sender.seal(payload)) for payload in payloads] == payloads


def test_the_same_words_look_different_each_time() -> None:
    sender = Seal(KEY, TO_TASK)
    assert sender.seal(b"beat") != sender.seal(b"beat")


def test_a_replay_does_not_open() -> None:
    sender, receiver = Seal(KEY, TO_SERVICE), Seal(KEY, TO_SERVICE)
    sealed = sender.seal(b"hello")
    assert receiver.open(sealed) == b"hello"
    with pytest.raises(AuthenticationError):
        receiver.open(sealed)


def test_a_message_that_overtakes_another_does_not_open() -> None:
    sender, receiver = Seal(KEY, TO_SERVICE), Seal(KEY, TO_SERVICE)
    sender.seal(b"first")
    with pytest.raises(AuthenticationError):
        receiver.open(sender.seal(b"second"))


@pytest.mark.parametrize(("sent", "expected"), [(TO_SERVICE, TO_TASK), (TO_TASK, TO_SERVICE)])
def test_a_message_of_the_other_direction_does_not_open(sent: bytes, expected: bytes) -> None:
    with pytest.raises(AuthenticationError):
        Seal(KEY, expected).open(Seal(KEY, sent).seal(b"hello"))


def test_a_message_of_another_key_does_not_open() -> None:
    with pytest.raises(AuthenticationError, match="does not carry this job's secret"):
        Seal(KEY, TO_TASK).open(Seal(b"K" * 32, TO_TASK).seal(b"hello"))


@given(payload=st.binary(), cut=st.integers(0, 31))
def test_a_truncated_message_does_not_open(payload: bytes, cut: int) -> None:
    with pytest.raises(AuthenticationError):
        Seal(KEY, TO_TASK).open(Seal(KEY, TO_TASK).seal(payload)[:cut])


@given(payload=st.binary(min_size=1), data=st.data())
def test_a_changed_message_does_not_open(payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(Seal(KEY, TO_TASK).seal(payload))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(AuthenticationError):
        Seal(KEY, TO_TASK).open(bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"x", b"x" * 32, b"x" * 33])
def test_what_was_never_sealed_does_not_open(sealed: bytes) -> None:
    with pytest.raises(AuthenticationError):
        Seal(KEY, TO_TASK).open(sealed)


def test_the_empty_message_is_sealed_too() -> None:
    sealed = Seal(KEY, TO_TASK).seal(b"")
    assert len(sealed) == 32
    assert Seal(KEY, TO_TASK).open(sealed) == b""
