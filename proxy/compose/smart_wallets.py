"""Builds the smart wallet feature: wallets and the bundler."""

from __future__ import annotations

from proxy.compose.networks import NetworkBuilder
from proxy.services.accounts.metering import Meters
from proxy.services.bundler.bundler_guard import BundlerGuard
from proxy.services.bundler.cleanup import OperationCleanup
from proxy.services.bundler.lookup import OperationLookup
from proxy.services.rpc.dispatcher import Takeovers
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Networks
from proxy.services.wallets import WalletService
from proxy.settings import Settings, Tables
from proxy.store.postgres.operations import OperationStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.wallets import WalletStore
from proxy.tasks import Tasks
from proxy.web.rest.endpoint import RestHandler
from proxy.web.rest.wallets import WalletHandlers


def operation_cleanup(settings: Settings, pool: Pool) -> OperationCleanup:
    """For the follower process."""
    given = settings.bundler
    return OperationCleanup(OperationStore(pool), keep_days=given.keep_days, keep_unsent_days=given.keep_unsent_days)


class SmartWalletFeature:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        internal_calls: InternalCalls,
        networks: Networks,
        builder: NetworkBuilder,
        tasks: Tasks,
        meters: Meters,
    ) -> None:
        self.operations = OperationStore(pool)
        self.lookup = OperationLookup(
            self.operations, internal_calls, tasks, meters, search_blocks=settings.bundler.search_blocks
        )
        self.wallets = WalletService(
            WalletStore(pool),
            internal_calls,
            tables.chains,
            proxies=tables.proxies,
            default=settings.wallets.version,
            most={name: plan.wallets for name, plan in tables.plans.items()},
        )
        self.bundlers: Networks = builder.bundlers(
            networks,
            Takeovers(nulls=self.lookup),
            guard=lambda dispatcher: BundlerGuard(dispatcher, self.operations, internal_calls, tasks, meters),
        )

    def __repr__(self) -> str:
        return f"<SmartWalletFeature {self.wallets!r}, {self.bundlers!r}>"

    def handlers(self) -> dict[str, RestHandler]:
        """The handlers, by operation id."""
        return WalletHandlers(self.wallets).handlers()
