"""Prices of coins and tokens in US dollars, from the first source that has one: feeds on the chain, a price API, fixed prices.

A price has a time and a source, and is cached. An unknown price is None, never zero. While a source is unavailable, its last
price is served for a while longer. Concurrent requests for the same price share one look-up, but none waits long for that of
another client: it may wait for that client's units.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, Protocol

from proxy.chains.evm import abi, price_feeds
from proxy.chains.families import family_of
from proxy.chains.registry import Network, PriceFeedContract, Registry
from proxy.errors import InternalError
from proxy.settings import FixedPrice, PriceFeed, PriceSources
from proxy.store.valkey.cache import JOIN_S, DataCache
from proxy.tasks import client_of_task
from proxy.wire.price_api import PriceApi, PriceApiUnavailable, Quote

log = logging.getLogger("penstock.prices")

# The name of a network's native coin among its tokens.
NATIVE = "native"
KIND = "price"
# How long a price is served after a failed look-up, before the next one.
RETRY_S = 5.0
# A source that stays unavailable is logged at most this often.
WARN_S = 60.0
# The last second of the year 9999: a price API may return a time that datetime cannot hold.
_LATEST = 253_402_300_799


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one whole coin or token."""

    usd: Decimal
    at: datetime
    source: Literal["feeds", "http", "fixed"]


# A function of Multicall3.
_BLOCK_TIME = abi.call("getCurrentBlockTimestamp()")


class PriceContracts(Protocol):
    async def read(self, network: Network, calls: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """The result of each call (contract, calldata); None if the contract reverts."""
        ...


class PriceSource(Protocol):
    @property
    def name(self) -> str: ...

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        """The names that this source may have a price for. The others are neither looked up nor cached."""
        ...

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        """The prices that this source has. Raises PriceApiUnavailable if it cannot be read."""
        ...


class PriceService:
    def __init__(
        self,
        sources: Sequence[PriceSource],
        cache: DataCache,
        *,
        keep_s: float,
        stale_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = tuple(sources)
        self._cache = cache
        self._keep_s = keep_s
        self._stale_s = stale_s
        self._clock = clock
        # Look-ups under way and the client of each, by network and name.
        self._flights: dict[tuple[str, str], tuple[asyncio.Future[None], str]] = {}
        self._warned_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<PriceService from {', '.join(source.name for source in self._sources) or 'nowhere'}>"

    async def usd(self, network: Network, contract: str | None = None) -> Price | None:
        """The price of a token, or of the network's native coin if no contract is given."""
        return (await self.usd_many(network, [contract]))[contract]

    async def usd_many(self, network: Network, contracts: Sequence[str | None]) -> dict[str | None, Price | None]:
        """The prices, by the contracts as given; None where unknown."""
        names = {contract: _name(network, contract) for contract in contracts}
        wanted = set(names.values())
        prices = await self._find(
            network, sorted(set().union(*(each.among(network, wanted) for each in self._sources)))
        )
        return {contract: prices.get(name) for contract, name in names.items()}

    async def _find(self, network: Network, names: Sequence[str]) -> dict[str, Price | None]:
        too_slow: set[asyncio.Future[None]] = set()
        while True:
            entries = await self._entries(network, names)
            now = self._clock()
            known = {name: entry.price for name, entry in entries.items() if now < entry.expires_at}
            missing = [name for name in names if name not in known]
            if not missing:
                return known
            flights = dict(flight for name in missing if (flight := self._flights.get((network.id, name))))
            if flights.keys() <= too_slow:
                return known | await self._look_up(network, missing, entries)
            too_slow |= await _wait(flights)

    async def _entries(self, network: Network, names: Sequence[str]) -> dict[str, _Entry]:
        cached = await self._cache.get(network.id, KIND, names)
        return {name: _Entry.of(data) for name, data in zip(names, cached, strict=True) if data is not None}

    async def _look_up(
        self, network: Network, names: Sequence[str], before: Mapping[str, _Entry]
    ) -> dict[str, Price | None]:
        flight = asyncio.get_running_loop().create_future()
        mine = (flight, client_of_task.get())
        self._flights |= {(network.id, name): mine for name in names}
        try:
            prices, is_complete = await self._query_sources(network, names)
            now = self._clock()
            entries = {name: self._entry(prices.get(name), before.get(name), now, is_complete) for name in names}
            data = {name: entry.data() for name, entry in entries.items()}
            await self._cache.put(network.id, KIND, data, ttl_s=self._keep_s + self._stale_s)
            return {name: entry.price for name, entry in entries.items()}
        finally:
            # Waiting requests read the cache again, and look the price up themselves if it is not there.
            for name in names:
                if self._flights.get((network.id, name)) is mine:
                    del self._flights[network.id, name]
            flight.set_result(None)

    def _entry(self, price: Price | None, before: _Entry | None, now: float, is_complete: bool) -> _Entry:
        if price is not None or is_complete:
            return _Entry(price, now, now + self._keep_s)
        if before is not None and before.price is not None and now - before.read_at <= self._stale_s:
            return _Entry(before.price, before.read_at, now + min(RETRY_S, self._keep_s))
        return _Entry(None, now, now + min(RETRY_S, self._keep_s))

    async def _query_sources(self, network: Network, names: Sequence[str]) -> tuple[dict[str, Price], bool]:
        """The prices found, and whether every source could be read for the rest."""
        prices: dict[str, Price] = {}
        is_complete = True
        for source in self._sources:
            left = [name for name in names if name not in prices]
            if not left:
                break
            try:
                prices |= await source.find(network, left, self._clock())
            except PriceApiUnavailable as exc:
                is_complete = False
                self._warn(source.name, str(exc))
        return prices, is_complete

    def _warn(self, source: str, reason: str) -> None:
        now = self._clock()
        if now - self._warned_at.get(source, 0.0) >= WARN_S:
            self._warned_at[source] = now
            log.warning("price source unavailable", extra={"source": source, "reason": reason})


async def _wait(flights: Mapping[asyncio.Future[None], str]) -> set[asyncio.Future[None]]:
    """Wait for look-ups to end, by client. Returns those that take too long, if any is another client's."""
    is_own = {*flights.values()} == {client_of_task.get()}
    _, pending = await asyncio.wait(flights, timeout=None if is_own else JOIN_S)
    return pending


@dataclass(frozen=True, slots=True)
class _Entry:
    """A cached price, or the cached fact that there is none."""

    price: Price | None
    read_at: float
    expires_at: float

    def data(self) -> list[Any]:
        price = self.price
        fields = None if price is None else [str(price.usd), price.at.timestamp(), price.source]
        return [fields, self.read_at, self.expires_at]

    @classmethod
    def of(cls, data: Any) -> _Entry:
        fields, read_at, expires_at = data
        price = None if fields is None else Price(Decimal(fields[0]), datetime.fromtimestamp(fields[1], UTC), fields[2])
        return cls(price, read_at, expires_at)


def _name(network: Network, contract: str | None) -> str:
    if contract is None:
        return NATIVE
    return family_of(network).addresses.fold(contract)


# The sources


class OnChainPrices:
    """Contracts with Chainlink's feed interface, all read by one call."""

    name = "feeds"

    def __init__(self, contracts: PriceContracts, own: Mapping[tuple[str, str], PriceFeedContract]) -> None:
        self._contracts = contracts
        self._own = own

    def _of(self, network: Network) -> dict[str, PriceFeedContract]:
        """The network's feeds by name; the operator's own take precedence over the built-in ones."""
        own = {name: feed for (place, name), feed in self._own.items() if place == network.id}
        return {name.lower(): feed for name, feed in network.facts.feeds.items()} | own

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        return names & self._of(network).keys()

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        every = self._of(network)
        feeds = {name: every[name] for name in names if name in every}
        if not feeds:
            return {}
        targets = [bytes.fromhex(feed.address[2:]) for feed in feeds.values()]
        calls = [(target, data) for target in targets for data in (price_feeds.LATEST_ROUND, price_feeds.DECIMALS)]
        clock = _chain_clock(network)
        try:
            results = await self._contracts.read(network, [*calls, *clock])
        except InternalError as exc:
            raise PriceApiUnavailable(type(exc).__name__) from None
        if clock:
            now = abi.uint(results.pop()) or now
        pairs = zip(feeds.items(), results[::2], results[1::2], strict=True)
        prices = ((name, _of_feed(feed, latest, places, now)) for (name, feed), latest, places in pairs)
        return {name: price for name, price in prices if price is not None}


def _chain_clock(network: Network) -> list[tuple[bytes, bytes]]:
    """The call that reads the time of the newest block, on a network whose blocks are made on demand."""
    if not network.facts.on_demand or network.chain.multicall is None:
        return []
    return [(bytes.fromhex(network.chain.multicall[2:]), _BLOCK_TIME)]


def _of_feed(feed: PriceFeedContract, latest: bytes | None, decimals: bytes | None, now: float) -> Price | None:
    price_round, places = price_feeds.round_of(latest), abi.uint(decimals)
    if price_round is None or places is None:
        return None
    usd = price_feeds.price_of(price_round, places, now=now, max_age_s=feed.max_age_s)
    return None if usd is None else Price(usd, _time(price_round.updated_at), "feeds")


class ApiPrices:
    """A price API. It has no prices for test networks."""

    name = "http"

    def __init__(self, api: PriceApi) -> None:
        self._api = api

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        return names if network.chain.listing is not None and network.is_live else set()

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        listing = network.chain.listing
        if listing is None or not network.is_live:
            return {}
        quotes: dict[str, Quote] = {}
        if NATIVE in names and (coin := await self._api.coin(listing.coin)):
            quotes[NATIVE] = coin
        if tokens := [name for name in names if name != NATIVE]:
            quotes |= await self._api.tokens(listing.platform, tokens)
        return {name: _of_quote(quote, now) for name, quote in quotes.items()}


def _of_quote(quote: Quote, now: float) -> Price:
    assert quote.usd is not None  # PriceApi drops quotes without a price
    at = quote.last_updated_at
    return Price(quote.usd, _time(at if at is not None and 0 < at <= _LATEST else now), "http")


class FixedPrices:
    """Prices set by the operator."""

    name = "fixed"

    def __init__(self, usd: Mapping[tuple[str, str], Decimal]) -> None:
        self._usd = usd

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        return {name for name in names if (network.id, name) in self._usd}

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        given = {name: self._usd.get((network.id, name)) for name in names}
        return {name: Price(usd, _time(now), "fixed") for name, usd in given.items() if usd}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(min(seconds, _LATEST), UTC)


def sources_of(
    given: PriceSources, chains: Registry, contracts: PriceContracts, api: PriceApi | None
) -> list[PriceSource]:
    """The sources in the operator's order; the price API only if there is one."""
    own = {_place(chains, each): PriceFeedContract(each.feed, each.max_age_s) for each in given.feeds}
    usd = {_place(chains, each): each.usd for each in given.fixed}
    every: dict[str, PriceSource] = {"feeds": OnChainPrices(contracts, own), "fixed": FixedPrices(usd)}
    if api is not None:
        every["http"] = ApiPrices(api)
    return [every[name] for name in given.sources if name in every]


def _place(chains: Registry, given: PriceFeed | FixedPrice) -> tuple[str, str]:
    network = chains.find(*given.network.split("/"))
    assert network is not None  # checked when the settings were loaded
    return network.id, _name(network, given.contract or None)
