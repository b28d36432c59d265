"""PriceService: the order of sources, caching, and None instead of a wrong price."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.chains.registry import Network
from proxy.errors import Unavailable
from proxy.services.prices import Price, PriceService, sources_of
from proxy.settings import FixedPrice, PriceFeed, PriceSources
from proxy.store.valkey.cache import JOIN_S, DataCache
from proxy.tasks import client_of_task
from proxy.wire.price_api import AWAY_S, PriceApi
from tests.chains.test_price_feeds import words
from tests.service import SOON_S
from tests.shipped_tables import TABLES
from tests.wire.external_servers import Pages, pages

CHAINS = TABLES.chains
NOW = 1_700_000_000.0
USDC = "0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB48"
OTHER = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
FEED = "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359"


def network(name: str) -> Network:
    found = CHAINS.find(*name.split("/"))
    assert found is not None
    return found


LIVE, TEST, DEV = network("ethereum/mainnet"), network("ethereum/hoodi"), network("dev/mainnet")


class Chain:
    """Price feed contracts: each returns its latest round and its decimals, or reverts."""

    def __init__(self, feeds: Mapping[str, tuple[bytes | None, bytes | None]]) -> None:
        self._feeds = {bytes.fromhex(address[2:]): results for address, results in feeds.items()}
        self.reads = 0
        self.is_down = False
        # Clients whose reads wait until this is set, as for their units.
        self.waiting_clients: set[str] = set()
        self.goes_on = asyncio.Event()

    async def read(self, network: Network, calls: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        self.reads += 1
        await asyncio.sleep(0)
        if client_of_task.get() in self.waiting_clients:
            await self.goes_on.wait()
        if self.is_down:
            raise Unavailable("no upstream is available")
        return [self._feeds.get(to, (None, None))[len(data) and data[0] == 0x31] for to, data in calls]


def feed_results(answer: int, age_s: float = 60.0, decimals: int = 8) -> tuple[bytes, bytes]:
    at = int(NOW - age_s)
    return words(1, answer, at, at, 1), words(decimals)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def price_service(
    chain: Chain | None = None, *, url: str = "", clock: Clock | None = None, **given: Any
) -> AsyncIterator[PriceService]:
    options: dict[str, Any] = {
        "sources": ("feeds", "http", "fixed"), "key": "", "key_header": "x-key", "timeout_s": 5.0, "per_request": 2,
        "keep_s": 60.0, "stale_s": 600.0, "feeds": (), "fixed": (),
    }  # fmt: skip
    found = PriceSources(url=url, **{**options, **given})
    at = clock or Clock()
    api = PriceApi(url, headers={"x-key": "open sesame"}, timeout_s=5.0, per_request=2, clock=at) if url else None
    cache = DataCache(bytes=1 << 20)
    made = PriceService(
        sources_of(found, CHAINS, chain or Chain({}), api),
        cache,
        keep_s=found.keep_s,
        stale_s=found.stale_s,
        clock=at,
    )
    try:
        yield made
    finally:
        await cache.close()
        if api is not None:
            await api.close()


def feed_of(network: Network, contract: str) -> str:
    return network.facts.feeds[contract].address


def when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# Feeds on the chain


async def test_built_in_feed_returns_the_price_and_its_time() -> None:
    async with price_service(Chain({feed_of(LIVE, "native"): feed_results(3_000_12345678)})) as prices:
        assert await prices.usd(LIVE) == Price(Decimal("3000.12345678"), when(NOW - 60), "feeds")


async def test_age_of_a_price_is_measured_by_the_newest_block_if_blocks_are_made_on_demand() -> None:
    assert DEV.chain.multicall is not None
    idle_s = 7200.0
    idle = {
        feed_of(DEV, "native"): feed_results(3_000 * 10**8, age_s=idle_s + 3000),
        DEV.chain.multicall: (words(int(NOW - idle_s)), None),
    }
    async with price_service(Chain(idle)) as prices:
        assert await prices.usd(DEV) == Price(Decimal(3000), when(NOW - idle_s - 3000), "feeds")
    old = {**idle, feed_of(DEV, "native"): feed_results(3_000 * 10**8, age_s=idle_s + 4000)}
    async with price_service(Chain(old)) as prices:
        assert await prices.usd(DEV) is None


async def test_many_feeds_are_read_by_one_call() -> None:
    chain = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8), feed_of(LIVE, USDC): feed_results(99_990_000)})
    async with price_service(chain) as prices:
        found = await prices.usd_many(LIVE, [None, USDC, USDC.lower(), OTHER])
    assert {name: price and price.usd for name, price in found.items()} == {
        None: Decimal(3000),
        USDC: Decimal("0.9999"),
        USDC.lower(): Decimal("0.9999"),
        OTHER: None,
    }
    assert chain.reads == 1


@pytest.mark.parametrize(
    "results",
    [
        feed_results(3_000 * 10**8, age_s=86_400),
        feed_results(0),
        feed_results(-5),
        (None, words(8)),
        (words(1, 1, 1, int(NOW), 1), None),
        (b"\0" * 31, words(8)),
        (words(1, 1, 1, int(NOW), 1), words(10**9)),
    ],
    ids=["stale", "zero", "negative", "reverts", "no decimals", "short", "too many decimals"],
)
async def test_feed_without_a_valid_price_is_skipped(results: tuple[bytes | None, bytes | None]) -> None:
    fixed = (FixedPrice(network="ethereum/mainnet", usd=Decimal("2.50")),)
    async with price_service(Chain({feed_of(LIVE, "native"): results}), fixed=fixed) as prices:
        assert await prices.usd(LIVE) == Price(Decimal("2.50"), when(NOW), "fixed")
    async with price_service(Chain({feed_of(LIVE, "native"): results})) as prices:
        assert await prices.usd(LIVE) is None


async def test_operators_feed_takes_precedence_over_the_built_in_one() -> None:
    own = (
        PriceFeed(network="eth/mainnet", feed=FEED, max_age_s=100.0),
        PriceFeed(network="dev/mainnet", contract=OTHER, feed=FEED, max_age_s=100.0),
    )
    chain = Chain({FEED: feed_results(7 * 10**8), feed_of(LIVE, "native"): feed_results(3_000 * 10**8)})
    async with price_service(chain, feeds=own) as prices:
        assert (await prices.usd(LIVE)) == Price(Decimal(7), when(NOW - 60), "feeds")
        assert (await prices.usd(DEV, OTHER.lower())) == Price(Decimal(7), when(NOW - 60), "feeds")
        assert await prices.usd(TEST) is None


# Fixed prices


async def test_fixed_price_applies_to_its_network_and_contract_only() -> None:
    fixed = (
        FixedPrice(network="dev/mainnet", usd=Decimal("3000.00")),
        FixedPrice(network="dev/mainnet", contract=OTHER, usd=Decimal("0.000001")),
        FixedPrice(network="solana/mainnet", contract="EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v", usd=Decimal(1)),
        FixedPrice(network="ethereum/hoodi", usd=Decimal(0)),
    )
    solana = network("solana/mainnet")
    async with price_service(fixed=fixed) as prices:
        assert await prices.usd(DEV) == Price(Decimal("3000.00"), when(NOW), "fixed")
        assert await prices.usd(DEV, OTHER.upper().replace("X", "x")) == Price(Decimal("0.000001"), when(NOW), "fixed")
        assert await prices.usd(solana, "EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v") is not None
        assert await prices.usd(solana, "epjfwdd5aufqssqem2qn1xzybapc8g4weggkzwytdt1v") is None
        assert await prices.usd(network("dev/testnet")) is None
        assert await prices.usd(TEST) is None  # a fixed price of zero counts as none


async def test_sources_are_used_in_the_operators_order() -> None:
    chain = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8)})
    fixed = (FixedPrice(network="ethereum/mainnet", usd=Decimal(1)),)
    async with price_service(chain, fixed=fixed, sources=("fixed", "feeds")) as prices:
        assert await prices.usd(LIVE) == Price(Decimal(1), when(NOW), "fixed")
        assert chain.reads == 0
        assert repr(prices) == "<PriceService from fixed, feeds>"
    async with price_service(chain, fixed=fixed, sources=()) as prices:
        assert await prices.usd(LIVE) is None


# A price API


@pytest.fixture
async def api() -> AsyncIterator[Pages]:
    async with pages() as found:
        yield found


def quote(api: Pages, coins: Mapping[str, Any], tokens: Mapping[str, Any]) -> str:
    """Serve prices as CoinGecko does: only the requested ones, contracts in lower case."""

    async def of_coins(request: web.Request) -> web.Response:
        return _json({name: coins[name] for name in request.query["ids"].split(",") if name in coins})

    async def of_tokens(request: web.Request) -> web.Response:
        contracts = request.query["contract_addresses"].lower().split(",")
        return _json({name: tokens[name] for name in contracts if name in tokens})

    api.pages["/api/v3/simple/price"] = of_coins
    api.pages["/api/v3/simple/token_price/ethereum"] = of_tokens
    return api.url("/api/v3/")


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


ONLY_HTTP: dict[str, Any] = {"sources": ("http",)}


async def test_price_api_is_queried_for_the_coin_and_for_tokens_in_parts(api: Pages) -> None:
    tokens = {USDC.lower(): {"usd": 0.9998, "last_updated_at": 1_699_999_000}, OTHER.lower(): {"usd": 1e-7}}
    url = quote(api, {"ethereum": {"usd": 3000.1, "last_updated_at": 1_699_999_990}}, tokens)
    third = "0x" + "11" * 20
    async with price_service(url=url, **ONLY_HTTP) as prices:
        found = await prices.usd_many(LIVE, [None, USDC, OTHER, third])
    assert found == {
        None: Price(Decimal("3000.1"), when(1_699_999_990), "http"),
        USDC: Price(Decimal("0.9998"), when(1_699_999_000), "http"),
        OTHER: Price(Decimal("1E-7"), when(NOW), "http"),
        third: None,
    }
    assert len(api.requested) == 3  # one for the coin, two for three tokens
    assert {head["x-key"] for head in api.heads} == {"open sesame"}
    assert all("vs_currencies=usd" in path for path in api.requested)


async def test_price_api_is_not_queried_for_test_networks(api: Pages) -> None:
    async with price_service(url=quote(api, {"ethereum": {"usd": 1}}, {}), **ONLY_HTTP) as prices:
        assert await prices.usd(TEST) is None
    assert api.requested == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"no json", b"[]", b"null", b'{"ethereum": 5}', b'{"ethereum": {"usd": "NaN"}}', b'{"ethereum": {"usd": 0}}',
        b'{"ethereum": {"usd": -1}}', b'{"ethereum": {"usd": null}}', b'{"ethereum": {"usd": NaN}}', b"{}",
        b'{"ethereum": {"usd": 1e999999}}', b'{"ethereum": {"usd": 1e-999999}}', b'{"ethereum": {"usd": "-Infinity"}}',
        b'{"ethereum": {"usd": 1.' + b"1" * 100_000 + b"}}",
        b'{"bitcoin": {"usd": 5}}', b'{"ethereum": {"usd": 1, "x": "' + b"y" * (1 << 20) + b'"}}',
    ],
)  # fmt: skip
async def test_invalid_price_in_a_reply_is_none(api: Pages, body: bytes) -> None:
    api.put("/simple/price", body)
    async with price_service(url=api.url(), **ONLY_HTTP) as prices:
        assert await prices.usd(LIVE) is None


async def test_invalid_time_is_replaced_by_the_time_of_the_reply(api: Pages) -> None:
    api.put("/simple/price", b'{"ethereum": {"usd": 5, "last_updated_at": 99999999999999}}')
    async with price_service(url=api.url(), **ONLY_HTTP) as prices:
        assert await prices.usd(LIVE) == Price(Decimal(5), when(NOW), "http")


async def test_api_is_not_queried_for_a_while_after_a_failure(api: Pages) -> None:
    api.put("/simple/price", b"no json")
    clock = Clock()
    async with price_service(url=api.url(), clock=clock, keep_s=0.0, **ONLY_HTTP) as prices:
        for _ in range(3):
            assert await prices.usd(LIVE) is None
        assert len(api.requested) == 1
        api.put("/simple/price", b'{"ethereum": {"usd": 5}}')
        clock.now += AWAY_S
        assert (await prices.usd(LIVE)) is not None


async def test_retry_after_header_of_the_api_is_honoured(api: Pages) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "120"})

    api.pages["/simple/price"] = page
    clock = Clock()
    async with price_service(url=api.url(), clock=clock, keep_s=0.0, **ONLY_HTTP) as prices:
        assert await prices.usd(LIVE) is None
        clock.now += 119
        assert await prices.usd(LIVE) is None
        assert len(api.requested) == 1
        clock.now += 1
        assert await prices.usd(LIVE) is None
        assert len(api.requested) == 2


async def test_next_source_is_used_while_the_api_is_unavailable(api: Pages) -> None:
    api.put("/simple/price", b"no json")
    fixed = (FixedPrice(network="ethereum/mainnet", usd=Decimal(2)),)
    async with price_service(url=api.url(), fixed=fixed) as prices:
        assert await prices.usd(LIVE) == Price(Decimal(2), when(NOW), "fixed")


# Caching


async def test_known_and_unknown_prices_are_cached() -> None:
    chain, clock = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8)}), Clock()
    async with price_service(chain, clock=clock, keep_s=60.0) as prices:
        first = await prices.usd(LIVE)
        assert await prices.usd(LIVE, OTHER) is None
        clock.now += 59
        assert await prices.usd(LIVE) == first
        assert chain.reads == 1
        clock.now += 1
        await prices.usd(LIVE)
        assert chain.reads == 2


async def test_last_price_is_served_for_a_while_if_the_source_is_unavailable() -> None:
    chain, clock = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8)}), Clock()
    async with price_service(chain, clock=clock, keep_s=60.0, stale_s=600.0) as prices:
        first = await prices.usd(LIVE)
        chain.is_down = True
        clock.now += 600
        assert await prices.usd(LIVE) == first
        assert first is not None
        assert first.at == when(NOW - 60)  # its original time
        clock.now += 6
        assert await prices.usd(LIVE) is None
        chain.is_down = False
        clock.now += 6
        assert await prices.usd(LIVE) == first


async def test_outdated_price_of_an_available_source_is_not_served() -> None:
    """Only a source that cannot be read is replaced by its last price."""
    chain, clock = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8)}), Clock()
    async with price_service(chain, clock=clock, keep_s=60.0) as prices:
        assert await prices.usd(LIVE) is not None
        clock.now += 86_400
        assert await prices.usd(LIVE) is None


async def test_concurrent_requests_share_one_look_up() -> None:
    chain = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8), feed_of(LIVE, USDC): feed_results(10**8)})
    async with price_service(chain) as prices:
        found = await asyncio.gather(*(prices.usd_many(LIVE, [None, USDC]) for _ in range(50)), prices.usd(LIVE))
        assert chain.reads == 1
        assert all(each == found[0] for each in found[:50])


async def test_cancelled_request_leaves_the_look_up_to_the_others() -> None:
    chain = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8)})
    async with price_service(chain) as prices, asyncio.TaskGroup() as group:
        first = group.create_task(prices.usd(LIVE))
        second = group.create_task(prices.usd(LIVE))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        assert (await second) is not None


async def test_slow_look_up_of_one_client_does_not_delay_another() -> None:
    """The first account has no units left, so its look-up waits. The second makes its own, and others join that one."""
    chain = Chain({feed_of(LIVE, "native"): feed_results(3_000 * 10**8)})
    chain.waiting_clients = {"acct_poor"}

    async def price_for(client: str) -> Price | None:
        client_of_task.set(client)
        return await prices.usd(LIVE)

    async with price_service(chain) as prices, asyncio.TaskGroup() as group:
        poor = [group.create_task(price_for("acct_poor")) for _ in range(2)]
        await asyncio.sleep(0)
        rich = [group.create_task(price_for("acct_rich")) for _ in range(3)]
        async with asyncio.timeout(JOIN_S + SOON_S):
            found = await asyncio.gather(*rich)
        assert not any(task.done() for task in poor)
        chain.goes_on.set()
        assert {await task for task in poor} == set(found)
        assert chain.reads == 2


async def test_prices_of_networks_are_separate() -> None:
    fixed = (FixedPrice(network="dev/mainnet", contract=OTHER, usd=Decimal(1)),)
    async with price_service(fixed=fixed) as prices:
        assert await prices.usd(network("dev/testnet"), OTHER) is None
        assert await prices.usd(DEV, OTHER) is not None
        assert await prices.usd(LIVE, OTHER) is None
