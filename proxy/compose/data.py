"""The part of the composition root that answers for tokens, NFTs and prices: what is read, kept, and told.

A worker has one; what it holds open is closed with it.
"""

from __future__ import annotations

from proxy.chains.family import TokenKind
from proxy.core.egress import EgressPolicy
from proxy.services.multicall import Multicall
from proxy.services.names import EnsNames
from proxy.services.prices import PriceService, sources_of
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.tokens.collections import CollectionService
from proxy.services.tokens.contracts import TokenContracts
from proxy.services.tokens.evm_tokens import EvmTokens
from proxy.services.tokens.floor_prices import Marketplace
from proxy.services.tokens.nft_metadata import NftMetadata
from proxy.services.tokens.svm_tokens import SvmTokens
from proxy.services.tokens.token_prices import TokenPrices
from proxy.settings import EgressSettings, PriceSources, Settings, Tables
from proxy.store.cache import DataCache
from proxy.store.holdings import HoldingStore
from proxy.store.pool import Pool
from proxy.web.rest.endpoint import RestHandler
from proxy.web.rest.nfts import NftHandlers
from proxy.web.rest.path_address import PathAddresses
from proxy.web.rest.tokens import TokenHandlers, TokenReader
from proxy.wire.fetcher import Fetcher
from proxy.wire.guard import Guard
from proxy.wire.price_api import PriceApi


class DataFeature:
    def __init__(self, settings: Settings, tables: Tables, pool: Pool, internal_calls: InternalCalls) -> None:
        cache = settings.cache
        self.kept = DataCache(bytes=cache.data_bytes, redis_url=cache.redis_url, enabled=cache.enabled)
        self.multicall = Multicall(internal_calls)
        self._quotes = _quotes(settings.prices)
        self.prices = PriceService(
            sources_of(settings.prices, tables.chains, self.multicall, self._quotes),
            self.kept,
            keep_s=settings.prices.keep_s,
            stale_s=settings.prices.stale_s,
        )
        holdings = HoldingStore(pool)
        self.contracts = TokenContracts(self.multicall, holdings, self.kept, follows=settings.follower.follows)
        market = TokenPrices(self.prices, tables.logos)
        self.tokens: dict[TokenKind, TokenReader] = {
            "evm": EvmTokens(self.contracts, self.multicall, holdings, self.kept, market),
            "svm": SvmTokens(internal_calls, self.kept, market),
        }
        self.guard = _guard(settings.egress)
        self._fetcher = Fetcher(
            self.guard, timeout_s=settings.nfts.fetch_timeout_s, max_bytes=settings.nfts.max_metadata_bytes
        )
        self.nft_metadata = NftMetadata(self.multicall, holdings, self._fetcher, self.kept, settings=settings.nfts)
        self.collections = CollectionService(
            self.contracts,
            self.multicall,
            holdings,
            self.kept,
            market=market,
            pictures=self.nft_metadata,
            floors=Marketplace(self._fetcher, settings.nfts.floor_url),
        )
        self._holders = PathAddresses(EnsNames(self.multicall, self.kept))

    def __repr__(self) -> str:
        return f"<DataFeature {self.kept!r}>"

    def answers(self) -> dict[str, RestHandler]:
        """By operation, for the routes."""
        return {
            **TokenHandlers(self.tokens, self._holders).answers(),
            **NftHandlers(self.nft_metadata, self.collections, self._holders).answers(),
        }

    async def close(self) -> None:
        if self._quotes is not None:
            await self._quotes.close()
        await self._fetcher.close()
        await self.kept.close()


def _guard(given: EgressSettings) -> Guard:
    """What stands before every address that a stranger names."""
    return Guard(EgressPolicy(given.allow, given.deny), http=given.http, ports=given.ports)


def _quotes(given: PriceSources) -> PriceApi | None:
    """The price API, where there is one."""
    if not given.url:
        return None
    headers = {given.key_header: given.key} if given.key else {}
    return PriceApi(given.url, headers=headers, timeout_s=given.timeout_s, per_request=given.per_request)
