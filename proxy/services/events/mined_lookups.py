"""Find transactions that were mined before a webhook named them.

The follower matches only the blocks that it writes after a webhook was created. So the transaction that stores a webhook also
stores a lookup for each transaction hash, and this loop asks the chain for it. A transaction in a block that the follower has
written becomes the same event, under the same id, as if the follower had matched it; one in a later block is left to the
follower. A transaction that no upstream knows is not mined, or the upstream is behind, so it is looked up once more after a
while. The request that names a transaction pays for both calls (`CALLS_PER_LOOKUP`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from proxy.chains.evm import abi, activity
from proxy.chains.evm.matching import Match
from proxy.core.lru_cache import LruCache
from proxy.errors import Fault
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.enrichment import CHANNEL
from proxy.services.events.notifications import Notifications
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store.postgres import events as store
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.events import MinedLookup
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

# Lookups made together, and the pause after them: a webhook may name a thousand transactions, and upstreams serve others too.
BATCH, PAUSE_S = 50, 0.25
# How long after it was named an unknown transaction is looked up once more. By then every upstream that takes reads has the
# follower's blocks.
UNKNOWN_S = 8.0
CHECK_S, RETRY_S = 20.0, UNKNOWN_S + 0.5
CALLS_PER_LOOKUP = 2
# Bounds memory: transactions that were looked up a moment ago.
MOST_ASKED = 100_000


class MinedLookups:
    """Looks up the transactions of one network's webhooks."""

    def __init__(self, watch: WebhookWatch, drafter: EventDrafter, pool: Pool, internal_calls: InternalCalls) -> None:
        self._watch = watch
        self._drafter = drafter
        self._network = drafter.network
        self._pool = pool
        self._internal_calls = internal_calls
        self._bad = BadRows("mined_lookup")
        # The age at which each transaction was looked up: the loop also wakes up for others.
        self._asked_at: LruCache[tuple[str, str], float] = LruCache(MOST_ASKED)

    def __repr__(self) -> str:
        return f"<MinedLookups {self._network.id}>"

    async def run(self, notifications: Notifications, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        wake = notifications.event_for(CHANNEL, self._network.id)
        while True:
            wake.clear()
            is_done = True
            try:
                is_done = not is_leader() or await self.look_up()
            except (Fault, RpcError) as exc:
                is_done = False
                log.warning(
                    "cannot look up transactions", extra={"network": self._network.id, "reason": str(exc)[:300]}
                )
            await until_set(wake, within_s=CHECK_S if is_done else RETRY_S)

    async def look_up(self) -> bool:
        """Make all lookups once, and return whether none is left."""
        left = 0
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                lookups = await store.lookups(connection, self._network.id, limit=BATCH, offset=left)
            new = [each for each in lookups if self._is_due(each)]
            left += len(lookups) - (await self._end(new) if new else 0)
            if len(lookups) < BATCH:
                return not left
            await asyncio.sleep(PAUSE_S if new else 0)

    def _is_due(self, lookup: MinedLookup) -> bool:
        name = lookup.webhook, lookup.transaction
        asked_at = self._asked_at.get(name)
        if asked_at is not None and lookup.age_s - asked_at < UNKNOWN_S:
            return False
        self._asked_at[name] = lookup.age_s
        return True

    async def _end(self, lookups: Sequence[MinedLookup]) -> int:
        """Write the events of a batch, and return how many of its lookups have ended."""
        calls = [("eth_getTransactionByHash", [each.transaction]) for each in lookups]
        results = await self._internal_calls.call_many(self._network, calls, fresh=True)
        ended = []
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            # By account, because the accounts' counts are locked in this order.
            for each, result in sorted(zip(lookups, results, strict=True), key=lambda pair: self._account_of(pair[0])):
                if await self._ends(connection, each, result):
                    ended.append(each)
            await store.end_lookups(connection, ended)
        for each in ended:
            self._asked_at.pop((each.webhook, each.transaction), None)
        return len(ended)

    def _account_of(self, lookup: MinedLookup) -> str:
        watcher = self._watch.index.find(lookup.webhook)
        return "" if watcher is None else watcher.account

    async def _ends(self, connection: DatabaseConnection, lookup: MinedLookup, result: object) -> bool:
        """Write the event of a lookup, if any. A lookup that fails because of its values counts as ended."""
        with self._bad.skipped(webhook=lookup.webhook):
            async with connection.transaction():
                return await self._is_ended(connection, lookup, result)
        return True

    async def _is_ended(self, connection: DatabaseConnection, lookup: MinedLookup, result: object) -> bool:
        watcher = self._watch.index.find(lookup.webhook)
        if watcher is None or lookup.transaction not in watcher.filter.tx_hashes:
            return True
        place = _place(result)
        if place is None or not isinstance(result, Mapping):
            return lookup.age_s > UNKNOWN_S
        number, block_hash = place
        followed = await store.followed_block(connection, self._network.id, number)
        if followed is None or number > followed[0]:
            return followed is not None
        head, written_hash = followed
        if written_hash not in (None, block_hash):
            # The upstream is on another fork than the follower.
            return False
        (transaction,) = activity.read_transactions([result])
        new = self._drafter.events([Match(watcher, transaction)], block=number, block_hash=block_hash)
        await self._drafter.add(connection, new)
        await store.release(connection, self._network.id, head)
        return True


def _place(result: object) -> tuple[int, bytes] | None:
    """The number and hash of a mined transaction's block."""
    if not isinstance(result, Mapping) or not isinstance(number := result.get("blockNumber"), str):
        return None
    block_hash = abi.unhex(result.get("blockHash"))
    return None if block_hash is None else (int(number, 16), block_hash)
