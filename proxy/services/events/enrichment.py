"""Add the data that events lack after their block is written, so that no database transaction waits for it.

A receipt shows whether a transaction succeeded: a failed one has moved nothing, and most of its events are dropped. A token's
contract returns its symbol and decimals, an NFT's document its metadata. An incomplete event is delivered once all of that is
there, and its body does not change afterwards. While upstreams are unavailable, events wait. Metadata comes from third-party
servers, so it is given a few seconds and then left out. An account chooses these servers with its contracts, so the events of
each account are enriched in a lane of their own: slow servers delay no other account's.
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
from proxy.core.lru_cache import LruCache
from proxy.errors import Fault, Unavailable
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.notifications import Notifications
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store.postgres import events as store
from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.events import IncompleteEvent
from proxy.store.postgres.pool import PATIENT_S, Pool
from proxy.tasks import client_of_task, until_set

log = logging.getLogger("penstock.events")

CHANNEL = "penstock_events"
# Events enriched together. NFT batches are smaller, because metadata is fetched from third-party servers.
BATCH, NFT_BATCH = 200, 16
# Bounds memory: events that are not tried again. Another process tries them if it becomes the follower.
MOST_SET_ASIDE = 10_000
# Timeout for metadata.
METADATA_S = 5.0
# Accounts whose metadata is fetched at a time. Each takes at most a batch and its timeout before others follow.
MOST_LANES = 32
# How often to check without a notification, and how soon incomplete events are retried.
CHECK_S, RETRY_S = 20.0, 1.0


class NamedToken(Protocol):
    @property
    def symbol(self) -> str | None: ...
    @property
    def decimals(self) -> int | None: ...


class TokenSource(Protocol):
    async def known(self, network: Network, contracts: Sequence[bytes], block: int) -> Mapping[bytes, NamedToken]:
        """Return the tokens by contract, as of the block. Raises Unavailable if the network cannot be read."""


class NftSource(Protocol):
    async def read(self, network: Network, contract: bytes, token_id: int) -> Mapping[str, Any]:
        """Return the NFT's metadata. Raises a Fault if there is none."""


class EventEnricher:
    """Enriches the events of one network: with `nfts` those of one account that lack metadata, without it all others."""

    def __init__(
        self,
        drafter: EventDrafter,
        pool: Pool,
        internal_calls: InternalCalls,
        tokens: TokenSource,
        nfts: NftSource | None = None,
        account: str | None = None,
    ) -> None:
        self._drafter = drafter
        self._network = drafter.network
        self._pool = pool
        self._internal_calls = internal_calls
        self._tokens = tokens
        self._nfts = nfts
        self._account = account
        # The position in the queue, whether events were skipped, and when the next pass may begin (None during a pass).
        # Skipped events are retried in the next pass, so that they do not block the events behind them.
        self._cursor = store.FIRST
        self._has_skipped = False
        self._next_pass_at: float | None = None
        self._bad = BadRows("event")
        # How many events were completed or dropped.
        self.completed = 0
        # Events that cannot be completed.
        self._set_aside: LruCache[str, bool] = LruCache(MOST_SET_ASIDE)

    def __repr__(self) -> str:
        kind = " metadata" if self._nfts else ""
        return f"<EventEnricher {self._network.id}{kind}{', some skipped' if self._has_skipped else ''}>"

    async def run(self, notifications: Notifications, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        wake = notifications.event_for(CHANNEL, self._network.id)
        while True:
            wake.clear()
            try:
                while is_leader() and await self.enrich():
                    pass
            except Fault as exc:
                log.warning("cannot enrich events", extra={"network": self._network.id, "reason": str(exc)[:300]})
                self._has_skipped = True
                await asyncio.sleep(RETRY_S)
            await until_set(wake, within_s=RETRY_S if self._has_skipped else CHECK_S)

    async def enrich(self) -> bool:
        """Enrich one batch and return whether there may be more. Events that stay incomplete are skipped until the next
        pass."""
        if self._next_pass_at is not None and time.monotonic() >= self._next_pass_at:
            self.start_over()
        limit = BATCH if self._nfts is None else NFT_BATCH
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            events = await store.list_incomplete(
                connection,
                self._network.id,
                metadata=self._nfts is not None,
                after=self._cursor,
                limit=limit,
                account=self._account,
            )
        if events:
            for event in await self._bad.write([e for e in events if e.id not in self._set_aside], self._complete):
                self._set_aside[event.id] = True
            self._cursor = events[-1].place
        if len(events) == limit:
            return True
        if self._next_pass_at is None:
            self._next_pass_at = time.monotonic() + (RETRY_S if self._has_skipped else 0.0)
        return False

    async def _complete(self, events: Sequence[IncompleteEvent]) -> None:
        try:
            done, dropped = await self._completed(events)
        except RpcError as exc:
            raise Unavailable("no upstream returned the data that events lack") from exc
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await connection.fetchval(sql.webhooks.version_of, self._network.id)
            await store.complete(connection, done, dropped=dropped)
        self.completed += len(done) + len(dropped)
        self._has_skipped = self._has_skipped or len(done) + len(dropped) < len(events)

    def start_over(self) -> None:
        """Begin a new pass at the oldest event."""
        self._cursor, self._has_skipped, self._next_pass_at = store.FIRST, False, None

    async def _completed(
        self, events: Sequence[IncompleteEvent]
    ) -> tuple[list[tuple[IncompleteEvent, bytes]], list[str]]:
        """Return events with their completed bodies, and the events to drop. Events in neither are retried."""
        receipts = await self._receipts(events)
        tokens = await self._token_names(events)
        metadata = await self._metadata(events)
        done: list[tuple[IncompleteEvent, bytes]] = []
        dropped: list[str] = []
        for event in events:
            lacks = event.lacks
            receipt = receipts.get(lacks.get("transaction", ""))
            if "transaction" in lacks and not _is_from_block(receipt, event):
                continue
            data = payloads.completed(
                event.type,
                webhook_bodies.data_of(event.body),
                receipt=receipt,
                needs_success="success" in lacks,
                token=tokens.get(lacks.get("token", "")),
                nft=metadata.get(event.id),
            )
            if data is None:
                dropped.append(event.id)
            else:
                done.append((event, webhook_bodies.with_data(event.body, data)))
        return done, dropped

    async def _receipts(self, events: Sequence[IncompleteEvent]) -> dict[str, Mapping[str, Any]]:
        hashes = [*dict.fromkeys(event.lacks["transaction"] for event in events if "transaction" in event.lacks)]
        if not hashes:
            return {}
        # Not from the cache: a receipt of another fork would stay there until the next block.
        calls = [("eth_getTransactionReceipt", [each]) for each in hashes]
        results = await self._internal_calls.call_many(self._network, calls, fresh=True)
        return {name: receipt for name, receipt in zip(hashes, results, strict=True) if isinstance(receipt, Mapping)}

    async def _token_names(self, events: Sequence[IncompleteEvent]) -> dict[str, EventToken]:
        """Tokens by contract as written in `lacks`, including those without symbol and decimals."""
        addresses = [*dict.fromkeys(event.lacks["token"] for event in events if "token" in event.lacks)]
        if not addresses:
            return {}
        contracts = [bytes.fromhex(each[2:]) for each in addresses]
        # At the events' block or later: a contract may be as new as they are.
        block = max(self._internal_calls.route(self._network).heads.tip, *(event.block or 0 for event in events))
        known = await self._tokens.known(self._network, contracts, block)
        named = {}
        for text, contract in zip(addresses, contracts, strict=True):
            named[text] = EventToken(known[contract].symbol, known[contract].decimals)
            self._drafter.tokens[contract] = named[text]
        return named

    async def _metadata(self, events: Sequence[IncompleteEvent]) -> dict[str, Mapping[str, Any]]:
        """NFT metadata by event."""
        if self._nfts is None:
            return {}
        lacking = [event for event in events if "nft" in event.lacks]
        read = await asyncio.gather(*(self._nft_metadata(*event.lacks["nft"]) for event in lacking))
        return {event.id: each for event, each in zip(lacking, read, strict=True) if each is not None}

    async def _nft_metadata(self, contract: str, token_id: str) -> Mapping[str, Any] | None:
        """None if it is not available, because the token was burnt or the server does not reply."""
        assert self._nfts is not None
        try:
            async with asyncio.timeout(METADATA_S):
                return await self._nfts.read(self._network, bytes.fromhex(contract[2:]), int(token_id))
        except (TimeoutError, Fault, RpcError):
            return None
        except Exception as exc:  # A contract and its server choose the document: one must not stop the others.
            self._bad.set_aside(exc)
            return None


class MetadataLanes:
    """Enriches the events of one network that lack NFT metadata. `make(account)`: the enricher of one account's events."""

    def __init__(self, network: Network, pool: Pool, make: Callable[[str], EventEnricher]) -> None:
        self._network = network
        self._pool = pool
        self._make = make
        # By account: those with incomplete events, and those whose lane is running.
        self._lanes: dict[str, EventEnricher] = {}
        self._running: set[str] = set()
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<MetadataLanes {self._network.id}, {len(self._running)} running>"

    async def run(self, notifications: Notifications, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        self._wake = notifications.event_for(CHANNEL, self._network.id)
        self._running.clear()
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                if is_leader():
                    try:
                        await self._start(group, is_leader)
                    except Fault as exc:
                        log.warning(
                            "cannot find incomplete events",
                            extra={"network": self._network.id, "reason": str(exc)[:300]},
                        )
                await until_set(self._wake, within_s=CHECK_S)

    async def _start(self, group: asyncio.TaskGroup, is_leader: Callable[[], bool]) -> None:
        """Start a lane for each account that has incomplete events and none yet."""
        if len(self._running) >= MOST_LANES:
            return  # The next one that ends wakes the loop.
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            accounts = await store.list_lacking_metadata(
                connection, self._network.id, but=[*self._running], limit=MOST_LANES - len(self._running)
            )
        current = {*accounts, *self._running}
        self._lanes = {account: self._lanes.get(account) or self._make(account) for account in current}
        for account in accounts:
            self._running.add(account)
            group.create_task(self._lane(account, is_leader))

    async def _lane(self, account: str, is_leader: Callable[[], bool]) -> None:
        client_of_task.set(account)
        lane = self._lanes[account]
        before = lane.completed
        try:
            while is_leader() and await lane.enrich():
                pass
        except Fault as exc:
            extra = {"network": self._network.id, "account": account, "reason": str(exc)[:300]}
            log.warning("cannot enrich events", extra=extra)
        if lane.completed == before:
            await asyncio.sleep(RETRY_S)  # Its events wait for something else.
        self._running.discard(account)
        self._wake.set()


def _is_from_block(receipt: Mapping[str, Any] | None, event: IncompleteEvent) -> bool:
    """Whether the receipt is from the event's block, and not from an upstream that is behind or on another fork."""
    if receipt is None or event.block_hash is None:
        return False
    return str(receipt.get("blockHash", "")).lower() == "0x" + event.block_hash.hex()
