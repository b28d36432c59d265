"""No untrusted address leads to a listener on this host, whatever its spelling and whatever name it uses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from proxy.core.egress import EgressPolicy
from proxy.wire.fetcher import Fetcher
from proxy.wire.outbound_guard import OutboundGuard, UrlRefused
from tests.web.worker import on_uvloop
from tests.wire.external_servers import Listener, Pages, ScriptedResolver, listener, pages

# Hosts that are this host, or a metadata service, or a private one, in every spelling that some parser takes.
HOSTS = [
    *("127.0.0.1", "127.0.0.2", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0x7f.1", "0177.0.0.1"),
    *("017700000001", "0177.1", "00000177.0.0.1", "127.0.0.1.", "127.1.", "0", "0.0.0.0", "0x0", "00", "127.0.0.01"),
    *("１２７.０.０.１", "①②⑦.⓪.⓪.①", "127。0。0。1", "127．0．0．1", "127.0.0.%31", "%31%32%37.0.0.1"),
    *("localhost", "localhost.", "LOCALHOST", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "localhost.localdomain", "ip6-localhost", "ip6-loopback"),
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::127.0.0.1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:0:127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::]", "[fec0::1]", "[fe80::1]", "[fe80::1%25lo]", "[::1%25lo]"),
    *("169.254.169.254", "[fd00:ec2::254]", "192.0.0.192", "100.100.100.200", "168.63.129.16", "2852039166", "0xA9FEA9FE"),
    *("10.0.0.1", "172.16.0.1", "192.168.0.1", "224.0.0.1", "255.255.255.255", "[ff02::1]"),
]  # fmt: skip


@pytest.fixture
async def local() -> AsyncIterator[Listener]:
    async with listener() as found:
        yield found


@pytest.fixture
async def site() -> AsyncIterator[Pages]:
    async with pages() as found:
        yield found


def loose(**more: object) -> OutboundGuard:
    """A guard that takes any port and plain http: only the addresses are left to stop anything."""
    return OutboundGuard(EgressPolicy(), http=True, ports=(), **more)  # type: ignore[arg-type]


async def test_no_spelling_of_a_local_address_reaches_a_local_listener(local: Listener) -> None:
    fetcher = Fetcher(loose(), timeout_s=5.0, max_bytes=1000)
    for host in HOSTS:
        for scheme in ("http", "https"):
            found = await fetcher.get(f"{scheme}://{host}:{local.port}/")
            assert found.outcome in ("refused", "unreachable", "invalid", "timeout"), host
    await fetcher.close()
    assert local.connections == 0


async def test_without_the_check_of_the_text_the_connection_is_refused_all_the_same(local: Listener) -> None:
    """The connector alone: what a redirect inside a library, or a mistake of ours above it, would meet."""
    async with loose().session({}, timeout_s=5.0) as session:
        for host in HOSTS:
            with pytest.raises((aiohttp.ClientError, ValueError)):
                await session.get(f"http://{host}:{local.port}/")
    assert local.connections == 0


@on_uvloop
async def test_connector_refuses_on_the_loop_that_runs_in_production() -> None:
    async with listener() as local:
        fetcher = Fetcher(loose(), timeout_s=5.0, max_bytes=1000)
        outcomes = [
            (await fetcher.get(f"http://{host}:{local.port}/")).outcome for host in ("localhost", "127.0.0.1", "[::1]")
        ]
        await fetcher.close()
        assert (outcomes, local.connections) == (["refused"] * 3, 0)


@pytest.mark.parametrize(
    "answers",
    [
        [["127.0.0.1"]],
        [["::1"]],
        [["::ffff:127.0.0.1"]],
        [["127.0.0.1", "::1", "10.0.0.1"]],
        [["203.0.113.1"], ["127.0.0.1"]],
    ],
)
async def test_name_that_stands_for_a_local_address_is_refused(local: Listener, answers: list[list[str]]) -> None:
    names = ScriptedResolver({"rebind.example.com": answers})
    fetcher = Fetcher(loose(resolver=names), timeout_s=5.0, max_bytes=1000)
    for _ in range(3):
        found = await fetcher.get(f"http://rebind.example.com:{local.port}/")
        assert found.outcome == "refused"
    await fetcher.close()
    assert names.looked_up
    assert local.connections == 0


async def test_name_that_is_rebound_after_the_first_answer_is_refused(site: Pages) -> None:
    """The check when something is created proves nothing for later: the second look-up says another address."""
    site.put("/one", b"{}")
    names = ScriptedResolver({"rebind.example.com": [["127.0.0.1"], ["127.0.0.2"]]})
    guard = OutboundGuard(EgressPolicy(allow=["127.0.0.1/32"]), http=True, ports=(), resolver=names)
    outcomes = []
    for _ in range(2):
        fetcher = Fetcher(guard, timeout_s=5.0, max_bytes=1000)
        outcomes.append((await fetcher.get(site.url("/one", host="rebind.example.com"))).outcome)
        await fetcher.close()
    assert outcomes == ["ok", "refused"]
    assert site.requested == ["/one"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "[::ffff:127.0.0.1]"])
async def test_redirect_from_the_operators_own_address_is_untrusted(
    site: Pages, local: Listener, host: str, status: int
) -> None:
    fetcher = Fetcher(loose(), timeout_s=5.0, max_bytes=1000)
    found = await fetcher.get(site.move("/go", f"http://{host}:{local.port}/", status), own=True)
    await fetcher.close()
    assert found.outcome == "refused"
    assert site.requested == ["/go"]
    assert local.connections == 0


@pytest.mark.parametrize(
    "to", ["http://[::1]:{port}/", "http://127.0.0.2:{port}/", "//other.example.com:{port}/", "ftp://x/"]
)
async def test_redirect_is_checked_like_the_first_address(site: Pages, local: Listener, to: str) -> None:
    names = ScriptedResolver({"site.example.com": [["127.0.0.1"]], "other.example.com": [["::1", "127.0.0.2"]]})
    guard = OutboundGuard(EgressPolicy(allow=["127.0.0.1/32"]), http=True, ports=(), resolver=names)
    fetcher = Fetcher(guard, timeout_s=5.0, max_bytes=1000)
    site.move("/go", to.format(port=local.port))
    found = await fetcher.get(site.url("/go", host="site.example.com"))
    await fetcher.close()
    assert (found.outcome, site.requested) == ("refused", ["/go"])
    assert local.connections == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://example.com/", "must begin with https://"),
        ("ftp://example.com/", "must begin with https://"),
        ("file:///etc/passwd", "must begin with https://"),
        ("gopher://example.com/", "must begin with https://"),
        ("//example.com/", "must begin with https://"),
        ("example.com", "must begin with https://"),
        ("", "must begin with https://"),
        ("https://user@example.com/", "user name or a password"),
        ("https://user:secret@example.com/", "user name or a password"),
        ("https://@example.com/", "user name or a password"),
        ("https://:@example.com/", "user name or a password"),
        ("https://example.com:8080/", "must use the port 443"),
        ("https://example.com:0/", "must use the port 443"),
        ("https://example.com:65536/", "not a valid URL"),
        ("https://example.com:x/", "not a valid URL"),
        ("https:///path", "has no host"),
        ("https://exa mple.com/", "spaces"),
        ("https://example.com/\nHost: x", "control characters"),
        ("\thttps://example.com/", "spaces"),
        ("https://example.com\\@127.0.0.1/", "backslashes"),
        ("https://127.1/", "neither a name nor a regular address"),
        ("https://0x7f000001/", "neither a name nor a regular address"),
        ("https://a.0x7f/", "neither a name nor a regular address"),
        ("https://127.0.0.1./", "neither a name nor a regular address"),
        ("https://１２７.０.０.１/", "a public address"),
        ("https://[::1]/", "a public address"),
        ("https://[fe80::1%25eth0]/", "a public address"),
        ("https://ex%61mple.com/", "invalid host"),
        ("https://[::1/", "not a valid URL"),
        ("https://example.com/" + "a" * 2048, "longer than 2048"),
    ],
)
def test_refusal_says_what_is_wrong_with_the_address(text: str, why: str) -> None:
    with pytest.raises(UrlRefused, match=why):
        OutboundGuard(EgressPolicy()).check(text)


@pytest.mark.parametrize(
    "text", ["https://example.com", "https://example.com:443/a?b=c#d", "https://8.8.8.8/", "https://[2606:4700::1111]/x", "https://bücher.example/"]
)  # fmt: skip
def test_plain_public_address_is_taken(text: str) -> None:
    assert OutboundGuard(EgressPolicy()).check(text).scheme == "https"


def test_guard_shows_what_it_allows() -> None:
    assert (
        repr(OutboundGuard(EgressPolicy(allow=["127.0.0.0/8"])))
        == "<OutboundGuard https [443] <EgressPolicy +['127.0.0.0/8'] -[]>>"
    )
