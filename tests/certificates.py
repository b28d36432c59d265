"""Certificates for tests: an authority of our own, and the leaves it signs."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@dataclass(frozen=True)
class Leaf:
    """A certificate and its key in files."""

    cert: Path
    key: Path

    @property
    def text(self) -> str:
        return self.cert.read_text()

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.cert.read_bytes()).serial_number

    def replace_with(self, other: Leaf) -> None:
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())


class Authority:
    """Its own certificate is in `file`."""

    def __init__(self, directory: Path, name: str = "Test authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        made = (
            x509.CertificateBuilder(self._name, self._name, self._key.public_key(), 1, _START, _END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / "ca.pem"
        self.file.write_bytes(made.public_bytes(Encoding.PEM))

    def leaf(self, *names: str, stem: str = "") -> Leaf:
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        made = (
            x509.CertificateBuilder(
                self._name, _name(names[0]), key.public_key(), x509.random_serial_number(), _START, _END
            )
            .add_extension(alternatives, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        leaf = Leaf(self._directory / f"{stem or names[0]}.crt", self._directory / f"{stem or names[0]}.key")
        leaf.cert.write_bytes(made.public_bytes(Encoding.PEM))
        leaf.key.write_text(_pem(key))
        return leaf

    def client_context(self, own: Leaf | None = None) -> ssl.SSLContext:
        """A client that trusts this authority, with a certificate of its own."""
        context = ssl.create_default_context(cafile=self.file)
        context.set_alpn_protocols(["h2", "http/1.1"])
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        return context

    def server_context(self, leaf: Leaf) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(leaf.cert, leaf.key)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))
