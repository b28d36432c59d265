"""Events that wait until the chain itself calls their block safe, or finalized.

The follower's own transaction asks nobody: it writes such events down as waiting, and tells. Here the chain's word is asked
for, once for each head, and what it covers is let go. Where upstreams do not know the words, so many blocks count as the
network's configuration says; while they are away, events wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import assert_never

from proxy.chains.registry import Network
from proxy.core import dialect
from proxy.errors import Fault, Unavailable
from proxy.services.events.enrichment import CHANNEL
from proxy.services.events.notifications import Notifications
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store import events as store
from proxy.store import sql
from proxy.store.events import FinalityTag
from proxy.store.pool import PATIENT_S, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

# How often it is looked beside the notices; how soon after upstreams were away.
LOOK_S, AGAIN_S = 20.0, 2.0


class FinalityGate:
    """Of one network."""

    def __init__(self, network: Network, pool: Pool, internal_calls: InternalCalls) -> None:
        self._network = network
        self._pool = pool
        self._internal_calls = internal_calls
        # The head for which each was asked last.
        self._asked: dict[FinalityTag, int] = {}

    def __repr__(self) -> str:
        return f"<FinalityGate of {self._network.id}, asked at {self._asked}>"

    async def run(self, bell: Notifications, leads: Callable[[], bool]) -> None:
        """A supervised loop, while this process is the network's follower."""
        wake = bell.of(CHANNEL, self._network.id)
        while True:
            wake.clear()
            wait_s = LOOK_S
            try:
                if leads():
                    await self.look()
            except Fault as exc:
                log.warning("finality is not known", extra={"network": self._network.id, "reason": str(exc)[:300]})
                wait_s = AGAIN_S
                await asyncio.sleep(AGAIN_S)
            await until_set(wake, within_s=wait_s)

    async def look(self) -> None:
        """Let go what waits for a word that the chain has spoken since the last head."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            waiting, head = await store.waiting(connection, self._network.id)
        for word in waiting:
            if self._asked.get(word) == head:
                continue
            block = await self._block(word, head)
            async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
                await connection.fetchval(sql.webhooks.version_of, self._network.id)
                await store.release_final(connection, self._network.id, word, block)
            self._asked[word] = head

    async def _block(self, word: FinalityTag, head: int) -> int:
        """The last block that is it."""
        try:
            found = await self._internal_calls.call(self._network, "eth_getBlockByNumber", word, False, fresh=True)
        except RpcError as exc:
            if dialect.classify(exc.error).blame:
                raise Unavailable(f"no upstream says what is {word}") from exc
            found = None
        if isinstance(found, Mapping) and isinstance(number := found.get("number"), str):
            return int(number, 16)
        return head - self._depth(word)

    def _depth(self, word: FinalityTag) -> int:
        final = self._network.facts.finality_blocks
        match word:
            case "finalized":
                return final
            case "safe":
                return (final + 1) // 2
            case _:
                assert_never(word)
