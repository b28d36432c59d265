"""Builds the data feature: tokens, NFTs, transfers, simulations and prices. A worker has one, and closes it when it stops."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.chains.families import family_of
from proxy.chains.family import TokenKind
from proxy.chains.registry import Network
from proxy.core.egress import EgressPolicy
from proxy.services.multicall import Multicall
from proxy.services.names import EnsNames
from proxy.services.prices import PriceService, sources_of
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.own_methods import OwnMethod
from proxy.services.tokens.address_history import TransferHistory
from proxy.services.tokens.alchemy_methods import AlchemyMethods
from proxy.services.tokens.alchemy_simulation import AlchemySimulation
from proxy.services.tokens.collections import CollectionService
from proxy.services.tokens.evm_tokens import EvmTokens
from proxy.services.tokens.floor_prices import Marketplace
from proxy.services.tokens.nft_metadata import NftMetadata
from proxy.services.tokens.simulations import Simulations
from proxy.services.tokens.svm_tokens import SvmTokens
from proxy.services.tokens.token_contracts import TokenContracts
from proxy.services.tokens.token_holders import TokenHolders
from proxy.services.tokens.token_prices import TokenPrices
from proxy.services.tokens.wallet_balances import AnkrNetworks, WalletBalances
from proxy.settings import EgressSettings, PriceSources, Settings, Tables
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.replica import ReplicaReads
from proxy.store.postgres.transfers import TransferStore
from proxy.store.valkey.cache import DataCache
from proxy.web.rest.endpoint import RestHandler
from proxy.web.rest.foreign_shapes import AlchemyNfts
from proxy.web.rest.nfts import NftHandlers
from proxy.web.rest.path_address import PathAddresses
from proxy.web.rest.simulate import SimulateHandlers
from proxy.web.rest.tokens import TokenHandlers, TokenReader
from proxy.web.rest.transfers import TransferHandlers
from proxy.wire.fetcher import Fetcher
from proxy.wire.outbound_guard import OutboundGuard
from proxy.wire.price_api import PriceApi


class DataFeature:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        internal_calls: InternalCalls,
        *,
        reads: ReplicaReads | None = None,
        index_pools: Mapping[str, Pool] | None = None,
    ) -> None:
        """`reads`: where holdings are read. `index_pools`: the databases of networks whose index is not in the main one."""
        given, nfts = settings.cache, settings.nfts
        self.cache = DataCache(bytes=given.data_bytes, redis_url=settings.valkey.cache_url, enabled=given.enabled)
        self.multicall = Multicall(internal_calls)
        self._price_api = _price_api(settings.prices)
        sources = sources_of(settings.prices, tables.chains, self.multicall, self._price_api)
        self.prices = PriceService(sources, self.cache, keep_s=settings.prices.keep_s, stale_s=settings.prices.stale_s)
        holdings = HoldingStore(pool, reads, index_pools=index_pools)
        self.contracts = TokenContracts(self.multicall, holdings, self.cache, follows=settings.follower.follows)
        token_prices = TokenPrices(self.prices, tables.logos)
        evm = EvmTokens(self.contracts, self.multicall, holdings, self.cache, token_prices)
        self.tokens: dict[TokenKind, TokenReader] = {
            "evm": evm,
            "svm": SvmTokens(internal_calls, self.cache, token_prices),
        }
        self.holders = TokenHolders(self.contracts, holdings, self.cache)
        self.history = TransferHistory(self.contracts, TransferStore(holdings.index), internal_calls)
        self._alchemy = AlchemyMethods(self.history, evm, self.multicall, internal_calls)
        self._wallets = WalletBalances(evm, internal_calls, _ankr_networks(settings, tables, internal_calls))
        self.simulations = Simulations(self.contracts, self.multicall, token_prices, internal_calls)
        self.guard = _guard(settings.egress)
        self._fetcher = Fetcher(self.guard, timeout_s=nfts.fetch_timeout_s, max_bytes=nfts.max_metadata_bytes)
        self.nft_metadata = NftMetadata(self.multicall, holdings, self._fetcher, self.cache, settings=nfts)
        self.collections = CollectionService(
            self.contracts,
            self.multicall,
            holdings,
            self.cache,
            prices=token_prices,
            images=self.nft_metadata,
            floors=Marketplace(self._fetcher, nfts.floor_url),
        )
        self._has_alchemy = settings.aliases["alchemy"]
        self._addresses = PathAddresses(EnsNames(self.multicall, self.cache))

    def __repr__(self) -> str:
        return f"<DataFeature {self.cache!r}>"

    def handlers(self) -> dict[str, RestHandler]:
        """The handlers, by operation id."""
        return {
            **TokenHandlers(self.tokens, self.holders, self._addresses).handlers(),
            **TransferHandlers(self.history, self._addresses).handlers(),
            **SimulateHandlers(self.simulations).handlers(),
            **NftHandlers(self.nft_metadata, self.collections, self._addresses).handlers(),
            **AlchemyNfts(self.nft_metadata, self.collections, is_on=self._has_alchemy).handlers(),
        }

    def own_methods(self) -> dict[str, OwnMethod]:
        """The JSON-RPC methods that are answered here, by name."""
        return {
            **self._alchemy.handlers(),
            **AlchemySimulation(self.simulations).handlers(),
            **self._wallets.handlers(),
        }

    async def close(self) -> None:
        if self._price_api is not None:
            await self._price_api.close()
        await self._fetcher.close()
        await self.cache.close()


def _ankr_networks(settings: Settings, tables: Tables, calls: InternalCalls) -> AnkrNetworks:
    """The networks whose balances are known, with Ankr's names of them."""

    def is_indexed(network: Network) -> bool:
        has_tokens = family_of(network).tokens == "evm"
        return has_tokens and settings.follower.follows(network.id) and calls.reaches(network)

    return AnkrNetworks(tables.chains, tables.providers["ankr"].networks, is_indexed)


def _guard(given: EgressSettings) -> OutboundGuard:
    """Checks every address that untrusted parties name."""
    return OutboundGuard(EgressPolicy(given.allow, given.deny), http=given.http, ports=given.ports)


def _price_api(given: PriceSources) -> PriceApi | None:
    """The price API, if one is configured."""
    if not given.url:
        return None
    headers = {given.key_header: given.key} if given.key else {}
    return PriceApi(given.url, headers=headers, timeout_s=given.timeout_s, per_request=given.per_request)
