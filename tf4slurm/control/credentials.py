"""The credentials of a job: the TLS certificate of its control service, and the token of its tasks.

The process that runs the control service creates both, and keeps the private key in memory. The tasks receive the
certificate, which they pin, and the token, which they send with each call.
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass, field

TLS_NAME = "tf4slurm"
"""The name in the certificate. Tasks check this name instead of the address, because the service has many addresses."""

# The certificate never expires, so that a host with a wrong clock can connect; its key is never written to a file.
# RFC 5280, 4.1.2.5: 9999-12-31 means that a certificate has no expiration date.
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)
_TOKEN_BYTES = 32
_HANDSHAKE_SECONDS = 3.0
_HANDSHAKES_PER_SECOND = 500  # two cores complete more, even if all tasks connect at the same time


@dataclass(frozen=True)
class Credentials:
    """The credentials that all tasks of a job share.

    Attributes:
        certificate: The control service's certificate (PEM). Not secret, but tasks must get it from the job's user.
        token: The secret of the job: 256 random bits as hexadecimal text.
    """

    certificate: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class ServiceCredentials:
    """The credentials of the control service.

    Attributes:
        shared: The credentials for the tasks.
        private_key: The private key of the certificate (PEM).
    """

    shared: Credentials
    private_key: bytes = field(repr=False)


def create_credentials() -> ServiceCredentials:
    """Create the credentials of a new job: an EC P-256 key, its self-signed certificate and a random token."""
    # Imported here, because the import takes 40 ms and only one process of a job needs it.
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
    """Return the time limit in seconds for a TLS handshake, and for the first call after the handshake."""
    return _HANDSHAKE_SECONDS + num_tasks / _HANDSHAKES_PER_SECOND
