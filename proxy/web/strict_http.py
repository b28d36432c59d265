"""Rules of HTTP/1.1 that aiohttp's parser does not enforce, for requests that it has accepted."""

from __future__ import annotations

import re

from aiohttp import HttpVersion10, HttpVersion11, web

from proxy.errors import InternalError, InvalidRequest
from proxy.web.aiohttp_internals import reply_in_version, version_of

# RFC 3986, 3.2.2 and 3.2.3: a host is a name, an IPv4 address or a bracketed literal; a port may follow. No user info.
_HOST = re.compile(r"(?:\[[0-9A-Fa-fv:.]+\]|(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")


class VersionNotSupported(InternalError):
    status = 505


class NotImplementedHere(InternalError):
    status = 501


def check_strictly(request: web.BaseRequest) -> None:
    """Raise the fault of a request that aiohttp accepts and HTTP does not."""
    version = version_of(request)
    if not HttpVersion10 <= version <= HttpVersion11:
        reply_in_version(request, HttpVersion11)
        if version > HttpVersion11:
            raise VersionNotSupported("only HTTP/1.0 and HTTP/1.1 are supported")
        raise InvalidRequest("the request line must end in HTTP/1.1")
    # RFC 9112, 6.1: "A server that receives a request message with a transfer coding it does not understand SHOULD respond
    # with 501".
    coding = request.headers.get("Transfer-Encoding", "chunked")
    if coding.strip().lower() != "chunked":
        raise NotImplementedHere("the only supported Transfer-Encoding is chunked")
    # RFC 9112, 3.2.1: the target is a path and a query.
    if "#" in request.raw_path:
        raise InvalidRequest("the request target must not contain a fragment")
    # RFC 9112, 3.2: "A server MUST respond with a 400 to any request message that contains [...] an invalid field value".
    if not _HOST.fullmatch(request.headers.get("Host", "")):
        raise InvalidRequest("the header Host must be a host, with a port if need be")
