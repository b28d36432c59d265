"""Builds the gas feature: prices, policies and sponsorship."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from proxy.chains.evm import fees, policy
from proxy.chains.evm.signer import Signer
from proxy.chains.families import family_of
from proxy.services.follower.block_reader import BlockReader
from proxy.services.gas import GasPrices
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route
from proxy.services.sponsor.account_versions import AccountVersions
from proxy.services.sponsor.costs import NativePriceSource, SponsorCosts
from proxy.services.sponsor.paymasters import Paymaster, Paymasters
from proxy.services.sponsor.policies import PolicyService
from proxy.services.sponsor.refusals import RefusalLog
from proxy.services.sponsor.settlement import TOPICS, SettlementLoop, SettlementSink
from proxy.services.sponsor.sponsorship import SponsorService
from proxy.settings import Settings, Tables, environment, signer_key
from proxy.store.postgres.ledger import LedgerStore
from proxy.store.postgres.policies import PolicyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.refusals import RefusalStore
from proxy.store.postgres.wallets import WalletStore
from proxy.turn_queue import TurnQueue
from proxy.web.rest.endpoint import RestHandler
from proxy.web.rest.foreign_shapes import InfuraGas
from proxy.web.rest.gas import GasHandlers


class GasFeature:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        internal_calls: InternalCalls,
        prices: NativePriceSource,
        *,
        turns: TurnQueue,
    ) -> None:
        self._tables = tables
        self._has_infura = settings.aliases["infura"]
        self.ledger = LedgerStore(pool)
        self.prices = GasPrices(internal_calls)
        plans = tables.plans.items()
        most = {name: plan.policies for name, plan in plans}
        most_usd = {name: policy.pico(str(plan.sponsored_usd_per_day)) for name, plan in plans}
        self.policies = PolicyService(PolicyStore(pool), self.ledger, turns, most=most)
        self.paymasters = paymasters(settings, tables, environment())
        self.refusals = RefusalLog(RefusalStore(pool))
        self.sponsor = SponsorService(
            self.policies,
            self.ledger,
            self.paymasters,
            AccountVersions(WalletStore(pool), internal_calls, self.paymasters, default=settings.wallets.version),
            SponsorCosts(prices, self.prices),
            internal_calls,
            daily_limits={name: most or None for name, most in most_usd.items()},
            refused=self.refusals.note,
        )

    def __repr__(self) -> str:
        return f"<GasFeature {self.paymasters!r}>"

    def handlers(self) -> dict[str, RestHandler]:
        """The handlers, by operation id."""
        return {
            **GasHandlers(self.prices, self.policies, self.sponsor, self.refusals).handlers(),
            **InfuraGas(self.prices, is_on=self._has_infura).handlers(),
        }


def paymasters(settings: Settings, tables: Tables, environ: Mapping[str, str]) -> Paymasters:
    """The configured paymasters. The signers' keys are read here and nowhere else."""
    configured = []
    for each in settings.paymasters:
        network = tables.chains.find(*each.network.split("/"))
        assert network is not None  # checked when the settings were loaded
        assert network.facts.chain_id is not None
        configured.append(
            Paymaster(
                network=network.id,
                version=each.entry_point,
                address=bytes.fromhex(each.address[2:]),
                entry_point=bytes.fromhex(network.chain.entry_points[each.entry_point][2:]),
                chain_id=network.facts.chain_id,
                signer=Signer(signer_key(each, environ)),
                gas=(each.verification_gas, each.post_op_gas),
                any_fee_wei=fees.wei_of(each.any_fee_gwei),
            )
        )
    return Paymasters(configured)


# For the follower, which needs no signing keys


def settlement_sink(settings: Settings, tables: Tables) -> SettlementSink:
    return SettlementSink(tables.chains.networks(), _payers(settings, tables))


def settlement_loop(settings: Settings, tables: Tables, pool: Pool, routes: Iterable[Route]) -> SettlementLoop:
    chains = [
        BlockReader(route, topics=TOPICS) for route in routes if "user_operations" in family_of(route.network).features
    ]
    return SettlementLoop(LedgerStore(pool), chains, _payers(settings, tables))


def _payers(settings: Settings, tables: Tables) -> Mapping[str, set[bytes]]:
    """The addresses of our paymasters, by network."""
    payers: defaultdict[str, set[bytes]] = defaultdict(set)
    for each in settings.paymasters:
        if (network := tables.chains.find(*each.network.split("/"))) is not None:
            payers[network.id].add(bytes.fromhex(each.address[2:]))
    return payers
