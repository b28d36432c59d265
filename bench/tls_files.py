"""A certificate for 127.0.0.1 that the bench's TLS servers share. It is its own authority."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from bench.loaders import BUILD

CERT, KEY = BUILD / "tls" / "cert.pem", BUILD / "tls" / "key.pem"
_DAYS = 3650


def make() -> None:
    """Write both files, unless they exist."""
    if CERT.exists() and KEY.exists():
        return
    CERT.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock bench")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(KEY, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    _write(CERT, made.public_bytes(Encoding.PEM))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)  # it protects nothing, and nginx's worker may have another user
