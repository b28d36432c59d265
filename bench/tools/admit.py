"""Load every key of a database, admit requests with random keys, and print the CPU time per request.

Two processes can share the buckets, as two workers of a host do. CPU time excludes waiting. A process alone also compares
limits leased from Valkey with those of one host. All leases are there already: none has to be asked for.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.warm_leases import lease_all
from proxy import settings as settings_room
from proxy.core import access
from proxy.core.access import Key
from proxy.core.presented_key import PresentedKey
from proxy.services.accounts.admission import Admission, AuthFailures
from proxy.services.accounts.keyring import Keyring, utc_day
from proxy.services.accounts.quotas import Quotas
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.quotas import QuotaStore
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.leased_buckets import LeasedBuckets
from proxy.store.shared_memory.rate_buckets import SharedBuckets, UnsharedBuckets

ROUNDS = 5
# The comparison takes more, shorter rounds: the difference is small.
WARM_ROUNDS = 15


async def main(url: str, buckets_fd: int, keys_file: str, count: int, pepper: str, shared: bool) -> None:
    plans = settings_room.load_tables().plans
    pool = Pool(url, size=2, acquire_timeout_s=5.0)
    await pool.open()
    buckets = (SharedBuckets if shared else UnsharedBuckets)(buckets_fd)
    store = KeyStore(pool, pepper=pepper, plans={name: plan.keys for name, plan in plans.items()})
    keyring = Keyring(store, buckets, plans=plans, pepper=pepper, reload_s=5.0)
    began = time.perf_counter()
    await keyring.load()
    loaded_s = time.perf_counter() - began
    quotas = Quotas(QuotaStore(pool), chunk=1000, flush_s=1.0, day=utc_day, accounts=keyring.accounts.values)
    memory = HostMemory(host_memory.create())
    failures = AuthFailures(60, memory.addresses)
    admission = Admission(keyring, buckets, quotas, failures)
    with open(keys_file) as file:
        texts = file.read().split()
    costs = [_admit(admission, random.choices(texts, k=count)) for _ in range(ROUNDS)]
    found: dict[str, Any] = {"keys": len(keyring), "loaded_s": loaded_s, "us": min(costs), "all_us": costs}
    if not shared:
        leased = LeasedBuckets.of_accounts(buckets_fd, memory.fd, alone=True)
        found["warm_us"] = _compare(admission, Admission(keyring, leased, quotas, failures), leased, texts, count)
    print(json.dumps(found))
    await pool.close()


def _admit(admission: Admission, texts: list[str]) -> float:
    """Return µs of CPU per request: identify the key, check the scope, charge, make headers."""
    scope = access.SCOPE_BIT["rpc:read"]
    began = time.process_time()
    for text in texts:
        now = time.monotonic()
        key = admission.authenticate(PresentedKey(text), "127.0.0.1", now)
        admission.authorize(key, scope)
        admission.charge(key, 1, 2, now)
        admission.headers(key, now)
    return (time.process_time() - began) / len(texts) * 1e6


def _charge(admission: Admission, keys: list[Key]) -> float:
    """Return µs of CPU per request for the charge alone."""
    began = time.process_time()
    for key in keys:
        assert admission.charge(key, 1, 2, time.monotonic()) is None
    return (time.process_time() - began) / len(keys) * 1e6


def _compare(
    plain: Admission, leased: Admission, buckets: LeasedBuckets, texts: list[str], count: int
) -> dict[str, dict[str, list[float]]]:
    """The costs of each round, by figure and kind of limit. Both kinds take turns."""
    keys = [plain.authenticate(PresentedKey(text), "127.0.0.1", time.monotonic()) for text in texts]
    for key in keys:
        key.account.left = key.account.day_limit
        buckets.reserve_rates(key.rate, None)
    works: dict[str, Callable[[Admission], float]] = {
        "request": lambda admission: _admit(admission, random.choices(texts, k=count)),
        "charge": lambda admission: _charge(admission, random.choices(keys, k=count)),
    }
    costs: dict[str, dict[str, list[float]]] = {name: {"plain": [], "leased": []} for name in works}
    for _ in range(WARM_ROUNDS):
        for name, work in works.items():
            lease_all(buckets)
            costs[name]["plain"].append(work(plain))
            costs[name]["leased"].append(work(leased))
    return costs


if __name__ == "__main__":
    url, buckets_fd, keys_file, count, pepper, shared = sys.argv[1:]
    asyncio.run(main(url, int(buckets_fd), keys_file, int(count), pepper, shared == "shared"))
