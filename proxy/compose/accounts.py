"""Builds the accounts feature: keys, quotas, admission and usage. Admission decides whether a request may go on."""

from __future__ import annotations

from proxy.compose.fleet import FleetFeature
from proxy.services.accounts.admission import Admission, AuthFailures
from proxy.services.accounts.key_copy import KeyCopy
from proxy.services.accounts.keyring import Keyring, utc_day
from proxy.services.accounts.known_uses import KnownUses
from proxy.services.accounts.quotas import Quotas
from proxy.services.usage import UsageService
from proxy.settings import Settings, Tables
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.local_copy import CopyDirectory
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.quotas import QuotaStore
from proxy.store.postgres.replica import ReplicaReads
from proxy.store.postgres.usage import UsageStore
from proxy.store.postgres.usage_spool import UsageSpool
from proxy.store.shared_memory.bucket_table import SharedBucketTable
from proxy.store.shared_memory.rate_buckets import RateBuckets
from proxy.tasks import Tasks


def known_uses(tables: Tables) -> KnownUses:
    """Every network and method of the data files."""
    methods = [name for table in tables.methods.values() for name in table]
    return KnownUses([network.id for network in tables.chains.networks()], [*methods, *tables.prices.paymaster])


class AccountsFeature:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        buckets: RateBuckets,
        addresses: SharedBucketTable,
        *,
        copies: CopyDirectory | None = None,
        reads: ReplicaReads | None = None,
        fleet: FleetFeature | None = None,
    ) -> None:
        """`reads`: where usage is read."""
        given = settings.keys
        peppers = {"pepper": given.pepper, "previous_pepper": given.previous_pepper}
        self.keys = KeyStore(pool, plans={name: plan.keys for name, plan in tables.plans.items()}, **peppers)
        copy = KeyCopy(copies.copy_of("keys") if copies else None)
        self.keyring = Keyring(self.keys, buckets, plans=tables.plans, reload_s=given.reload_s, copy=copy, **peppers)
        self.quotas = Quotas(
            QuotaStore(pool),
            chunk=settings.quotas.chunk,
            flush_s=settings.quotas.flush_s,
            day=utc_day,
            accounts=self.keyring.accounts.values,
        )
        note = fleet.failures.note if fleet else None
        failures = AuthFailures(given.auth_failures_per_minute, addresses, note)
        leases = fleet.leases if fleet else None
        self.admission = Admission(self.keyring, buckets, self.quotas, failures, leases)
        self.usage = self._usage_service(settings, UsageStore(pool, reads), copies)

    def _usage_service(self, settings: Settings, usage: UsageStore, copies: CopyDirectory | None) -> UsageService:
        return UsageService(
            usage,
            self.keyring.touched,
            flush_s=settings.usage.flush_s,
            rollup_s=settings.usage.rollup_s,
            spool=UsageSpool(usage, copies.path / "usage") if copies else None,
            keep_s={
                "minute": settings.usage.keep_minutes_s,
                "hour": settings.usage.keep_hours_s,
                "day": settings.usage.keep_days_s,
            },
        )

    def __repr__(self) -> str:
        return f"<AccountsFeature {self.keyring!r}>"

    def start(self, tasks: Tasks, notices: Notices) -> None:
        """Start the loops that follow the keys and store quotas and usage."""
        self.keyring.listen(notices)
        tasks.start("keyring", self.keyring.follow)
        tasks.start("quotas", self.quotas.run)
        tasks.start("usage", self.usage.run)
        tasks.start("usage upkeep", self.usage.keep)

    async def close(self) -> None:
        """Store the counts that are still in memory."""
        await self.usage.close()
        await self.quotas.close()
