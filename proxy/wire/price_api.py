"""A client of a price API in CoinGecko's format. The operator configures its address, which may be private.

Requests have a short timeout, and after a failure the API is not called for a while. A price that is not positive counts as
missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from itertools import islice

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar
from yarl import URL

from proxy.core import units
from proxy.core.retry_after import retry_after_s

# Bounds the memory of a reply. One for 500 tokens has 40 KB.
LARGEST = 1 << 20
# The pause after a failure. Retry-After may extend it, up to the longest.
AWAY_S = 10.0
LONGEST_AWAY_S = 3600.0


class PriceApiUnavailable(Exception):
    """The API did not reply with prices. Callers may use the last known ones."""


class Quote(msgspec.Struct, frozen=True):
    """One price in the API's reply, and its time in seconds."""

    usd: Decimal | None = None
    last_updated_at: int | None = None


_REPLY = msgspec.json.Decoder(dict[str, Quote])


class PriceApi:
    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str],
        timeout_s: float,
        per_request: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = URL(url.rstrip("/"))
        self._headers = headers
        self._timeout = ClientTimeout(total=timeout_s)
        self._per_request = per_request
        self._clock = clock
        self._away_until = 0.0
        self._session: ClientSession | None = None

    def __repr__(self) -> str:
        return f"<PriceApi {'away' if self._clock() < self._away_until else 'there'}>"

    async def coin(self, name: str) -> Quote | None:
        """The price of a chain's native coin."""
        quotes = await self._call(self._url / "simple" / "price", {"ids": name})
        return _sound(quotes.get(name))

    async def tokens(self, platform: str, contracts: Iterable[str]) -> dict[str, Quote]:
        """The known prices of a chain's tokens, by contract as given."""
        left = iter(contracts)
        known: dict[str, Quote] = {}
        while some := list(islice(left, self._per_request)):
            quotes = await self._call(
                self._url / "simple" / "token_price" / platform, {"contract_addresses": ",".join(some)}
            )
            known |= _named(some, quotes)
        return known

    async def _call(self, url: URL, query: dict[str, str]) -> dict[str, Quote]:
        if self._clock() < self._away_until:
            raise PriceApiUnavailable("paused after a failure")
        full = url.with_query({**query, "vs_currencies": "usd", "include_last_updated_at": "true"})
        try:
            return _REPLY.decode(await self._read(full))
        except (ClientError, OSError, TimeoutError, msgspec.DecodeError, PriceApiUnavailable) as exc:
            self._away_until = max(self._away_until, self._clock() + AWAY_S)
            raise PriceApiUnavailable(type(exc).__name__) from None

    async def _read(self, url: URL) -> bytes:
        if self._session is None:
            self._session = ClientSession(timeout=self._timeout, cookie_jar=DummyCookieJar(), headers=self._headers)
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                self._stay_away(response.headers.get("Retry-After", ""))
                raise PriceApiUnavailable("not 200")
            body = b""
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > LARGEST:
                    raise PriceApiUnavailable("too large")
            return body

    def _stay_away(self, retry_after: str) -> None:
        if away_s := retry_after_s(retry_after, time.time()):
            self._away_until = self._clock() + min(away_s, LONGEST_AWAY_S)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _sound(quote: Quote | None) -> Quote | None:
    return quote if quote is not None and quote.usd is not None and units.is_price(quote.usd) else None


def _named(contracts: Sequence[str], quotes: dict[str, Quote]) -> dict[str, Quote]:
    """The quotes by contract as requested: the API may reply in another case."""
    by_lower = {name.lower(): quote for name, quote in quotes.items()}
    pairs = ((contract, _sound(quotes.get(contract) or by_lower.get(contract.lower()))) for contract in contracts)
    return {contract: quote for contract, quote in pairs if quote is not None}
