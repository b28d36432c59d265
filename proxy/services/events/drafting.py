"""Turn matches into stored events: ids, bodies, and the block that each event waits for. Every event is stored once.

Events wait in the database until their account has deliveries left, so the number that an account stores per day is limited by
its plan. Further events are dropped and counted. Corrections of delivered events are always stored.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from proxy import telemetry
from proxy.chains.evm import payloads
from proxy.chains.evm.facts import Header
from proxy.chains.evm.matching import Match
from proxy.chains.evm.payloads import EventContext, EventToken
from proxy.chains.evm.watch_index import WatchFilter
from proxy.chains.registry import Network
from proxy.core import webhook_bodies
from proxy.core.iso_time import day_of_unix, iso_millis, iso_of_unix
from proxy.core.lru_cache import LruCache
from proxy.core.webhook_bodies import BodyChain
from proxy.store.postgres import events as store
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.events import EventDay, NewEvent, WithdrawnEvent
from proxy.store.postgres.pool import DatabaseConnection

log = logging.getLogger("penstock.events")

# Tokens cached by contract. Events of a cached token need no enrichment.
CACHED_TOKENS = 20_000


class EventDrafter:
    """Drafts the events of one network."""

    def __init__(self, network: Network, day_limits: Mapping[str, int]) -> None:
        """`day_limits`: the events that an account may store per day, by plan; 0 means no limit."""
        assert network.facts.chain_id is not None
        self.network = network
        self._day_limits = day_limits
        self.chain = BodyChain(network.word(live=True), network.facts.chain_id)
        self.tokens: LruCache[bytes, EventToken] = LruCache(CACHED_TOKENS)
        self._bad = BadRows("event")

    def __repr__(self) -> str:
        return f"<EventDrafter of {self.network.id}, {len(self.tokens)} tokens>"

    def events(
        self,
        matches: Iterable[Match],
        *,
        block: int | None = None,
        block_hash: bytes | None = None,
        header: Header | None = None,
        time: int = 0,
    ) -> list[NewEvent]:
        """Draft one event for each match."""
        context = EventContext(
            self.chain.name,
            self.network.chain.native.symbol,
            self.network.chain.native.decimals,
            block,
            "0x" + block_hash.hex() if block_hash else "",
            iso_of_unix(time),
        )
        at = now()
        drafted = []
        for match in matches:
            with self._bad.skipped(webhook=match.watcher.id):
                drafted.append(self._event(match, context, block_hash, header, at))
        return drafted

    def _event(
        self, match: Match, context: EventContext, block_hash: bytes | None, header: Header | None, at: str
    ) -> NewEvent:
        watcher = match.watcher
        payload = payloads.payload_of(match, context, header=header, tokens=self.tokens)
        event = webhook_bodies.event_id(watcher.id, watcher.event_type, self.network.id, context.hash, *payload.at)
        body = webhook_bodies.body_of(event, watcher.event_type, watcher.id, chain=self.chain, at=at, data=payload.data)
        return NewEvent(
            id=event,
            webhook=watcher.id,
            type=watcher.event_type,
            body=body,
            block=context.block,
            block_hash=block_hash,
            lacks=payload.lacks or None,
            after_block=None if context.block is None else _after(watcher.filter, context.block),
            finality=None
            if context.block is None or watcher.filter.finality == "included"
            else watcher.filter.finality,
            day=_day(watcher.filter, header),
            account=watcher.account,
        )

    async def add(self, connection: DatabaseConnection, new: Sequence[NewEvent]) -> None:
        """Store each event once. An event that was withdrawn before gets a new id, so that it is delivered again."""
        if not new:
            return
        days = await store.read_days(connection, {event.account for event in new}, self._day_limits)
        kept, dropped = _within(new, days)
        stored = Counter[str]()

        async def add(part: Sequence[NewEvent]) -> None:
            stored.update(await self._add(connection, part))

        await self._bad.write(kept, add)
        limited = {account: count for account, count in stored.items() if account in days}
        await store.count_events(connection, self.network.id, stored=limited, dropped=dropped)
        self._report(dropped, days)

    def _report(self, dropped: Mapping[str, int], days: Mapping[str, EventDay]) -> None:
        for account, count in dropped.items():
            telemetry.events_dropped_total.labels(self.network.id).inc(count)
            if not days[account].dropped:
                log.warning(
                    "daily limit of webhook events reached: further events are dropped until 00:00 UTC",
                    extra={"account": account},
                )

    async def _add(self, connection: DatabaseConnection, new: Sequence[NewEvent]) -> Counter[str]:
        """Store all of the events or none, in a part of the caller's transaction. Returns how many were new, by account."""
        time = 0
        remaining = new
        stored = Counter[str]()
        async with connection.transaction():
            while remaining:
                added = await store.add(connection, self.network.id, remaining)
                for event in remaining:
                    if event.id in added:
                        telemetry.events_total.labels(self.network.id, event.type).inc()
                        stored[event.account] += 1
                known = [event for event in remaining if event.id not in added]
                withdrawn = await store.withdrawn(connection, [event.id for event in known]) if known else set()
                time += 1
                remaining = [self._repeated(event, time) for event in known if event.id in withdrawn]
        return stored

    async def correct(self, connection: DatabaseConnection, withdrawn: Sequence[WithdrawnEvent]) -> None:
        """Store the events that correct those of removed blocks."""

        async def add(part: Sequence[NewEvent]) -> None:
            async with connection.transaction():
                await store.add(connection, self.network.id, part)

        await self._bad.write(self.corrections(withdrawn), add)

    def _repeated(self, event: NewEvent, time: int) -> NewEvent:
        """The event with the id of its next occurrence, because it was withdrawn before."""
        name = webhook_bodies.event_id(event.webhook, event.type, event.id, time=time)
        return replace(event, id=name, body=event.body.replace(event.id.encode(), name.encode(), 1))

    def corrections(self, withdrawn: Iterable[WithdrawnEvent]) -> list[NewEvent]:
        """Draft the events that correct those of removed blocks."""
        at = now()
        drafted = []
        for event in withdrawn:
            with self._bad.skipped(event=event.id):
                kind, data = webhook_bodies.correction_of(event.body)
                name = webhook_bodies.event_id(event.webhook, kind, event.id)
                body = webhook_bodies.body_of(name, kind, event.webhook, chain=self.chain, at=at, data=data)
                drafted.append(NewEvent(id=name, webhook=event.webhook, type=kind, body=body, takes_back=event.id))
        return drafted


def _within(new: Sequence[NewEvent], days: Mapping[str, EventDay]) -> tuple[list[NewEvent], Counter[str]]:
    """The events that their accounts may store today, and the number of others by account."""
    room = {account: day.room for account, day in days.items()}
    kept, dropped = list[NewEvent](), Counter[str]()
    for event in new:
        left = room.get(event.account)
        if left == 0:
            dropped[event.account] += 1
            continue
        if left is not None:
            room[event.account] = left - 1
        kept.append(event)
    return kept, dropped


def _day(watch_filter: WatchFilter, header: Header | None) -> datetime.date | None:
    """The day of the block. None if the event may also be drafted without the header: after a lookup by transaction hash."""
    return None if header is None or watch_filter.tx_hashes else day_of_unix(int(header.timestamp, 16))


def _after(watch_filter: WatchFilter, block: int) -> int | None:
    """The block that must exist, or be final, before the event is delivered. An included block has one confirmation."""
    if watch_filter.finality != "included":
        return block
    return block + watch_filter.confirmations - 1 if watch_filter.confirmations > 1 else None


def now() -> str:
    """The present with milliseconds."""
    return iso_millis(datetime.datetime.now(datetime.UTC))
