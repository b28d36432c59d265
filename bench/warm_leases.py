"""Leased limits whose tokens are all there, as if Valkey had granted them: no call has to ask for any."""

import time

from proxy.store.shared_memory.lease_records import LeaseGrant
from proxy.store.shared_memory.leased_buckets import LeasedBuckets

# Longer than any measurement takes.
LEASE_S = 600.0


def lease_all(buckets: LeasedBuckets) -> None:
    """Give every limit a second's worth more."""
    buckets.away = False
    now = time.monotonic()
    given = LeaseGrant(1.0, 1.0, now + LEASE_S, 0.0, epoch=1, requests=0, all_requests=0.0, there_s=0.0)
    for rate, guard in buckets.rates.values():
        buckets.grant(rate, guard, now, given, 0.0)
