"""Find transactions that were mined before a webhook named them.

The follower matches only the blocks that it writes after a webhook was created. So the transaction that stores a webhook also
stores a lookup for each transaction hash, and this loop asks the chain for it. A transaction in a block that the follower has
written becomes the same event, under the same id, as if the follower had matched it; one in a later block is left to the
follower. A transaction that no upstream knows is not mined, or the upstream is behind, so it is asked for again for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from proxy.chains.evm import abi, activity
from proxy.chains.evm.matching import Match
from proxy.errors import Fault
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.enrichment import CHANNEL
from proxy.services.events.notifications import Notifications
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store import events as store
from proxy.store.events import MinedLookup
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

# Lookups made together, and the pause after them: a webhook may name a thousand transactions, and upstreams serve others too.
BATCH, PAUSE_S = 50, 0.25
CHECK_S, RETRY_S = 20.0, 3.0
# How long an unknown transaction is asked for. By then every upstream that takes reads has the follower's blocks.
UNKNOWN_S = 8.0


class MinedLookups:
    """Looks up the transactions of one network's webhooks."""

    def __init__(self, watch: WebhookWatch, drafter: EventDrafter, pool: Pool, internal_calls: InternalCalls) -> None:
        self._watch = watch
        self._drafter = drafter
        self._network = drafter.network
        self._pool = pool
        self._internal_calls = internal_calls

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
        cursor, is_done = store.FIRST_LOOKUP, True
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                found = await store.lookups(connection, self._network.id, after=cursor, limit=BATCH)
            if found:
                is_done = await self._end(found) and is_done
                cursor = found[-1].place
            if len(found) < BATCH:
                return is_done
            await asyncio.sleep(PAUSE_S)

    async def _end(self, found: Sequence[MinedLookup]) -> bool:
        """Write the events of a batch, and return whether all of its lookups have ended."""
        calls = [("eth_getTransactionByHash", [each.transaction]) for each in found]
        results = await self._internal_calls.call_many(self._network, calls, fresh=True)
        ended = []
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            for each, result in zip(found, results, strict=True):
                if await self._is_ended(connection, each, result):
                    ended.append(each)
            await store.end_lookups(connection, ended)
        return len(ended) == len(found)

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
