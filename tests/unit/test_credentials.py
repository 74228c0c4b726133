"""A job's credentials: what the certificate allows, and that secrets are not exposed."""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
from typing import Any

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tf4slurm.control.credentials import TLS_NAME, create_credentials, open_from_this_user
from tf4slurm.errors import AuthenticationError

CREDENTIALS = create_credentials()
CERTIFICATE = x509.load_pem_x509_certificate(CREDENTIALS.shared.certificate.encode())
OTHER = x509.load_pem_x509_certificate(create_credentials().shared.certificate.encode())


def private_key() -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(CREDENTIALS.private_key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def test_key_is_on_p256_and_matches_the_certificate() -> None:
    assert isinstance(private_key().curve, ec.SECP256R1)
    assert CERTIFICATE.public_key() == private_key().public_key()


def test_certificate_is_signed_by_its_own_key_only() -> None:
    assert CERTIFICATE.issuer == CERTIFICATE.subject == OTHER.subject
    CERTIFICATE.verify_directly_issued_by(CERTIFICATE)
    for certificate, issuer in ((CERTIFICATE, OTHER), (OTHER, CERTIFICATE)):
        with pytest.raises(InvalidSignature):
            certificate.verify_directly_issued_by(issuer)


def test_certificate_is_for_the_tls_name_only() -> None:
    (common_name,) = CERTIFICATE.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common_name.value == TLS_NAME
    names = CERTIFICATE.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(TLS_NAME)]


def test_certificate_cannot_sign_others() -> None:
    constraints = CERTIFICATE.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value.ca is False


def test_certificate_is_valid_whatever_the_clock_of_a_host_shows() -> None:
    utc = datetime.timezone.utc
    assert CERTIFICATE.not_valid_before_utc <= datetime.datetime(1970, 1, 1, tzinfo=utc)
    assert CERTIFICATE.not_valid_after_utc >= datetime.datetime(9999, 1, 1, tzinfo=utc)


def test_token_has_256_bits() -> None:
    assert len(bytes.fromhex(CREDENTIALS.shared.token)) == 32


def test_two_jobs_share_neither_key_nor_certificate_nor_token() -> None:
    made = [create_credentials() for _ in range(20)]
    for values in (
        {each.private_key for each in made},
        {each.shared.certificate for each in made},
        {each.shared.token for each in made},
        {x509.load_pem_x509_certificate(each.shared.certificate.encode()).serial_number for each in made},
    ):
        assert len(values) == len(made)


def test_shared_credentials_do_not_contain_the_private_key() -> None:
    assert [field.name for field in dataclasses.fields(CREDENTIALS.shared)] == ["certificate", "token"]
    secret = private_key().private_numbers().private_value
    lines = CREDENTIALS.private_key.decode().splitlines()[1:-1]
    assert len(lines) >= 2
    for text in dataclasses.asdict(CREDENTIALS.shared).values():
        assert "PRIVATE" not in text
        assert f"{secret:064x}" not in text
        assert not [line for line in lines if line in text]


@pytest.mark.parametrize("show", [repr, str, "{!r}".format], ids=["repr", "str", "format"])
def test_text_of_credentials_shows_neither_token_nor_key(show: object) -> None:
    assert callable(show)
    for shown in (show(CREDENTIALS), show(CREDENTIALS.shared), show({"credentials": [CREDENTIALS]})):
        assert CREDENTIALS.shared.token not in shown
        assert "PRIVATE" not in shown
        assert CREDENTIALS.private_key.decode().splitlines()[1] not in shown


@pytest.mark.parametrize(("answers_at", "num_requests"), [(1, 1), (3, 3), (4, 3)])
def test_munge_that_times_out_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, answers_at: int, num_requests: int
) -> None:
    requests: list[str] = []
    me = os.getuid()
    answer = f"STATUS: 0\nUID: {me}\nUID_RESTRICTION: {me}\n\ntf4slurm control secret: s{answers_at}".encode()

    def run(command: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[bytes]:
        requests.append(command[0])
        if len(requests) < answers_at:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, answer, b"")

    monkeypatch.setattr("tf4slurm.control.credentials.subprocess.run", run)
    if answers_at <= num_requests:
        assert open_from_this_user(f"MUNGE:{answers_at}:") == f"s{answers_at}"
    else:
        with pytest.raises(AuthenticationError, match=r"none of 3 requests was answered within 5 s"):
            open_from_this_user(f"MUNGE:{answers_at}:")
    assert requests == ["unmunge"] * num_requests
