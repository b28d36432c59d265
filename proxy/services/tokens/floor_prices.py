"""The lowest asking price of a collection, from the one marketplace that the operator names; without one there is none.

Asked is `nfts.floor_url` with the network's chain id and the contract put in, and the answer is JSON with the price in the
network's coin: `{"floor_price_eth": "0.85"}`. What is not such an answer is no price.
"""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import Protocol

import msgspec

from proxy.chains.registry import Network
from proxy.core import units

log = logging.getLogger("penstock.floors")


class FetchedDocument(Protocol):
    @property
    def outcome(self) -> str: ...
    @property
    def body(self) -> bytes: ...


class DocumentFetcher(Protocol):
    async def get(self, url: str, *, own: bool = False) -> FetchedDocument: ...


class _Answer(msgspec.Struct):
    floor_price_eth: Decimal | None = None


_answer = msgspec.json.Decoder(_Answer).decode


class Marketplace:
    def __init__(self, fetcher: DocumentFetcher, url: str) -> None:
        self._fetcher = fetcher
        self._url = url

    def __repr__(self) -> str:
        return "<Marketplace>" if self._url else "<Marketplace, none>"

    async def find(self, network: Network, contract: str) -> Decimal | None:
        chain_id = network.facts.chain_id
        if not self._url or chain_id is None:
            return None
        url = self._url.replace("{chain_id}", str(chain_id)).replace("{contract}", contract)
        fetched = await self._fetcher.get(url, own=True)
        if fetched.outcome == "not_found":
            return None
        try:
            price = _answer(fetched.body).floor_price_eth if fetched.outcome == "ok" else None
        except msgspec.DecodeError:
            price = None
        if price is None or not units.is_price(price):
            log.warning("no floor price", extra={"network": network.id, "outcome": fetched.outcome})
            return None
        return price
