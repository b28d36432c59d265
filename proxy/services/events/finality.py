"""Release events that wait until their block is safe or finalized.

The follower makes no calls inside its transaction: it stores such events as waiting and sends a notification. This loop then
queries the chain's `safe` and `finalized` block, once per head, and releases the events up to it. If the upstreams do not
support these tags, the network's configured finality depth counts. While upstreams are unavailable, events wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import assert_never

from proxy.chains.evm import head_reader
from proxy.chains.registry import Network
from proxy.core import jsonrpc, upstream_errors
from proxy.errors import Fault, Unavailable
from proxy.services.events.enrichment import CHANNEL
from proxy.services.events.notifications import Notifications
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store.postgres import events as store
from proxy.store.postgres import sql
from proxy.store.postgres.events import FinalityTag
from proxy.store.postgres.pool import PATIENT_S, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

# How often to check without a notification, and how soon after a failure.
CHECK_S, RETRY_S = 20.0, 2.0


class FinalityGate:
    """Releases the waiting events of one network."""

    def __init__(self, network: Network, pool: Pool, internal_calls: InternalCalls) -> None:
        self._network = network
        self._pool = pool
        self._internal_calls = internal_calls
        # The head at which each tag was last queried.
        self._checked_at: dict[FinalityTag, int] = {}

    def __repr__(self) -> str:
        return f"<FinalityGate of {self._network.id}, checked at {self._checked_at}>"

    async def run(self, notifications: Notifications, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        wake = notifications.event_for(CHANNEL, self._network.id)
        while True:
            wake.clear()
            wait_s = CHECK_S
            try:
                if is_leader():
                    await self.release()
            except Fault as exc:
                log.warning(
                    "cannot read the final block", extra={"network": self._network.id, "reason": str(exc)[:300]}
                )
                wait_s = RETRY_S
                await asyncio.sleep(RETRY_S)
            await until_set(wake, within_s=wait_s)

    async def release(self) -> None:
        """Release the waiting events whose block has become safe or finalized since the last head. One tag that fails does not
        hold up the other."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            waiting, head = await store.waiting(connection, self._network.id)
        failure: Fault | None = None
        for tag in waiting:
            if self._checked_at.get(tag) == head:
                continue
            try:
                await self._release(tag, await self._block(tag, head))
            except Fault as exc:
                failure = exc
                continue
            self._checked_at[tag] = head
        if failure is not None:
            raise failure

    async def _release(self, tag: FinalityTag, block: int) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await connection.fetchval(sql.webhooks.version_of, self._network.id)
            await store.release_final(connection, self._network.id, tag, block)

    async def _block(self, tag: FinalityTag, head: int) -> int:
        """The number of the last block with this tag."""
        try:
            header = await self._internal_calls.raw(self._network, "eth_getBlockByNumber", tag, False, fresh=True)
        except RpcError as exc:
            if upstream_errors.classify(exc.error).blame:
                raise Unavailable(f"no upstream returned the {tag} block") from exc
            header = jsonrpc.NULL
        if header == jsonrpc.NULL:
            return head - self._depth(tag)
        number = head_reader.read_number(header)
        if number is None:
            raise Unavailable(f"the {tag} block that an upstream returned has no valid number")
        return number

    def _depth(self, tag: FinalityTag) -> int:
        final = self._network.facts.finality_blocks
        match tag:
            case "finalized":
                return final
            case "safe":
                return (final + 1) // 2
            case _:
                assert_never(tag)
