"""A certificate for one run of a benchmark, switched on by the environment: what is started
meanwhile speaks TLS.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLES = ("PRPC_TLS_CERT", "PRPC_TLS_KEY", "PRPC_TLS_CA")


@contextmanager
def tls_switched_on() -> Iterator[None]:
    """All nodes show the same certificate, which is its own CA: both sides verify the other's, as
    in a job with mTLS.
    """
    with tempfile.TemporaryDirectory(prefix="prpc-perf-") as folder:
        cert, key = _write(Path(folder))
        before = {name: os.environ.get(name) for name in VARIABLES}
        os.environ.update(zip(VARIABLES, (cert, key, cert), strict=True))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def tls_context(is_server: bool) -> ssl.SSLContext:
    """For a socket without anything of ours around it: what tls_switched_on() made, used as our
    nodes use it (TLS 1.3, mTLS).
    """
    cert, key, ca = (os.environ[name] for name in VARIABLES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    return context


def _write(folder: Path) -> tuple[str, str]:
    """Paths of a self-signed certificate and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perf")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "node.pem", folder / "node.key"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.touch(mode=0o600)
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(cert_path), str(key_path)
