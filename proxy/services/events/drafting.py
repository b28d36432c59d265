"""From what matched to events as they are stored: names, bodies, how long each has to wait, and each of them once."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from proxy import telemetry
from proxy.chains.evm import payloads
from proxy.chains.evm.facts import Header
from proxy.chains.evm.matching import Match
from proxy.chains.evm.payloads import EventPlace, EventToken
from proxy.chains.evm.watch_index import WatchFilter
from proxy.chains.registry import Network
from proxy.core import webhook_bodies
from proxy.core.iso_time import iso_millis, iso_of_unix
from proxy.core.webhook_bodies import BodyChain
from proxy.store import events as store
from proxy.store.events import NewEvent, WithdrawnEvent
from proxy.store.pool import DatabaseConnection

# Tokens that are remembered: an event of one of these is whole at once.
REMEMBERED = 20_000


class EventDrafter:
    """One network's."""

    def __init__(self, network: Network) -> None:
        assert network.facts.chain_id is not None
        self.network = network
        self.chain = BodyChain(network.word(live=True), network.facts.chain_id)
        self.tokens: OrderedDict[bytes, EventToken] = OrderedDict()

    def __repr__(self) -> str:
        return f"<EventDrafter of {self.network.id}, {len(self.tokens)} tokens>"

    def learn(self, contract: bytes, token: EventToken) -> None:
        self.tokens[contract] = token
        if len(self.tokens) > REMEMBERED:
            self.tokens.popitem(last=False)

    def events(
        self,
        matches: Iterable[Match],
        *,
        block: int | None = None,
        block_hash: bytes | None = None,
        header: Header | None = None,
        time: int = 0,
    ) -> list[NewEvent]:
        """What is to be stored, one for each match."""
        place = EventPlace(
            self.chain.name,
            self.network.chain.native.symbol,
            self.network.chain.native.decimals,
            block,
            "0x" + block_hash.hex() if block_hash else "",
            iso_of_unix(time),
        )
        at = now()
        return [self._event(match, place, block_hash, header, at) for match in matches]

    def _event(
        self, match: Match, place: EventPlace, block_hash: bytes | None, header: Header | None, at: str
    ) -> NewEvent:
        watcher = match.watcher
        payload = payloads.payload_of(match, place, header=header, tokens=self.tokens)
        event = webhook_bodies.event_id(watcher.id, watcher.event_type, self.network.id, place.hash, *payload.at)
        body = webhook_bodies.body_of(event, watcher.event_type, watcher.id, chain=self.chain, at=at, data=payload.data)
        return NewEvent(
            id=event,
            webhook=watcher.id,
            type=watcher.event_type,
            body=body,
            block=place.block,
            block_hash=block_hash,
            lacks=payload.lacks or None,
            after_block=None if place.block is None else _after(watcher.filter, place.block),
            finality=None if place.block is None or watcher.filter.finality == "included" else watcher.filter.finality,
        )

    async def add(self, connection: DatabaseConnection, new: Sequence[NewEvent]) -> None:
        """Each once. What was told before and taken back is told again, under another name."""
        time = 0
        wanted = new
        while wanted:
            added = await store.add(connection, self.network.id, wanted)
            for event in wanted:
                if event.id in added:
                    telemetry.events_total.labels(self.network.id, event.type).inc()
            known = [event for event in wanted if event.id not in added]
            back = await store.withdrawn(connection, [event.id for event in known]) if known else set()
            time += 1
            wanted = [self._again(event, time) for event in known if event.id in back]

    def _again(self, event: NewEvent, time: int) -> NewEvent:
        """The event under the name of its next time, because it was told before and taken back."""
        name = webhook_bodies.event_id(event.webhook, event.type, event.id, time=time)
        return NewEvent(
            id=name,
            webhook=event.webhook,
            type=event.type,
            body=event.body.replace(event.id.encode(), name.encode(), 1),
            block=event.block,
            block_hash=event.block_hash,
            lacks=event.lacks,
            after_block=event.after_block,
            finality=event.finality,
        )

    def corrections(self, gone: Iterable[WithdrawnEvent]) -> list[NewEvent]:
        """What takes events back that are not true any more."""
        at = now()
        found = []
        for event in gone:
            kind, data = webhook_bodies.correction_of(event.body)
            name = webhook_bodies.event_id(event.webhook, kind, event.id)
            body = webhook_bodies.body_of(name, kind, event.webhook, chain=self.chain, at=at, data=data)
            found.append(NewEvent(id=name, webhook=event.webhook, type=kind, body=body, takes_back=event.id))
        return found


def _after(wanted: WatchFilter, block: int) -> int | None:
    """The block that must be there, or be final, first. A block that is included has one confirmation."""
    if wanted.finality != "included":
        return block
    return block + wanted.confirmations - 1 if wanted.confirmations > 1 else None


def now() -> str:
    """The present with milliseconds."""
    return iso_millis(datetime.datetime.now(datetime.UTC))
