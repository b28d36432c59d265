"""What events lack, found out after their block is written: nobody's transaction waits for it.

A receipt says whether a transaction went through: one that failed has moved nothing, and its event is dropped. A token's
contract says its symbol and decimals, an NFT's document its metadata. An event that came without is told when all of it is
there, once, and its body is final from then on. While upstreams are away events wait; metadata, which is a stranger's, is
waited for shortly and then left out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from proxy.chains.evm import payloads
from proxy.chains.evm.payloads import EventToken
from proxy.chains.registry import Network
from proxy.core import webhook_bodies
from proxy.errors import Fault
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.notifications import Notifications
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store import events as store
from proxy.store import sql
from proxy.store.events import IncompleteEvent
from proxy.store.pool import PATIENT_S, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

CHANNEL = "penstock_events"
# At once; and of NFTs, whose metadata is fetched from anywhere.
BATCH, NFT_BATCH = 200, 16
# How long metadata is waited for.
METADATA_S = 5.0
# How often it is looked beside the notices; how soon what could not be found out is tried again.
LOOK_S, AGAIN_S = 20.0, 1.0


class NamedToken(Protocol):
    @property
    def symbol(self) -> str | None: ...
    @property
    def decimals(self) -> int | None: ...


class TokenSource(Protocol):
    async def known(self, network: Network, contracts: Sequence[bytes], block: int) -> Mapping[bytes, NamedToken]:
        """What each says of itself at the block; Unavailable where the network cannot be read."""


class NftSource(Protocol):
    async def read(self, network: Network, contract: bytes, token_id: int) -> Mapping[str, Any]:
        """Its metadata; a Fault where there is none."""


class EventEnricher:
    """Of one network. With `nfts` those events that lack metadata, without it all others."""

    def __init__(
        self,
        composition: EventDrafter,
        pool: Pool,
        internal_calls: InternalCalls,
        tokens: TokenSource,
        nfts: NftSource | None = None,
    ) -> None:
        self._composition = composition
        self._network = composition.network
        self._pool = pool
        self._internal_calls = internal_calls
        self._tokens = tokens
        self._nfts = nfts
        # How far the queue is walked, whether anything was left behind, and when the next walk may begin; None: not before the
        # end of this one. However much is left behind, what comes after it has its turn.
        self._place = store.FIRST
        self._left = False
        self._again_at: float | None = None

    def __repr__(self) -> str:
        return f"<EventEnricher {self._network.id}{' metadata' if self._nfts else ''}{', some left' if self._left else ''}>"

    async def run(self, bell: Notifications, leads: Callable[[], bool]) -> None:
        """A supervised loop, while this process is the network's follower."""
        wake = bell.of(CHANNEL, self._network.id)
        while True:
            wake.clear()
            try:
                while leads() and await self.compose():
                    pass
            except (Fault, RpcError) as exc:
                log.warning("events are not completed", extra={"network": self._network.id, "reason": str(exc)[:300]})
                self._left = True
                await asyncio.sleep(AGAIN_S)
            await until_set(wake, within_s=AGAIN_S if self._left else LOOK_S)

    async def compose(self) -> bool:
        """One round; whether there may be more. What cannot be completed is passed over until the next walk."""
        if self._again_at is not None and time.monotonic() >= self._again_at:
            self.start_over()
        limit = BATCH if self._nfts is None else NFT_BATCH
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            found = await store.list_incomplete(
                connection, self._network.id, metadata=self._nfts is not None, after=self._place, limit=limit
            )
        if found:
            await self._complete(found)
        if len(found) == limit:
            return True
        if self._again_at is None:
            self._again_at = time.monotonic() + (AGAIN_S if self._left else 0.0)
        return False

    async def _complete(self, found: Sequence[IncompleteEvent]) -> None:
        done, dropped = await self._completed(found)
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await connection.fetchval(sql.webhooks.version_of, self._network.id)
            await store.complete(connection, done, dropped=dropped)
        self._left = self._left or len(done) + len(dropped) < len(found)
        self._place = found[-1].place

    def start_over(self) -> None:
        """From the oldest on."""
        self._place, self._left, self._again_at = store.FIRST, False, None

    async def _completed(self, found: Sequence[IncompleteEvent]) -> tuple[dict[str, bytes], list[str]]:
        """Bodies that lack nothing any more, and events that are none. What is in neither is to be tried again."""
        receipts = await self._receipts(found)
        tokens = await self._named(found)
        metadata = await self._metadata(found)
        done: dict[str, bytes] = {}
        dropped: list[str] = []
        for event in found:
            lacks = event.lacks
            receipt = receipts.get(lacks.get("transaction", ""))
            if "transaction" in lacks and not _is_of(receipt, event):
                continue
            data = payloads.completed(
                event.type,
                webhook_bodies.data_of(event.body),
                receipt=receipt,
                token=tokens.get(lacks.get("token", "")),
                nft=metadata.get(event.id),
            )
            if data is None:
                dropped.append(event.id)
            else:
                done[event.id] = webhook_bodies.with_data(event.body, data)
        return done, dropped

    async def _receipts(self, found: Sequence[IncompleteEvent]) -> dict[str, Mapping[str, Any]]:
        wanted = [*dict.fromkeys(event.lacks["transaction"] for event in found if "transaction" in event.lacks)]
        if not wanted:
            return {}
        asked = await self._internal_calls.call_many(
            self._network, [("eth_getTransactionReceipt", [each]) for each in wanted]
        )
        return {name: receipt for name, receipt in zip(wanted, asked, strict=True) if isinstance(receipt, Mapping)}

    async def _named(self, found: Sequence[IncompleteEvent]) -> dict[str, EventToken]:
        """By contract as it is written in `lacks`. One that says nothing of itself is known to."""
        wanted = [*dict.fromkeys(event.lacks["token"] for event in found if "token" in event.lacks)]
        if not wanted:
            return {}
        contracts = [bytes.fromhex(each[2:]) for each in wanted]
        # Not before the events: a contract may be as new as they are.
        block = max(self._internal_calls.route(self._network).heads.tip, *(event.block or 0 for event in found))
        known = await self._tokens.known(self._network, contracts, block)
        named = {}
        for text, contract in zip(wanted, contracts, strict=True):
            named[text] = EventToken(known[contract].symbol, known[contract].decimals)
            self._composition.learn(contract, named[text])
        return named

    async def _metadata(self, found: Sequence[IncompleteEvent]) -> dict[str, Mapping[str, Any]]:
        """By event."""
        if self._nfts is None:
            return {}
        wanted = [event for event in found if "nft" in event.lacks]
        read = await asyncio.gather(*(self._described(*event.lacks["nft"]) for event in wanted))
        return {event.id: each for event, each in zip(wanted, read, strict=True) if each is not None}

    async def _described(self, contract: str, token_id: str) -> Mapping[str, Any] | None:
        """None where it cannot be had: a token that was burnt, a server that does not answer."""
        assert self._nfts is not None
        try:
            async with asyncio.timeout(METADATA_S):
                return await self._nfts.read(self._network, bytes.fromhex(contract[2:]), int(token_id))
        except (TimeoutError, Fault, RpcError):
            return None


def _is_of(receipt: Mapping[str, Any] | None, event: IncompleteEvent) -> bool:
    """Whether it is the receipt that the event's block has: not an upstream's that is behind, or on another fork."""
    if receipt is None or event.block_hash is None:
        return False
    return str(receipt.get("blockHash", "")).lower() == "0x" + event.block_hash.hex()
