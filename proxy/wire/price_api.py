"""A price API of CoinGecko's shape, at the address that the operator gave: it may be private, so nothing guards the way there.

Nobody waits for it for long, and after a failure nobody asks for a while. It is believed for what it says and no more: a price
that is not positive is none.
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

# The answer for 500 tokens has 40 KB.
LARGEST = 1 << 20
# How long nobody asks after a failure; or longer, where it says so.
AWAY_S = 10.0
LONGEST_AWAY_S = 3600.0


class PriceApiUnavailable(Exception):
    """It did not answer, or not with prices. That is no price's fault: the last one known may still be good."""


class Quote(msgspec.Struct, frozen=True):
    """One price in the API's answer, and its time in seconds."""

    usd: Decimal | None = None
    last_updated_at: int | None = None


_ANSWER = msgspec.json.Decoder(dict[str, Quote])


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
        """The price of a chain's own coin."""
        found = await self._ask(self._url / "simple" / "price", {"ids": name})
        return _sound(found.get(name))

    async def tokens(self, platform: str, contracts: Iterable[str]) -> dict[str, Quote]:
        """The prices of a chain's tokens that are known, by the contracts as they were given."""
        left = iter(contracts)
        known: dict[str, Quote] = {}
        while some := list(islice(left, self._per_request)):
            found = await self._ask(
                self._url / "simple" / "token_price" / platform, {"contract_addresses": ",".join(some)}
            )
            known |= _named(some, found)
        return known

    async def _ask(self, url: URL, query: dict[str, str]) -> dict[str, Quote]:
        if self._clock() < self._away_until:
            raise PriceApiUnavailable("after a failure")
        asked = url.with_query({**query, "vs_currencies": "usd", "include_last_updated_at": "true"})
        try:
            return _ANSWER.decode(await self._read(asked))
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
        if retry_after.isascii() and retry_after.isdecimal():
            self._away_until = self._clock() + min(float(retry_after), LONGEST_AWAY_S)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _sound(quote: Quote | None) -> Quote | None:
    return quote if quote is not None and quote.usd is not None and units.is_price(quote.usd) else None


def _named(contracts: Sequence[str], found: dict[str, Quote]) -> dict[str, Quote]:
    """By the contracts as they were asked: the API may answer in another case."""
    by_lower = {name.lower(): quote for name, quote in found.items()}
    pairs = ((contract, _sound(found.get(contract) or by_lower.get(contract.lower()))) for contract in contracts)
    return {contract: quote for contract, quote in pairs if quote is not None}
