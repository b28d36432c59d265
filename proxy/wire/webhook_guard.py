"""What a webhook's URL may be, and where deliveries may go: the guard of all addresses that strangers name, a little stricter.

HTTPS, except to the machine itself while developing. Names that never leave a machine or a house are refused as they are given:
they would be refused at every connection as well, but then nobody would be told.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

from yarl import URL

from proxy.core.egress import EgressPolicy
from proxy.settings import EgressSettings
from proxy.wire.guard import Guard, UrlRefused

LOOPBACK = ("127.0.0.0/8", "::1/128")
# RFC 6761, RFC 6762, RFC 9476 and what ICANN has set aside: none of these is ever public.
_AT_HOME = re.compile(r"(?:^|\.)(?:localhost|local|internal|home\.arpa|alt|onion|test|invalid)\.?$", re.IGNORECASE)
_ITSELF = re.compile(r"(?:^|\.)localhost\.?$", re.IGNORECASE)


class WebhookGuard(Guard):
    """`dev`: a development service, which may post to the machine it runs on."""

    def __init__(self, egress: EgressSettings, *, dev: bool) -> None:
        self._dev = dev
        self._plain = egress.http
        allow = (*egress.allow, *LOOPBACK) if dev else egress.allow
        super().__init__(EgressPolicy(allow, egress.deny), http=egress.http or dev, ports=() if dev else egress.ports)

    def check(self, text: str) -> URL:
        url = super().check(text)
        host = url.raw_host or ""
        if url.fragment:
            raise UrlRefused("must not have a fragment: nothing behind a # is ever sent")
        if self._dev and _is_itself(host):
            return url
        if url.scheme == "http" and not self._plain:
            raise UrlRefused("must begin with https://, except to this machine itself")
        if _AT_HOME.search(host):
            raise UrlRefused("has a host that may not be reached: its name is never public")
        return url


def _is_itself(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return _ITSELF.search(host) is not None
