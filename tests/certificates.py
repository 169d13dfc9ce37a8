"""Certificates for tests: a job's CA and what it signs, good or bad, as PEM files in a folder of
the test.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Files(NamedTuple):
    """Paths of what one node shows and trusts."""

    cert: str
    key: str
    ca: str = ""


def name_of(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def key_bytes(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    protection = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
    )


class Authority:
    """A CA that signs whatever it is asked to."""

    def __init__(self, folder: Path, common: str = "a job") -> None:
        self._folder = folder
        self._common = common
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issued = 0
        certificate = self._sign(common, self._key.public_key(), -1, 30, [], is_authority=True)
        self.path = str(self._write("ca.pem", certificate.public_bytes(serialization.Encoding.PEM)))

    def _write(self, name: str, content: bytes) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(0o600)  # as keys must be
        return path

    def _sign(
        self,
        common: str,
        key: ec.EllipticCurvePublicKey,
        from_days: int,
        to_days: int,
        others: Sequence[x509.GeneralName],
        is_authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name_of(common))
            .issuer_name(name_of(self._common))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + from_days * DAY)
            .not_valid_after(now + to_days * DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if others:
            builder = builder.add_extension(x509.SubjectAlternativeName(others), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(
        self,
        common: str,
        from_days: int = -1,
        to_days: int = 30,
        password: bytes | None = None,
        address: str = "127.0.0.1",
    ) -> Files:
        """A certificate and its key. Its other names are a DNS and a URI name made of `common`, and
        an address.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        others = [
            x509.DNSName(f"{common}.example"),
            x509.UniformResourceIdentifier(f"spiffe://example/{common}"),
            x509.IPAddress(ipaddress.ip_address(address)),
        ]
        certificate = self._sign(common, key.public_key(), from_days, to_days, others)
        self._issued += 1
        cert = self._write(
            f"{self._issued}.pem", certificate.public_bytes(serialization.Encoding.PEM)
        )
        private = self._write(f"{self._issued}.key", key_bytes(key, password))
        return Files(str(cert), str(private), self.path)
