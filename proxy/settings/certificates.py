"""TLS contexts from files: for the service's clients (`[server.tls]`), and for its connections to upstreams.

The supervisor reads the files of `[server.tls]` and sends their content to its workers. A worker that starts later needs no
files, so a renewal that is half done harms none. Files are used only if every one of them is valid.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509

from proxy.errors import StartError
from proxy.settings.given_files import read_bytes
from proxy.settings.sections import BundlerSettings, LinkSettings, RelaySettings, TlsSettings, UpstreamSettings

# The names of a certificate and its key in a directory per name: of certbot, and of a Kubernetes secret.
_PAIRS_IN_DIRECTORIES = (("fullchain.pem", "privkey.pem"), ("tls.crt", "tls.key"))
_CERTIFICATE_SUFFIXES = (".crt", ".pem")
_VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate with its chain, and its private key, as PEM."""

    chain: str
    key: str = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The host names that the certificate is for, in lower case."""
        leaf = x509.load_pem_x509_certificates(self.chain.encode())[0]
        try:
            extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return frozenset()
        return frozenset(name.lower() for name in extension.value.get_values_for_type(x509.DNSName))


@dataclass(frozen=True, slots=True)
class Certificates:
    """All pairs, the default one first, and the authorities that client certificates are checked against, as PEM."""

    pairs: tuple[CertificatePair, ...]
    client_ca: str = ""

    @classmethod
    def of_line(cls, line: bytes) -> Certificates:
        return msgspec.json.decode(line, type=cls)

    def line(self) -> bytes:
        """For a worker's standard input."""
        return msgspec.json.encode(self) + b"\n"

    def contexts(self, tls: TlsSettings) -> list[tuple[frozenset[str], ssl.SSLContext]]:
        """A context for each pair, with its names."""
        return [(pair.names, server_context(pair, self.client_ca, tls)) for pair in self.pairs]


def read_certificates(tls: TlsSettings) -> Certificates | None:
    """Read and check the files. Returns None if the service uses no TLS. Raises StartError with every fault."""
    if not tls.is_used:
        return None
    faults: list[str] = []
    pairs = [pair for places in _places(tls, faults) if (pair := _read_pair(places, tls, faults)) is not None]
    client_ca = _text("server.tls.client_ca", Path(tls.client_ca), faults) if tls.client_ca else ""
    if client_ca and not faults:
        try:
            server_context(pairs[0], client_ca, tls)
        except (ssl.SSLError, ValueError):
            faults.append(f"server.tls.client_ca: {tls.client_ca} contains no certificate in PEM format")
    if faults:
        raise StartError(faults)
    return Certificates(tuple(pairs), client_ca)


def tls_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report files that cannot be used. The schema reports values of the wrong type."""
    server = tree.get("server")
    try:
        tls = msgspec.convert(server.get("tls", {}) if isinstance(server, Mapping) else {}, TlsSettings)
        read_certificates(tls)
    except msgspec.ValidationError:
        return
    except StartError as exc:
        yield from exc.faults


def link_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report upstreams, bundlers and relays whose TLS files cannot be used, or whose ways to connect exclude each other."""
    kinds: dict[str, type[LinkSettings]] = {
        "upstreams": UpstreamSettings,
        "bundlers": BundlerSettings,
        "relays": RelaySettings,
    }
    for section, kind in kinds.items():
        given = tree.get(section)
        for index, each in enumerate(given if isinstance(given, list | tuple) else ()):
            try:
                link = msgspec.convert(each, kind, strict=False)
            except msgspec.ValidationError:
                continue
            yield from (f"{section}.{index}.{fault}" for fault in _faults_of(link))


def _faults_of(link: LinkSettings) -> Iterator[str]:
    if bool(link.cert) != bool(link.key):
        yield "cert: cert and key belong together: set both"
    if link.socket and link.proxy:
        yield "proxy: a Unix socket is not reached through a proxy: set one of proxy and socket"
    if link.socket and link.url.startswith("wss:"):
        yield "socket: a WebSocket on a Unix socket uses no TLS: write ws:// in the URL"
    if link.uses_tls:
        try:
            client_context(link.ca, link.cert, link.key, link.min_tls)
        except ssl.SSLError:
            yield "ca: ca, cert and key must be files in PEM format, the key without a password and of this certificate"
        except OSError as exc:
            yield f"ca: cannot read one of ca, cert and key: {exc.strerror}"


@lru_cache(maxsize=64)
def client_context(ca: str, cert: str, key: str, min_tls: str) -> ssl.SSLContext:
    """A context for connections to upstreams. Shared, because reading the system's authorities takes 20 ms."""
    context = ssl.create_default_context(cafile=ca or None)
    context.minimum_version = VERSIONS[min_tls]
    context.set_alpn_protocols(["http/1.1"])
    if cert:
        context.load_cert_chain(cert, key or None, password="")
    return context


def server_context(pair: CertificatePair, client_ca: str, tls: TlsSettings) -> ssl.SSLContext:
    """A context for one certificate. Raises SSLError or ValueError if the key does not fit, or something cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[tls.min_version]
    # Renegotiation lets a client ask for handshakes on one connection without end.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    load_pair(context, pair.chain, pair.key)
    if client_ca:
        context.load_verify_locations(cadata=client_ca)
    context.verify_mode = _VERIFY_MODES[tls.client_certificates]
    return context


def load_pair(context: ssl.SSLContext, chain: str, key: str) -> None:
    """Load a certificate and its key, which OpenSSL reads from files only."""
    fd = os.memfd_create("certificate")
    try:
        os.write(fd, f"{chain}\n{key}".encode())
        # With no password, a key that needs one would ask for it on the terminal.
        context.load_cert_chain(f"/proc/self/fd/{fd}", password="")
    finally:
        os.close(fd)


def _places(tls: TlsSettings, faults: list[str]) -> list[tuple[str, Path, Path]]:
    """The name of the setting, and the files of each pair. The pair of `cert` and `key` comes first: it is the default."""
    own = [("server.tls.cert", Path(tls.cert), Path(tls.key))] if tls.cert or tls.key else []
    if own and not (tls.cert and tls.key):
        faults.append("server.tls: cert and key belong together: set both")
        return []
    pairs = list(_in_directory(Path(tls.directory))) if tls.directory else []
    if tls.directory and not pairs:
        faults.append(
            f"server.tls.directory: there is no certificate with its key in {tls.directory}: it needs NAME.crt and NAME.key, "
            "or directories with fullchain.pem and privkey.pem, or tls.crt and tls.key"
        )
    return own + [("server.tls.directory", *files) for files in pairs]


def _in_directory(directory: Path) -> Iterator[tuple[Path, Path]]:
    for place in sorted(directory.glob("*")):
        if place.suffix in _CERTIFICATE_SUFFIXES and place.with_suffix(".key").exists():
            yield place, place.with_suffix(".key")
        for chain, key in _PAIRS_IN_DIRECTORIES:
            if (place / chain).exists() and (place / key).exists():
                yield place / chain, place / key


def _read_pair(places: tuple[str, Path, Path], tls: TlsSettings, faults: list[str]) -> CertificatePair | None:
    setting, chain_file, key_file = places
    before = len(faults)
    chain, key = _text(setting, chain_file, faults), _text(setting, key_file, faults)
    if len(faults) > before:
        return None
    pair = CertificatePair(chain, key)
    try:
        server_context(pair, "", tls)
        _ = pair.names
    except (ssl.SSLError, ValueError) as exc:
        faults.append(f"{setting}: {_reason(exc, chain_file, key_file)}")
        return None
    return pair


def _reason(exc: Exception, chain: Path, key: Path) -> str:
    if isinstance(exc, ssl.SSLError) and exc.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return f"the key in {key} does not belong to the certificate in {chain}"
    if isinstance(exc, ssl.SSLError) and exc.reason in ("EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        return f"the certificate in {chain} is too weak: use RSA of 2048 bits or more, or ECDSA"
    return f"{chain} and {key} must be a certificate and its private key in PEM format, the key without a password"


def _text(setting: str, file: Path, faults: list[str]) -> str:
    try:
        return read_bytes(file).decode("ascii")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not in PEM format"
        faults.append(f"{setting}: cannot read {file}: {reason}")
        return ""
