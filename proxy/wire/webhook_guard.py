"""The guard for webhook URLs and deliveries, slightly stricter than the general one.

HTTPS is required unless the operator allows HTTP, or the receiver is the machine itself during development. Names that are
never public are refused when a webhook is created: every connection would be refused too, but its author would not learn why.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

from yarl import URL

from proxy.core.egress import EgressPolicy
from proxy.settings import EgressSettings
from proxy.wire.outbound_guard import OutboundGuard, UrlRefused

LOOPBACK = ("127.0.0.0/8", "::1/128")
# RFC 6761, RFC 6762, RFC 9476 and names reserved by ICANN: none of these is ever public.
_PRIVATE = re.compile(r"(?:^|\.)(?:localhost|local|internal|home\.arpa|alt|onion|test|invalid)\.?$", re.IGNORECASE)
_LOCALHOST = re.compile(r"(?:^|\.)localhost\.?$", re.IGNORECASE)


class WebhookGuard(OutboundGuard):
    """`dev`: a development service may post to the machine it runs on."""

    def __init__(self, egress: EgressSettings, *, dev: bool) -> None:
        self._dev = dev
        self._plain = egress.http
        allow = (*egress.allow, *LOOPBACK) if dev else egress.allow
        super().__init__(EgressPolicy(allow, egress.deny), http=egress.http or dev, ports=() if dev else egress.ports)

    def check(self, text: str) -> URL:
        url = super().check(text)
        host = url.raw_host or ""
        if url.fragment:
            raise UrlRefused("must not have a fragment: the part after # is never sent")
        if self._dev and _is_this_machine(host):
            return url
        if url.scheme == "http" and not self._plain:
            raise UrlRefused("must begin with https://, except for this machine")
        if _PRIVATE.search(host):
            raise UrlRefused("must have a public host: this name is never public")
        return url


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return _LOCALHOST.search(host) is not None
