"""What coins and tokens are worth in US dollars, by the first source that knows: feeds on the chain, a price API, fixed prices.

A price has its time and its source, and is kept for a while; a price that is unknown is None and never zero. Where a source is
away, the last price that it gave is good for a while longer. One of all that ask for the same price at once looks it up.
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
from proxy.store.cache import DataCache
from proxy.wire.price_api import PriceApi, PriceApiUnavailable, Quote

log = logging.getLogger("penstock.prices")

# The name of a network's own coin among its tokens.
NATIVE = "native"
KIND = "price"
# How long a price is good that could not be looked up anew.
AGAIN_S = 5.0
# A source that stays away is not news for this long.
WARN_S = 60.0
# A price API may say a time that is none.
_LATEST = 253_402_300_799


@dataclass(frozen=True, slots=True)
class Price:
    """What one whole coin or token is worth."""

    usd: Decimal
    at: datetime
    source: Literal["feeds", "http", "fixed"]


class PriceContracts(Protocol):
    async def read(self, network: Network, calls: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """What each call (contract, calldata) returns; None where the contract refuses it."""
        ...


class PriceSource(Protocol):
    @property
    def name(self) -> str: ...

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        """Those that it may know. Of the others nothing needs to be asked, or kept."""
        ...

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        """The prices that it knows. Away where it cannot tell."""
        ...


class PriceService:
    def __init__(
        self,
        sources: Sequence[PriceSource],
        kept: DataCache,
        *,
        keep_s: float,
        stale_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = tuple(sources)
        self._kept = kept
        self._keep_s = keep_s
        self._stale_s = stale_s
        self._clock = clock
        # By network and name, what somebody is looking up.
        self._flights: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._warned_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<PriceService from {', '.join(source.name for source in self._sources) or 'nowhere'}>"

    async def usd(self, network: Network, contract: str | None = None) -> Price | None:
        """The price of a token; without one, of the network's own coin."""
        return (await self.usd_many(network, [contract]))[contract]

    async def usd_many(self, network: Network, contracts: Sequence[str | None]) -> dict[str | None, Price | None]:
        """The prices by the contracts as they were given, each known or None."""
        names = {contract: _name(network, contract) for contract in contracts}
        wanted = set(names.values())
        found = await self._find(network, sorted(set().union(*(each.among(network, wanted) for each in self._sources))))
        return {contract: found.get(name) for contract, name in names.items()}

    async def _find(self, network: Network, names: Sequence[str]) -> dict[str, Price | None]:
        while True:
            entries = await self._entries(network, names)
            now = self._clock()
            known = {name: entry.price for name, entry in entries.items() if now < entry.good_until}
            missing = [name for name in names if name not in known]
            flights = [flight for name in missing if (flight := self._flights.get((network.id, name)))]
            if not flights:
                return known | await self._look_up(network, missing, entries) if missing else known
            await asyncio.wait(flights)

    async def _entries(self, network: Network, names: Sequence[str]) -> dict[str, _Entry]:
        kept = await self._kept.get(network.id, KIND, names)
        return {name: _Entry.of(data) for name, data in zip(names, kept, strict=True) if data is not None}

    async def _look_up(
        self, network: Network, names: Sequence[str], before: Mapping[str, _Entry]
    ) -> dict[str, Price | None]:
        flight = asyncio.get_running_loop().create_future()
        self._flights |= {(network.id, name): flight for name in names}
        try:
            found, is_certain = await self._ask(network, names)
            now = self._clock()
            entries = {name: self._entry(found.get(name), before.get(name), now, is_certain) for name in names}
            data = {name: entry.data() for name, entry in entries.items()}
            await self._kept.put(network.id, KIND, data, ttl_s=self._keep_s + self._stale_s)
            return {name: entry.price for name, entry in entries.items()}
        finally:
            # Whoever waits looks at what is kept now; and looks it up himself where that is nothing.
            for name in names:
                del self._flights[network.id, name]
            flight.set_result(None)

    def _entry(self, found: Price | None, before: _Entry | None, now: float, is_certain: bool) -> _Entry:
        if found is not None or is_certain:
            return _Entry(found, now, now + self._keep_s)
        if before is not None and before.price is not None and now - before.read_at <= self._stale_s:
            return _Entry(before.price, before.read_at, now + min(AGAIN_S, self._keep_s))
        return _Entry(None, now, now + min(AGAIN_S, self._keep_s))

    async def _ask(self, network: Network, names: Sequence[str]) -> tuple[dict[str, Price], bool]:
        """The prices that are known, and whether every source could be asked for the others."""
        found: dict[str, Price] = {}
        is_certain = True
        for source in self._sources:
            left = [name for name in names if name not in found]
            if not left:
                break
            try:
                found |= await source.find(network, left, self._clock())
            except PriceApiUnavailable as exc:
                is_certain = False
                self._warn(source.name, str(exc))
        return found, is_certain

    def _warn(self, source: str, reason: str) -> None:
        now = self._clock()
        if now - self._warned_at.get(source, 0.0) >= WARN_S:
            self._warned_at[source] = now
            log.warning("price source away", extra={"source": source, "reason": reason})


@dataclass(frozen=True, slots=True)
class _Entry:
    """A price as it is kept, or that there is none."""

    price: Price | None
    read_at: float
    good_until: float

    def data(self) -> list[Any]:
        price = self.price
        told = None if price is None else [str(price.usd), price.at.timestamp(), price.source]
        return [told, self.read_at, self.good_until]

    @classmethod
    def of(cls, data: Any) -> _Entry:
        told, read_at, good_until = data
        price = None if told is None else Price(Decimal(told[0]), datetime.fromtimestamp(told[1], UTC), told[2])
        return cls(price, read_at, good_until)


def _name(network: Network, contract: str | None) -> str:
    if contract is None:
        return NATIVE
    return family_of(network).addresses.fold(contract)


# The sources


class OnChainPrices:
    """Contracts with Chainlink's interface, all asked at once."""

    name = "feeds"

    def __init__(self, contracts: PriceContracts, own: Mapping[tuple[str, str], PriceFeedContract]) -> None:
        self._contracts = contracts
        self._own = own

    def _of(self, network: Network) -> dict[str, PriceFeedContract]:
        """The network's feeds by name; the operator's own come before those that are known."""
        own = {name: feed for (place, name), feed in self._own.items() if place == network.id}
        return {name.lower(): feed for name, feed in network.facts.feeds.items()} | own

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        return names & self._of(network).keys()

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        every = self._of(network)
        told = {name: every[name] for name in names if name in every}
        if not told:
            return {}
        targets = [bytes.fromhex(feed.address[2:]) for feed in told.values()]
        asked = [(target, data) for target in targets for data in (price_feeds.LATEST_ROUND, price_feeds.DECIMALS)]
        try:
            results = await self._contracts.read(network, asked)
        except InternalError as exc:
            raise PriceApiUnavailable(type(exc).__name__) from None
        pairs = zip(told.items(), results[::2], results[1::2], strict=True)
        prices = ((name, _of_feed(feed, latest, places, now)) for (name, feed), latest, places in pairs)
        return {name: price for name, price in prices if price is not None}


def _of_feed(feed: PriceFeedContract, latest: bytes | None, decimals: bytes | None, now: float) -> Price | None:
    found, places = price_feeds.round_of(latest), abi.uint(decimals)
    if found is None or places is None:
        return None
    usd = price_feeds.price_of(found, places, now=now, max_age_s=feed.max_age_s)
    return None if usd is None else Price(usd, _time(found.updated_at), "feeds")


class ApiPrices:
    """A price API. Coins of test networks are worth nothing there."""

    name = "http"

    def __init__(self, api: PriceApi) -> None:
        self._api = api

    def among(self, network: Network, names: Set[str]) -> Set[str]:
        return names if network.chain.listing is not None and network.is_live else set()

    async def find(self, network: Network, names: Sequence[str], now: float) -> dict[str, Price]:
        listing = network.chain.listing
        if listing is None or not network.is_live:
            return {}
        found: dict[str, Quote] = {}
        if NATIVE in names and (coin := await self._api.coin(listing.coin)):
            found[NATIVE] = coin
        if tokens := [name for name in names if name != NATIVE]:
            found |= await self._api.tokens(listing.platform, tokens)
        return {name: _of_quote(quote, now) for name, quote in found.items()}


def _of_quote(quote: Quote, now: float) -> Price:
    assert quote.usd is not None  # the API's room gives no other
    at = quote.last_updated_at
    return Price(quote.usd, _time(at if at is not None and 0 < at <= _LATEST else now), "http")


class FixedPrices:
    """What the operator says it is worth."""

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
    """The sources in the operator's order; a price API only where there is one."""
    own = {_place(chains, each): PriceFeedContract(each.feed, each.max_age_s) for each in given.feeds}
    usd = {_place(chains, each): each.usd for each in given.fixed}
    every: dict[str, PriceSource] = {"feeds": OnChainPrices(contracts, own), "fixed": FixedPrices(usd)}
    if api is not None:
        every["http"] = ApiPrices(api)
    return [every[name] for name in given.sources if name in every]


def _place(chains: Registry, given: PriceFeed | FixedPrice) -> tuple[str, str]:
    network = chains.find(*given.network.split("/"))
    assert network is not None  # checked when the settings were read
    return network.id, _name(network, given.contract or None)
