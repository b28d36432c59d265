"""URLs that a webhook may have, in development and outside it."""

from __future__ import annotations

import pytest

from proxy.settings import EgressSettings
from proxy.wire.outbound_guard import UrlRefused
from proxy.wire.webhook_guard import WebhookGuard

STRICT = EgressSettings(allow=(), deny=(), http=False, ports=(443,))
HOSTILE = [
    "http://hooks.example.com/",
    "https://127.0.0.1/",
    "https://2130706433/",
    "https://0177.0.0.1/",
    "https://0x7f000001/",
    "https://0x7f.1/",
    "https://127.1/",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[fe80::1%25eth0]/",
    "https://１２７.0.0.1/",
    "https://127。0。0。1/",
    "https://127.0.0.1./",
    "https://169.254.169.254/latest/",
    "https://192.0.0.192/",
    "https://10.1.2.3/",
    "https://0.0.0.0/",
    "https://localhost/",
    "https://localhost./",
    "https://x.LOCALHOST/",
    "https://printer.local/",
    "https://metadata.google.internal/",
    "https://user@hooks.example.com/",
    "https://user:secret@hooks.example.com/",
    "https://hooks.example.com\\@127.0.0.1/",
    "https://hooks.example.com:8443/",
    "https://hooks.example.com/\r\nX: y",
    "https://hooks.example.com/#part",
    "ftp://hooks.example.com/",
    "https://",
    "hooks.example.com",
    "https://" + "a" * 2048 + ".example.com/",
]


@pytest.mark.parametrize("url", HOSTILE)
def test_hostile_url_is_refused(url: str) -> None:
    with pytest.raises(UrlRefused):
        WebhookGuard(STRICT, dev=False).check(url)


@pytest.mark.parametrize(
    "url",
    ["https://hooks.example.com/a?b=c", "https://8.8.8.8/", "https://localhost.example.com/", "HTTPS://Example.COM/"],
)
def test_public_https_url_is_taken(url: str) -> None:
    assert WebhookGuard(STRICT, dev=False).check(url).scheme == "https"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:3000/", "http://localhost:3000/", "http://[::1]:3000/", "https://127.0.0.1:8443/"]
)
def test_machine_itself_is_reached_only_while_developing(url: str) -> None:
    assert str(WebhookGuard(STRICT, dev=True).check(url)) == url
    with pytest.raises(UrlRefused):
        WebhookGuard(STRICT, dev=False).check(url)


@pytest.mark.parametrize(
    "url", ["http://hooks.example.com/", "http://10.0.0.1/", "https://10.0.0.1/", "https://a.internal/"]
)
def test_development_opens_nothing_but_the_machine_itself(url: str) -> None:
    with pytest.raises(UrlRefused):
        WebhookGuard(STRICT, dev=True).check(url)


def test_operator_may_allow_plain_http_and_addresses_of_a_house() -> None:
    guard = WebhookGuard(EgressSettings(allow=("10.0.0.0/8",), deny=(), http=True, ports=()), dev=False)
    assert guard.check("http://10.0.0.1:8080/").port == 8080
