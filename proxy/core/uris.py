"""Token URIs: where a document is located, and how an image may be shown.

Contracts use every form there is: `data:` in base64 or plain, `ipfs://` with and without common mistakes, bare content
ids, third-party gateways, `ar://`, and plain web addresses. Content-addressed documents are read through the operator's
own gateway, whichever gateway the URI names: the content is the same, and no third party is involved.
"""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import dataclass

# Longer URIs are ignored; on-chain images have up to some hundred kilobytes.
LONGEST = 512 * 1024

_DATA = re.compile(r"data:([^,]*),(.*)", re.IGNORECASE | re.DOTALL)
_IPFS = re.compile(r"(?:ipfs:/*|/?(?=ip[fn]s/))(?:(ipfs|ipns)/)?([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_IPNS = re.compile(r"ipns:/*([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_ARWEAVE = re.compile(r"ar:/*([A-Za-z0-9_-]{43})(/.*|\?.*)?", re.ASCII | re.DOTALL)
# Gateways by path (https://gateway/ipfs/CID/...) and by subdomain (https://CID.ipfs.gateway/...).
_BY_PATH = re.compile(r"https?://[^/?#]+/(ipfs)/([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_BY_HOST = re.compile(r"https?://([^./]+)\.ipfs\.[^/?#]+(.*)", re.IGNORECASE | re.DOTALL)
# Version 0 is base 58 of a SHA-256; the first letter of version 1 names its base, in practice b, k, z or f.
_CID = re.compile(
    r"Qm[1-9A-HJ-NP-Za-km-z]{44}|b[a-z2-7]{50,120}|k[0-9a-z]{50,120}|z[1-9A-HJ-NP-Za-km-z]{46,120}|f[0-9a-f]{50,130}",
    re.ASCII,
)
# A name of ipns is a key, or a domain.
_IPNS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}", re.ASCII)
_WEB = re.compile(r"https?://", re.IGNORECASE)
# Bounds the time of a search, which blocks the event loop.
_ENCODED = re.compile(rb"(?:%[0-9A-Fa-f]{2}){1,4096}")
_NOT_A_URI = re.compile(r"[^A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]|%(?![0-9A-Fa-f]{2})", re.ASCII)
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class InlineDocument:
    """The document is the URI itself."""

    media_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class RemoteDocument:
    """The document has to be fetched: from the operator's own gateway, or from a third party."""

    url: str
    own: bool


@dataclass(frozen=True, slots=True)
class Gateways:
    """Addresses without a slash at their end."""

    ipfs: str
    arweave: str


def with_id(uri: str, token_id: int) -> str:
    """ERC-1155: the id in the URI is "lowercase alphanumeric", "leading zero padded to 64 hex characters"."""
    return uri.replace("{id}", f"{token_id:064x}") if "{id}" in uri else uri


def locate(uri: str, gateways: Gateways) -> InlineDocument | RemoteDocument | None:
    """The location of a token's document; None if the URI is not usable."""
    uri = uri.strip()
    if match := _DATA.fullmatch(uri):
        return _inline(match[1], match[2])
    if uri[:1] in "{[<" and uri:
        return InlineDocument("image/svg+xml" if uri[0] == "<" else "application/json", uri.encode("utf-8", "replace"))
    if (kept := _content(uri, gateways)) is not None:
        return RemoteDocument(kept, own=True)
    return RemoteDocument(quoted(uri), own=False) if _WEB.match(uri) else None


def shown(uri: str) -> str | None:
    """An image's URI that may be passed on: well-formed, of an image type, and not a disguised script."""
    uri = uri.strip()
    if not uri or len(uri) > LONGEST:
        return None
    if match := _DATA.fullmatch(uri):
        if not match[1].lstrip().lower().startswith("image/"):
            return None
        gap = "" if match[1].lower().endswith("base64") else " "
        return quoted(_SPACE.sub(gap, uri)).replace("#", "%23")
    if uri[0] == "<":
        return "data:image/svg+xml;utf8," + quoted(uri).replace("#", "%23")
    if (path := _ipfs_path(uri)) is not None and not _WEB.match(uri):
        return f"{path[0]}://{path[1]}"
    if _WEB.match(uri) or _ARWEAVE.fullmatch(uri):
        return quoted(uri)
    return None


def over_http(uri: str, gateways: Gateways) -> str | None:
    """An image's web address; None for one that is contained in its URI."""
    return _content(uri, gateways) or (quoted(uri) if _WEB.match(uri) else None)


def quoted(text: str) -> str:
    """The text with all characters percent-encoded that a URI may not contain. Encoded ones stay as they are."""
    return _NOT_A_URI.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "replace")), text)


def _content(uri: str, gateways: Gateways) -> str | None:
    """The address of content-addressed data at our gateways."""
    if (path := _ipfs_path(uri)) is not None:
        return f"{gateways.ipfs}/{path[0]}/{path[1]}"
    if match := _ARWEAVE.fullmatch(uri):
        rest = _within(match[2] or "")
        return None if rest is None else f"{gateways.arweave}/{match[1]}{rest}"
    return None


def _ipfs_path(uri: str) -> tuple[str, str] | None:
    """The kind (ipfs or ipns), and the name with the path below it."""
    if match := _IPNS.fullmatch(uri):
        return _below("ipns", match[1], match[2])
    for pattern in (_BY_PATH, _BY_HOST, _IPFS):
        if match := pattern.fullmatch(uri):
            kind = match[1].lower() if pattern is not _BY_HOST and match[1] else "ipfs"
            if (path := _below(kind, *match.groups()[-2:])) is not None:
                return path
    return _below("ipfs", uri, "") if _CID.fullmatch(uri) else None


def _below(kind: str, name: str, rest: str) -> tuple[str, str] | None:
    is_name = _CID.fullmatch(name) or (kind == "ipns" and _IPNS_NAME.fullmatch(name))
    path = _within(rest) if is_name else None
    return None if path is None else (kind, name + path)


def _within(path: str) -> str | None:
    """The path, if it stays below its start. A # is part of a file's name here, not the end of the path."""
    path = quoted(path).replace("#", "%23")
    steps = re.sub("%2e", ".", path.partition("?")[0], flags=re.IGNORECASE).replace("%2F", "/").replace("%2f", "/")
    return None if ".." in steps.replace("%5C", "/").replace("%5c", "/").split("/") else path


def _inline(head: str, body: str) -> InlineDocument | None:
    """RFC 2397; with base64 that lost its padding, and plain text that was never encoded."""
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    raw = _ENCODED.sub(_decoded, body.encode("utf-8", "replace"))
    if "base64" not in parameters:
        return InlineDocument(media_type or "text/plain", raw)
    try:
        digits = re.sub(rb"\s", b"", raw).rstrip(b"=").translate(_URL_SAFE)
        return InlineDocument(media_type or "text/plain", b64decode(digits + b"=" * (-len(digits) % 4), validate=True))
    except ValueError:
        return None


def _decoded(match: re.Match[bytes]) -> bytes:
    """Decodes a run of percent-encoded bytes."""
    return bytes.fromhex(match[0].replace(b"%", b"").decode())


_URL_SAFE = bytes.maketrans(b"-_", b"+/")
