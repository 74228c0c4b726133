"""Every control message carries the job's secret, without showing it (HMAC-SHA256).

The two ends of a connection each choose a nonce; secret and nonces give the key of this connection, and each message is
sealed with its direction and its number. So a message of another job, another connection, another moment or the other
direction does not open. The service's nonce comes sealed, as its message number 0: a task says nothing of itself before
the service has proved that it knows the secret. Messages are sealed, not hidden: who listens on the network reads them.
"""

from __future__ import annotations

import hmac
import os

from tf4slurm.errors import AuthenticationError

NONCE_BYTES = 16
MAC_BYTES = 32
TO_SERVICE = b"to-service"
TO_TASK = b"to-task"


def new_secret() -> str:
    """Return the secret of a new job: 256 random bits as text."""
    import secrets  # here, because an agent never asks: it costs it 5 ms

    return secrets.token_hex(32)


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def connection_key(secret: str, client_nonce: bytes, service_nonce: bytes) -> bytes:
    """Return the key of one connection.

    Raises:
        AuthenticationError: A nonce of the wrong length.
    """
    if len(client_nonce) != NONCE_BYTES or len(service_nonce) != NONCE_BYTES:
        raise AuthenticationError("The other end does not speak tf4slurm's protocol: expected a nonce of 16 bytes.")
    return hmac.digest(secret.encode(), b"connection" + client_nonce + service_nonce, "sha256")


def answer_task(secret: str, client_nonce: bytes) -> tuple[bytes, Seal, Seal]:
    """Return the service's answer to a task's nonce, and the seals of what comes in and what goes out after it.

    Raises:
        AuthenticationError: A nonce of the wrong length.
    """
    service_nonce = new_nonce()
    key = connection_key(secret, client_nonce, service_nonce)
    outgoing = Seal(key, TO_TASK)
    return outgoing.seal(service_nonce), Seal(key, TO_SERVICE), outgoing


def check_service(secret: str, client_nonce: bytes, answer: bytes) -> tuple[Seal, Seal]:
    """Return the seals of what comes in and what goes out, if the answer to a task's nonce was made with the secret.

    Raises:
        AuthenticationError: It was not.
    """
    key = connection_key(secret, client_nonce, answer[MAC_BYTES:])
    incoming = Seal(key, TO_TASK)
    try:
        incoming.open(answer)
    except AuthenticationError:
        raise AuthenticationError("The service there does not know this job's secret: it is another job's.") from None
    return incoming, Seal(key, TO_SERVICE)


class Seal:
    """Seals or opens the messages of one direction of one connection, in their order."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the payload behind its proof."""
        return self._next_mac(payload) + payload

    def open(self, sealed: bytes) -> bytes:
        """Return the payload of a sealed message.

        Raises:
            AuthenticationError: Not sealed with this key as the next message of this direction.
        """
        mac, payload = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._next_mac(payload)):
            raise AuthenticationError(
                "A control message does not carry this job's secret, or is not the next of its connection. "
                "It was not made by a task of this job; it is not looked at."
            )
        return payload

    def _next_mac(self, payload: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, self._direction + number.to_bytes(8, "big") + payload, "sha256")
