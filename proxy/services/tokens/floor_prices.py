"""Floor prices of collections, from the marketplace that the operator configures. Without one, floor prices are unknown.

The request goes to `nfts.floor_url`, with the network's chain id and the contract filled in. The reply is JSON with the price
in the network's native coin: `{"floor_price_eth": "0.85"}`. Any other reply counts as no price.
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


class _FloorReply(msgspec.Struct):
    floor_price_eth: Decimal | None = None


_read_reply = msgspec.json.Decoder(_FloorReply).decode


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
            price = _read_reply(fetched.body).floor_price_eth if fetched.outcome == "ok" else None
        except msgspec.DecodeError:
            price = None
        if price is None or not units.is_price(price):
            log.warning("no floor price", extra={"network": network.id, "outcome": fetched.outcome})
            return None
        return price
