"""The credentials of a job, and how its tasks receive them.

Each task receives the addresses of the control service, its certificate and the job's token. A task accepts no other
certificate, and sends the token with each call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import re
import secrets
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tf4slurm.cluster import Address
from tf4slurm.errors import AuthenticationError
from tf4slurm.system.variables import CERTIFICATE_VARIABLE, CONTROL_VARIABLE, TOKEN_VARIABLE

logger = logging.getLogger(__name__)

TLS_NAME = "tf4slurm"
"""The host name in the certificate. Tasks check it instead of the address, because the service has many addresses."""

# RFC 5280, 4.1.2.5: 9999-12-31 means no expiration date. Hosts with a wrong clock can connect, too. No expiration date
# is needed, because the private key is never written to a file.
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)
_TOKEN_BYTES = 32
_HANDSHAKE_SECONDS = 3.0
_HANDSHAKES_PER_SECOND = 500  # two cores complete more, even if all tasks connect at the same time
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a named pipe does not block
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MUNGE_SECONDS, _MUNGE_REQUESTS = 5.0, 3
_PURPOSE = b"tf4slurm control secret: "
_OPENED = (0, 15, 16, 17)
"""The accepted values of STATUS (munge.h): valid, expired, from the future, and already opened on this host. Many tasks
open the same credential, some of them late."""


@dataclass(frozen=True)
class Credentials:
    """The credentials that all tasks of a job share.

    Attributes:
        certificate: The control service's certificate (PEM). It is not secret, but no other user may replace it.
        token: The job's secret, 256 random bits in hexadecimal.
    """

    certificate: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class ServiceCredentials:
    """The credentials of the control service.

    Attributes:
        shared: The credentials of the tasks.
        private_key: The private key of the certificate (PEM).
    """

    shared: Credentials
    private_key: bytes = field(repr=False)


def create_credentials() -> ServiceCredentials:
    """Create the credentials of a new job."""
    # Imported here: it takes 40 ms, and only one process of a job needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TLS_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return ServiceCredentials(
        Credentials(
            certificate.public_bytes(serialization.Encoding.PEM).decode("ascii"), secrets.token_hex(_TOKEN_BYTES)
        ),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def handshake_seconds(num_tasks: int) -> float:
    """Return the time limit in seconds for a TLS handshake, and for the first call after the handshake.

    It grows with `num_tasks`, because all tasks may connect at the same time.
    """
    return _HANDSHAKE_SECONDS + num_tasks / _HANDSHAKES_PER_SECOND


@dataclass(frozen=True)
class ControlEndpoint:
    """The addresses and credentials of the control service.

    Agents that a launcher has started read them from environment variables, all other tasks from control.json.
    """

    addresses: tuple[Address, ...]
    credentials: Credentials

    def to_environ(self) -> dict[str, str]:
        return {
            CONTROL_VARIABLE: ",".join(map(str, self.addresses)),
            TOKEN_VARIABLE: self.credentials.token,
            CERTIFICATE_VARIABLE: self.credentials.certificate,
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], launch_host: str | None = None) -> ControlEndpoint:
        """Read the environment variables that `to_environ` returned in the launcher.

        `launch_host` is the host where srun runs, as a name or IP address. If it is given, the service's address on
        `launch_host` comes first.
        """
        addresses = [Address.from_text(text) for text in environ[CONTROL_VARIABLE].split(",")]
        if launch_host is not None:
            addresses.insert(0, Address(launch_host, addresses[0].port))
        return cls(tuple(dict.fromkeys(addresses)), Credentials(environ[CERTIFICATE_VARIABLE], environ[TOKEN_VARIABLE]))

    def to_json(self) -> dict[str, object]:
        """Return the content of control.json, a file with mode 0600 in the run directory.

        If MUNGE works on this host, it encrypts the credentials. This includes the certificate, which a file server
        could otherwise replace.
        """
        credentials = dataclasses.asdict(self.credentials)
        sealed = seal_for_this_user(json.dumps(credentials))
        content = {"credentials": credentials} if sealed is None else {"munge": sealed}
        return {"addresses": list(map(str, self.addresses)), **content}

    @classmethod
    def from_file(cls, path: Path) -> ControlEndpoint | None:
        """Read the addresses and credentials from control.json.

        Returns:
            The endpoint. None if the file does not exist, cannot be read, is invalid, belongs to another user, or is
            writable by other users.

        Raises:
            AuthenticationError: See `open_from_this_user`.
        """
        try:
            if path.name not in os.listdir(path.parent):  # NFS caches missing files for a minute
                return None
            with open(os.open(path, _READ_FLAGS), encoding="utf-8") as file:
                facts = os.fstat(file.fileno())
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & _OTHERS_WRITE:
                    return None
                content = json.load(file)
            addresses = tuple(map(Address.from_text, content["addresses"]))
            if "munge" in content:
                content["credentials"] = json.loads(open_from_this_user(content["munge"]))
            return cls(addresses, Credentials(**content["credentials"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


# Slurm's daemons authenticate each other with MUNGE. MUNGE's daemon encrypts a text with the cluster's key, records the
# user, and decrypts the text for one user only. The programs munge and unmunge take 2 ms each. They read the text from
# standard input, because other users can see arguments.


def seal_for_this_user(secret: str) -> str | None:
    """Return a MUNGE credential that only this user can open. Return None if MUNGE does not work on this host."""
    try:
        sealed = _run_munge("munge", f"--restrict-uid={os.getuid()}", "--ttl=-1", text=_PURPOSE + secret.encode())
        credential = sealed.decode("ascii").strip()
        return credential if open_from_this_user(credential) == secret else None
    except (AuthenticationError, ValueError) as error:
        logger.debug("MUNGE does not work here: %s", error)
        return None


@functools.lru_cache(maxsize=1)
def open_from_this_user(credential: str) -> str:
    """Return the secret in a credential from `seal_for_this_user`. The last secret is cached.

    Raises:
        AuthenticationError: MUNGE cannot open the credential on this host, or the credential was not created by this
            user, for this user and by `seal_for_this_user`.
    """
    answer = _run_munge("unmunge", "--numeric", "--keys=STATUS,UID,UID_RESTRICTION", text=credential.encode())
    metadata, _, text = answer.partition(b"\n\n")
    facts = {key: int(value) for key, value in re.findall(rb"^(\w+):\s*(-?\d+)$", metadata, re.MULTILINE)}
    me = os.getuid()
    if facts.get(b"STATUS") not in _OPENED or facts.get(b"UID") != me or facts.get(b"UID_RESTRICTION") != me:
        raise AuthenticationError(
            "The job's secret was not sealed by this user for this user. Check who can write to the run directory."
        )
    if not text.startswith(_PURPOSE):
        raise AuthenticationError(
            "The MUNGE credential that should contain the job's secret was made for another purpose."
        )
    return text.removeprefix(_PURPOSE).decode()


def _run_munge(program: str, *options: str, text: bytes) -> bytes:
    """Return the output of munge or unmunge. Repeat a request that times out up to twice: munged may be busy."""
    for _ in range(_MUNGE_REQUESTS):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _request_munge(program, *options, text=text)
    raise _munge_error(program, f"none of {_MUNGE_REQUESTS} requests was answered within {_MUNGE_SECONDS:g} s")


def _request_munge(program: str, *options: str, text: bytes) -> bytes:
    try:
        done = subprocess.run((program, *options), input=text, capture_output=True, timeout=_MUNGE_SECONDS, check=False)
    except OSError as error:
        raise _munge_error(program, type(error).__name__) from error
    if done.returncode not in _OPENED:
        raise _munge_error(program, done.stderr.decode(errors="replace").strip())
    return done.stdout


def _munge_error(program: str, reason: str) -> AuthenticationError:
    return AuthenticationError(
        f"{program!r} does not work on {os.uname().nodename}: {reason}. The job's secret is encrypted by MUNGE, which "
        "must run on every host of the job or on none. Check munged, and its socket inside of containers."
    )
